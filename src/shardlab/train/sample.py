"""Text that a model writes: samples during a training run, and the answers of a conversation.

`continue_prompt` writes a sample during training; `ParallelWriter` generates its tokens on all ranks. `Conversation`
holds the turns of `shardlab sample --chat`. Other functions turn tokens into text and choose the number of threads.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import codecs
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.text import counted, printable
from shardlab.execute.collect import gather_layer
from shardlab.execute.state import State
from shardlab.models import Blocks, Model, MoE
from shardlab.models.model import POSITIONS
from shardlab.models.tensors import Initial, Share, TextGenerator, TokenSampling, named_views, whole_parameters
from shardlab.train.data import Corpus
from shardlab.train.data.chat import ChatTemplate, Message
from shardlab.train.data.tokenizers import Tokenizer, decode_incrementally
from shardlab.train.launch.environment import asked_threads

SAMPLE_TOKENS = 128
"""Number of tokens that are generated after the prompt of a sample."""

PROMPT_BYTES = 32
"""Largest number of bytes of a prompt that is taken from the validation text."""

PER_THREAD = 2**18
"""Smallest number of elements of a model's largest matrix for each thread. With fewer, the product takes less time
than the synchronization of threads."""

_SEARCHED = 1000
"""Tokens at the beginning of the validation text in which `choose_prompt` looks for a line."""


def choose_prompt(corpus: Corpus) -> bytes:
    """Return the first PROMPT_BYTES bytes of the longest line near the beginning of the validation text.

    The prompt ends with a whole character.
    """
    tokenizer, tokens = corpus.tokenizer, np.asarray(corpus.validation.runs[0].tokens[:_SEARCHED])
    text = tokenizer.decode(tokens[~np.isin(tokens, [*tokenizer.begin, tokenizer.end or -1])])
    lines = text.splitlines()
    line = max(lines[1:-1] or lines, key=lambda line: len(line.strip()))  # the first and the last may be incomplete
    whole = (prompt[:PROMPT_BYTES].decode(errors="ignore").encode() for prompt in (line.strip(), text))
    return next(filter(None, whole), text[:PROMPT_BYTES])


def continue_prompt(
    generate: Callable[[Sequence[int], int], Iterable[int]], prompt: bytes, tokenizer: Tokenizer
) -> str:
    """Return a prompt and its continuation by SAMPLE_TOKENS tokens.

    Args:
        generate: function that takes tokens and a count, and yields that many tokens that continue them.
        prompt: text of at least one token.
        tokenizer: tokenizer of the model.
    """
    tokens = tokens_of(prompt, tokenizer)
    generated = generate(tokens, SAMPLE_TOKENS)
    return printable(prompt.decode(errors="replace")) + "".join(as_text(generated, tokenizer, tokens))


def tokens_of(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a prompt, preceded by the tokens with which every text begins."""
    (tokens,) = tokenizer.encode([text])
    return [*tokenizer.begin, *tokens.tolist()]


def for_text(model: Model) -> Model:
    """Return a model that reads a single text: without dropout, and without a limit on the tokens of an expert."""
    model = replace(model, dropout=0.0)
    return replace(model, capacity_factor=None) if isinstance(model, MoE) else model


def writing_threads(model: Model, limit: int) -> int:
    """Return the number of threads, at most `limit`, on which a model generates single tokens fastest."""
    parameters = (parameter for layer in range(model.layers) for parameter in model.layout(layer).parameters)
    largest = max(math.prod(parameter.shape[-2:]) for parameter in parameters if parameter.name != POSITIONS)
    return max(1, min(limit, largest // PER_THREAD))


@contextmanager
def in_writing(model: Model, limit: int) -> Generator[None, None, None]:
    """Compute on `writing_threads` threads inside of the context, unless OMP_NUM_THREADS is set."""
    old_threads = torch.get_num_threads()
    if asked_threads(os.environ) is None:
        torch.set_num_threads(writing_threads(model, limit))
    try:
        yield
    finally:
        torch.set_num_threads(old_threads)


def whole_weights(model: Blocks, initial: Initial, device: torch.device) -> list[Tensor]:
    """Return the flat weights of every block in float32, as `initial` reads them from a folder."""
    lengths = [model.layout(layer).numel for layer in range(model.layers)]
    flats = (initial(layer, length, [(0, length)], torch.float32) for layer, length in enumerate(lengths))
    return [flat.to(device) for flat in flats]


def as_text(tokens: Iterable[int], tokenizer: Tokenizer, prefix: Sequence[int] = ()) -> Iterator[str]:
    """Yield the text of tokens as they arrive, made printable. A character appears once its last byte has arrived.

    Args:
        tokens: tokens of the text.
        tokenizer: tokenizer of the model.
        prefix: tokens that precede `tokens`. Their text is not yielded.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in decode_incrementally(tokens, tokenizer, prefix):
        if text := decoder.decode(part):
            yield printable(text)
    if text := decoder.decode(b"", final=True):
        yield printable(text)


HURRY = 2.0
"""Seconds from the beginning of a sample after which it is cut short if a rank was asked to stop."""


class ParallelWriter(TextGenerator):
    """One rank's part of generating a text with the weights of a training, under any strategy.

    Each rank gathers the whole weights of a contiguous part of the blocks. The activations of each new token pass from
    rank to rank, as in a pipeline. The last rank shares its scores, so that all ranks draw the same token. A rank needs
    memory for its share of the weights and for one layer. Every rank makes a writer, and calls `generate`.

    Args:
        state: state of the training. Its weights are copied when the writer is made.
        whole: the model, not split into the layers of a program. Dropout is off, and experts drop no token.
        choice: how tokens are drawn.
        should_stop: function that returns whether this rank is asked to stop.
    """

    def __init__(self, state: State, whole: Blocks, choice: TokenSampling, should_stop: Callable[[], bool]) -> None:
        ranks = dist.get_world_size()
        parts = [range(rank * whole.layers // ranks, (rank + 1) * whole.layers // ranks) for rank in range(ranks)]
        own_blocks = parts[state.rank]
        super().__init__(for_text(whole), _whole_blocks(state, whole, parts), choice, blocks=own_blocks)
        active = [rank for rank, part in enumerate(parts) if part and own_blocks]
        self._previous = next((rank for rank in active if parts[rank].stop == own_blocks.start), None)
        self._next = next((rank for rank in active if parts[rank].start == own_blocks.stop), None)
        self._is_last = bool(own_blocks) and self._next is None
        self._should_stop, self._began, self._width = should_stop, time.monotonic(), whole.hidden_size
        self._scores = torch.zeros(whole.vocab_size + 1, dtype=state.exact, device=state.settings.device)

    def compute(self, x: Tensor, share: Share) -> Tensor:
        """Return the scores of the next token, (1, 1, vocabulary), on every rank."""
        if self._previous is not None:
            x = self._scores.new_empty(*x.shape, self._width)
            dist.recv(x, self._previous)
        x = super().compute(x, share)
        if self._next is not None:
            dist.send(x, self._next)
        self._scores.zero_()
        if self._is_last:
            self._scores[:-1] = x[0, -1]
        self._scores[-1] = float(self._should_stop() and time.monotonic() - self._began > HURRY)  # request to stop
        dist.all_reduce(self._scores)
        return self._scores[None, None, :-1]

    def generate(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then yield `count` new ones, or fewer if a rank is asked to stop.

        Raises:
            UserError: on every rank, if there are no tokens, or one is outside the vocabulary.
        """
        with in_writing(self._model, torch.get_num_threads()):
            for token in super().generate(tokens, count):
                if self._scores[-1] > 0:
                    return
                yield token


@dataclass
class Conversation:
    """Turns of a user and a model. The model sees the last turns, as many as it has positions for.

    Attributes:
        model, flats: the model that answers, and its weights (see `TextGenerator`).
        tokenizer: tokenizer of the model.
        template: template that turns are written in.
        choice: how tokens are drawn. Each answer has a seed of its own.
        max_new_tokens: largest number of tokens of an answer.
        cached: whether to cache keys and values (see `TextGenerator`).
        messages: messages of the turns that the model still sees. A turn is a question with its answer.
        dropped: number of turns that the model no longer sees.
    """

    model: Model
    flats: Sequence[Tensor]
    tokenizer: Tokenizer
    template: ChatTemplate
    choice: TokenSampling
    max_new_tokens: int
    cached: bool = True
    messages: list[Message] = field(default_factory=list[Message])
    dropped: int = 0
    _answers: int = 0

    def answer(self, question: str) -> Iterator[str]:
        """Yield the model's answer to a question piece by piece. The oldest turns are dropped if there are too many.

        Raises:
            UserError: if the question cannot be encoded, or is longer than the model's context.
        """
        messages, tokens = self._fitting([*self.messages, {"role": "user", "content": question}])
        self.dropped += (len(self.messages) + 1 - len(messages)) // 2
        writer = TextGenerator(self.model, self.flats, replace(self.choice, seed=self.choice.seed + self._answers),
                        cached=self.cached)  # fmt: skip
        self._answers += 1
        generated = takewhile(
            lambda token: token not in self.template.ends, writer.generate(tokens, self.max_new_tokens)
        )
        answer = ""
        for part in cut_at(as_text(generated, self.tokenizer, tokens), self.template.stop):
            text = part if answer else part.lstrip()
            answer += text
            yield text
        self.messages = [*messages, {"role": "assistant", "content": answer.strip()}]

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """Return the last turns that leave enough positions for an answer, and their tokens."""
        reserved = min(self.max_new_tokens, self.model.seq_len // 4)
        while True:
            tokens = [*self.template.begin, *self.tokenizer.encode_spelled(self.template.render(messages))]
            if len(tokens) + reserved <= self.model.seq_len:
                return messages, tokens
            if len(messages) == 1:
                break
            messages = messages[2:]
        if len(tokens) > self.model.seq_len:
            raise UserError(
                f"this turn has {counted(len(tokens), 'token')} with its template, but the model sees "
                f"{self.model.seq_len}; say less"
            )
        return messages, tokens


def cut_at(parts: Iterator[str], stop: str) -> Iterator[str]:
    """Yield a text as it arrives, up to the first occurrence of `stop`."""
    pending = ""  # may be the beginning of `stop`
    for part in parts:
        pending += part
        head, separator, _ = pending.partition(stop) if stop else (pending, "", "")
        if separator:
            yield head
            return
        overlap = next((n for n in range(min(len(stop), len(pending)), 0, -1) if pending.endswith(stop[:n])), 0)
        yield pending[: len(pending) - overlap]
        pending = pending[len(pending) - overlap :]
    yield pending


def _whole_blocks(state: State, whole: Blocks, parts: Sequence[range]) -> list[Tensor]:
    """Gather the flat weights of the blocks of each rank. Every rank calls this.

    Returns:
        The weights of each block that this rank computes or borrows parameters from; an empty tensor for the others.
    """
    model = state.model
    needed = [
        {(block, parameter.name) for block in part for parameter in whole.layout(block).parameters}
        | {(0, name) for block in part for name in whole.borrowed(block)}
        for part in parts
    ]
    own_blocks = {block for block, _ in needed[state.rank]}
    lengths = [whole.layout(block).numel if block in own_blocks else 0 for block in range(whole.layers)]
    flats = [torch.zeros(length, dtype=state.exact, device=state.settings.device) for length in lengths]
    views = {block: named_views(whole.layout(block), flats[block]) for block in own_blocks}
    buffers = {(block, name): views[block][name] for block, name in needed[state.rank]}
    for layer in range(model.layers):
        names = {(block, parameter.name) for block, parameter in model.run(layer).parameters()}
        for rank, rank_needs in enumerate(needed):
            if names & rank_needs:
                _gather_layer(state, layer, rank, buffers)
    return flats


def _gather_layer(state: State, layer: int, rank: int, buffers: Mapping[tuple[int, str], Tensor]) -> None:
    """Gather a layer on one rank, which copies the parameters into `buffers` (by block and name)."""
    flat = gather_layer(state, state.kept, layer, rank)
    if flat is not None:
        for block, parameter, tensor in whole_parameters(state.model, layer, flat):
            if (block, parameter.name) in buffers:
                buffers[block, parameter.name].copy_(tensor)

"""Text that a trained model goes on with."""

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
from shardlab.common.text import printable
from shardlab.execute.collect import gather_layer
from shardlab.execute.state import State
from shardlab.language.rules.kinds import counted
from shardlab.models import Blocks, Model, MoE
from shardlab.models.model import POSITIONS
from shardlab.models.tensors import Choice, Initial, Share, Writer, named_views, whole_parameters
from shardlab.train.data import Corpus
from shardlab.train.data.chat import ChatTemplate, Message
from shardlab.train.data.tokenizers import Tokenizer, decoded_parts
from shardlab.train.launch.environment import asked_threads

SAMPLE_TOKENS = 128
"""Tokens that a model writes after the prompt of a sample."""

PROMPT_BYTES = 32
"""Bytes of a prompt that is taken from the validation text."""

PER_THREAD = 2**18
"""Elements of a model's largest matrix for each thread that writes with it: a token's products with fewer end before
threads have met."""

_SEARCHED = 1000


def opening(corpus: Corpus) -> bytes:
    """The first PROMPT_BYTES of a line of the validation text, the longest near its beginning, in whole characters."""
    tokenizer, tokens = corpus.tokenizer, np.asarray(corpus.validation.runs[0].tokens[:_SEARCHED])
    text = tokenizer.decode(tokens[~np.isin(tokens, [*tokenizer.begin, tokenizer.end or -1])])
    lines = text.splitlines()
    line = max(lines[1:-1] or lines, key=lambda line: len(line.strip()))  # the first and the last may be cut
    whole = (prompt[:PROMPT_BYTES].decode(errors="ignore").encode() for prompt in (line.strip(), text))
    return next(filter(None, whole), text[:PROMPT_BYTES])


def continued(go_on: Callable[[Sequence[int], int], Iterable[int]], prompt: bytes, tokenizer: Tokenizer) -> str:
    """A prompt of at least a token, and SAMPLE_TOKENS with which a model goes on."""
    tokens = tokens_of(prompt, tokenizer)
    drawn = go_on(tokens, SAMPLE_TOKENS)
    return printable(prompt.decode(errors="replace")) + "".join(as_text(drawn, tokenizer, tokens))


def tokens_of(text: bytes, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a prompt, after those that begin every text."""
    (found,) = tokenizer.encode([text])
    return [*tokenizer.begin, *found.tolist()]


def for_text(model: Model) -> Model:
    """A model as it reads one text: without dropout, and no expert drops a token, as nothing bounds a single one."""
    model = replace(model, dropout=0.0)
    return replace(model, capacity_factor=None) if isinstance(model, MoE) else model


def writing_threads(model: Model, most: int) -> int:
    """Threads on which a model writes a text fastest, a token at a time: of a small model, one."""
    every = (each for layer in range(model.layers) for each in model.layout(layer).parameters)
    largest = max(math.prod(each.shape[-2:]) for each in every if each.name != POSITIONS)
    return max(1, min(most, largest // PER_THREAD))


@contextmanager
def in_writing(model: Model, most: int) -> Generator[None, None, None]:
    """Compute on as many threads as write fastest with a model, at most `most`; OMP_NUM_THREADS prevails."""
    before = torch.get_num_threads()
    if asked_threads(os.environ) is None:
        torch.set_num_threads(writing_threads(model, most))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def whole_weights(model: Blocks, initial: Initial, device: torch.device) -> list[Tensor]:
    """Every block's flat weights, as they are read from a folder, in float32."""
    lengths = [model.layout(layer).numel for layer in range(model.layers)]
    read = (initial(layer, length, [(0, length)], torch.float32) for layer, length in enumerate(lengths))
    return [flat.to(device) for flat in read]


def as_text(tokens: Iterable[int], tokenizer: Tokenizer, before: Sequence[int] = ()) -> Iterator[str]:
    """Text that can be shown, as tokens come: characters once they are whole.

    Args:
        before: tokens that these go on from; their text is left out.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for part in decoded_parts(tokens, tokenizer, before):
        if text := decoder.decode(part):
            yield printable(text)
    if text := decoder.decode(b"", final=True):
        yield printable(text)


# Text from a model in training, written by all ranks: each has some of its blocks, whole.


HURRY = 2.0
"""Seconds after which a text ends where it is, if a rank was asked to end."""


class ParallelWriter(Writer):
    """One rank's part of writing a text with the weights of a training, whatever its strategy.

    The blocks are dealt to the ranks and put together there, in their order. So the activations of each new token go
    from rank to rank, and no rank takes more than its share of the whole weights, and one layer. All ranks know the
    last one's scores, and draw the same token from them. Every rank makes one, and calls `go_on`.

    Args:
        state: the training's, whose weights are taken as they are now.
        whole: the model in whole blocks; dropout is left out, and no expert drops a token.
        choice: how tokens are drawn.
        asked: whether this rank is asked to end.
    """

    def __init__(self, state: State, whole: Blocks, choice: Choice, asked: Callable[[], bool]) -> None:
        ranks = dist.get_world_size()
        parts = [range(rank * whole.layers // ranks, (rank + 1) * whole.layers // ranks) for rank in range(ranks)]
        mine = parts[state.rank]
        super().__init__(for_text(whole), _whole_blocks(state, whole, parts), choice, blocks=mine)
        having = [rank for rank, part in enumerate(parts) if part and mine]
        self._before = next((rank for rank in having if parts[rank].stop == mine.start), None)
        self._after = next((rank for rank in having if parts[rank].start == mine.stop), None)
        self._writes = bool(mine) and self._after is None
        self._asked, self._began, self._width = asked, time.monotonic(), whole.hidden_size
        self._words = torch.zeros(whole.vocab_size + 1, dtype=state.exact, device=state.settings.device)

    def compute(self, x: Tensor, share: Share) -> Tensor:
        """The scores of what follows the last token, (1, 1, vocabulary), on every rank."""
        if self._before is not None:
            x = self._words.new_empty(*x.shape, self._width)
            dist.recv(x, self._before)
        x = super().compute(x, share)
        if self._after is not None:
            dist.send(x, self._after)
        self._words.zero_()
        if self._writes:
            self._words[:-1] = x[0, -1]
        self._words[-1] = float(self._asked() and time.monotonic() - self._began > HURRY)
        dist.all_reduce(self._words)
        return self._words[None, None, :-1]

    def go_on(self, tokens: Sequence[int], count: int) -> Iterator[int]:
        """Read some tokens, then write `count`, or fewer if a rank is asked to end.

        Raises:
            UserError: as `Writer` does, on every rank.
        """
        with in_writing(self._model, torch.get_num_threads()):
            for token in super().go_on(tokens, count):
                if self._words[-1] > 0:
                    return
                yield token


def _whole_blocks(state: State, whole: Blocks, parts: Sequence[range]) -> list[Tensor]:
    """Flat weights of the blocks that this rank computes, or borrows from; of others nothing. Every rank calls this."""
    model = state.model
    wanted = [
        {(block, each.name) for block in part for each in whole.layout(block).parameters}
        | {(0, name) for block in part for name in whole.borrowed(block)}
        for part in parts
    ]
    mine = {block for block, _ in wanted[state.rank]}
    lengths = [whole.layout(block).numel if block in mine else 0 for block in range(whole.layers)]
    flats = [torch.zeros(length, dtype=state.exact, device=state.settings.device) for length in lengths]
    views = {block: named_views(whole.layout(block), flats[block]) for block in mine}
    rooms = {(block, name): views[block][name] for block, name in wanted[state.rank]}
    for layer in range(model.layers):
        names = {(block, each.name) for block, each in model.run(layer).parameters()}
        for rank, theirs in enumerate(wanted):
            if names & theirs:
                _give(state, layer, rank, rooms)
    return flats


def _give(state: State, layer: int, rank: int, rooms: Mapping[tuple[int, str], Tensor]) -> None:
    """Put a layer together on a rank, which keeps the parameters that it has room for, by block and name."""
    flat = gather_layer(state, state.kept, layer, rank)
    if flat is not None:
        for block, parameter, tensor in whole_parameters(state.model, layer, flat):
            if (block, parameter.name) in rooms:
                rooms[block, parameter.name].copy_(tensor)


# A conversation with a model.


@dataclass
class Conversation:
    """Turns of a user and a model, of which the model sees as many as it has positions for.

    Attributes:
        model, flats: that answers (see `Writer`).
        tokenizer: of its tokens.
        template: how turns are written down.
        choice: how tokens are drawn; each answer has a seed of its own.
        most: tokens of an answer.
        cached: see `Writer`.
        messages: what was said, but for what the model no longer sees.
        dropped: how many turns it no longer sees.
    """

    model: Model
    flats: Sequence[Tensor]
    tokenizer: Tokenizer
    template: ChatTemplate
    choice: Choice
    most: int
    cached: bool = True
    messages: list[Message] = field(default_factory=list[Message])
    dropped: int = 0
    _answers: int = 0

    def answer(self, question: str) -> Iterator[str]:
        """The model's answer to the user's question, in pieces as they come; oldest turns are dropped if need be.

        Raises:
            UserError: when the question cannot be encoded, or is longer than all that the model sees.
        """
        messages, tokens = self._fitting([*self.messages, {"role": "user", "content": question}])
        self.dropped += (len(self.messages) + 1 - len(messages)) // 2
        writer = Writer(self.model, self.flats, replace(self.choice, seed=self.choice.seed + self._answers),
                        cached=self.cached)  # fmt: skip
        self._answers += 1
        drawn = takewhile(lambda token: token not in self.template.ends, writer.go_on(tokens, self.most))
        answer = ""
        for part in until(as_text(drawn, self.tokenizer, tokens), self.template.stop):
            shown = part if answer else part.lstrip()
            answer += shown
            yield shown
        self.messages = [*messages, {"role": "assistant", "content": answer.strip()}]

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], list[int]]:
        """The last turns that leave room for an answer, and their tokens."""
        room = min(self.most, self.model.seq_len // 4)
        while True:
            tokens = [*self.template.begin, *self.tokenizer.encode_spelled(self.template.render(messages))]
            if len(tokens) + room <= self.model.seq_len:
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


def until(parts: Iterator[str], stop: str) -> Iterator[str]:
    """A text as it comes, up to where `stop` begins in it."""
    held = ""
    for part in parts:
        held += part
        before, found, _ = held.partition(stop) if stop else (held, "", "")
        if found:
            yield before
            return
        kept = next((n for n in range(min(len(stop), len(held)), 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - kept]
        held = held[len(held) - kept :]
    yield held

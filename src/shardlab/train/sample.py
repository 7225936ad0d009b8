"""Text that a trained model goes on with."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shardlab.data import Corpus
from shardlab.data.tokenizers import Tokenizer, decoded_parts
from shardlab.models import Blocks, Model, MoE
from shardlab.models.counts import POSITIONS
from shardlab.models.tensors import Initial
from shardlab.train.binding import asked_threads
from shardlab.train.printable import printable

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

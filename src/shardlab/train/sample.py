"""Text that a trained model goes on with."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardlab.data import Corpus
from shardlab.data.tokenizers import Tokenizer
from shardlab.models import Model
from shardlab.models.tensors import generate

SAMPLE_TOKENS = 200
PROMPT_BYTES = 32
_SEARCHED = 1000


def opening(corpus: Corpus) -> bytes:
    """The first PROMPT_BYTES of a line of the validation text, the longest near its beginning, in whole characters."""
    text = corpus.tokenizer.decode(np.asarray(corpus.validation.runs[0].tokens[:_SEARCHED]))
    lines = text.splitlines()
    line = max(lines[1:-1] or lines, key=lambda line: len(line.strip()))  # the first and the last may be cut
    whole = (prompt[:PROMPT_BYTES].decode(errors="ignore").encode() for prompt in (line.strip(), text))
    return next(filter(None, whole), text[:PROMPT_BYTES])


@torch.no_grad()
def continued(model: Model, flats: Sequence[Tensor], prompt: bytes, seed: int, tokenizer: Tokenizer) -> str:
    """A prompt of at least a token, and SAMPLE_TOKENS drawn from the model after it."""
    (start,) = tokenizer.encode([prompt])
    tokens = generate(model, flats, torch.from_numpy(start), SAMPLE_TOKENS, seed)
    return tokenizer.decode(tokens.numpy()).decode(errors="replace")

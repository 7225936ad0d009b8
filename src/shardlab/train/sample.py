"""Text that a trained model goes on with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.models import Model
from shardlab.models.tensors import generate
from shardlab.train.data import Corpus

SAMPLE_BYTES = 200
PROMPT_BYTES = 32
_SEARCHED = 1000


def opening(corpus: Corpus) -> bytes:
    """The first PROMPT_BYTES of a line of the validation text, the longest near its beginning, in whole characters."""
    lines = corpus.validation[:_SEARCHED].tobytes().splitlines()
    line = max(lines[1:-1] or lines, key=lambda line: len(line.strip()))  # the first and the last may be cut
    prompt = line.strip()[:PROMPT_BYTES]
    return prompt.decode(errors="ignore").encode() or corpus.validation[:PROMPT_BYTES].tobytes()


@torch.no_grad()
def continued(model: Model, flats: Sequence[Tensor], prompt: bytes, seed: int) -> str:
    """A prompt of at least a byte, and SAMPLE_BYTES drawn from the model after it."""
    tokens = generate(model, flats, torch.tensor(list(prompt)), SAMPLE_BYTES, seed)
    text = tokens.clamp(max=255)  # a larger vocabulary has tokens that are no byte; 255 alone is no text
    return text.to(torch.uint8).numpy().tobytes().decode(errors="replace")

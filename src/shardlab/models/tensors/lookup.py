"""One slice of the vocabulary: its embedding, and its scores."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from shardlab.models.tensors.share import Share


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """The embeddings (rows, T, C) of tokens (rows, T) in a slice's `weight`, which begins at token `first`.

    Tokens of other slices give zero, so that the sum over slices is the whole look-up (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).
    """
    indices, elsewhere = indices_in(tokens, first, len(weight))
    return F.embedding(indices, weight).masked_fill(elsewhere[..., None], 0)


def indices_in(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Find each token's index in the slice of `count` tokens from `first` (0 for others), and whether it is another."""
    elsewhere = (tokens < first) | (tokens >= first + count)
    return (tokens - first).masked_fill(elsewhere, 0), elsewhere


def without_padding(logits: Tensor, tokens: int, share: Share) -> Tensor:
    """Set a slice's scores (..., tokens of the slice) to -inf in place, beyond a vocabulary of so many tokens."""
    each = logits.shape[-1]
    real = max(0, tokens - share.piece("vocab")[0] * each)
    if real < each:
        logits[..., real:].fill_(float("-inf"))
    return logits

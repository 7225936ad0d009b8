"""The embedding of one slice of the vocabulary."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """The embeddings (rows, T, C) of tokens (rows, T) in a slice's `weight`, which begins at token `first`.

    Tokens of other slices give zero, so that the sum over slices is the whole look-up (Shoeybi et al. 2019, arXiv
    1909.08053, section 3). Only the tokens themselves are kept for the backward pass.
    """
    return cast(Tensor, _LookUp.apply(weight, tokens, first))


def indices_in(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Find each token's index in the slice of `count` tokens from `first` (0 for others), and whether it is another."""
    elsewhere = (tokens < first) | (tokens >= first + count)
    return (tokens - first).masked_fill(elsewhere, 0), elsewhere


class _LookUp(torch.autograd.Function):
    """Written out, since autograd would keep the indices and the mask as well."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.first, ctx.count = first, len(weight)
        indices, elsewhere = indices_in(tokens, first, len(weight))
        return F.embedding(indices, weight).masked_fill_(elsewhere[..., None], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (tokens,) = gradients, ctx.saved_tensors
        indices, elsewhere = indices_in(tokens, ctx.first, ctx.count)
        total = gradient.new_zeros(ctx.count, gradient.shape[-1])
        gradient = gradient.masked_fill(elsewhere[..., None], 0)
        return total.index_add_(0, indices.flatten(), gradient.flatten(0, 1)), None, None

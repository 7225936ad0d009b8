"""Rotary position embedding: pairs of a head's features, turned by angles that grow with the token's place.

Feature 2i and its neighbour turn by place * theta^(-2i/size), as complex numbers (Su et al. 2021, arXiv 2104.09864,
eq. 34; Llama's own code). So a query's product with a key depends on how far apart the two are.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.models.attention import RopeScaling


def rotated(
    features: Tensor, heads: int, size: int, tokens: Sequence[int], theta: float, scaling: RopeScaling | None = None
) -> Tensor:
    """Heads side by side, (rows, T, features), of which the first ones are turned; memory of its own.

    Args:
        features: of queries, then of keys, then of values.
        heads: how many are turned: those of queries and of keys.
        size: features of a head.
        tokens: the places in the sequence.
        theta: base of the angles.
        scaling: how slower frequencies are stretched (None: not).
    """
    assert len(tokens) == features.shape[1], f"{tokens} are not the {features.shape[1]} tokens given"
    exact = torch.promote_types(features.dtype, torch.float32)
    turns = _turns(theta, scaling, size, tuple(tokens), exact, features.device)
    return cast(Tensor, _Rotate.apply(features, turns, heads))


@lru_cache(maxsize=16)
def _turns(
    theta: float,
    scaling: RopeScaling | None,
    size: int,
    tokens: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """e^(i angle), (T, 1, size / 2), computed in float64."""
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaling is not None:
        factor, low, high, context = scaling
        kept = ((context * rates / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # by turns within the context
        rates = rates * (kept + (1 - kept) / factor)
    angles = torch.tensor(tokens, dtype=torch.float64)[:, None, None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype.to_complex())


class _Rotate(torch.autograd.Function):
    """Keeps nothing: the gradient is turned back."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, turns: Tensor, heads: int) -> Tensor:
        ctx.turns, ctx.heads = turns, heads
        return _turned(features, turns, heads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _turned(gradients[0], ctx.turns.conj(), ctx.heads), None, None


def _turned(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    made = features.to(turns.dtype.to_real(), copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(made.view(*made.shape[:-1], -1, turns.shape[-1], 2))  # (rows, T, heads, size / 2)
    pairs[..., :heads, :].mul_(turns)
    return made.to(features.dtype)

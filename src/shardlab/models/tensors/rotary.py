"""Rotary position embedding: pairs of a head's features, turned by angles that grow with the token's place.

Feature 2i and its neighbour turn by place * theta^(-2i/size), as complex numbers (Su et al. 2021, arXiv 2104.09864,
eq. 34; Llama's own code). So a query's product with a key depends on how far apart the two are.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from shardlab.models.attention import RopeScaling


def turned(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Heads side by side, (rows, T, features), of which the first ones are turned; memory of its own.

    Args:
        features: of queries, then of keys, then of values.
        turns: of the tokens, as `turns` gives them.
        heads: how many are turned: those of queries and of keys.
    """
    assert len(turns) == features.shape[1], f"turns of {len(turns)} tokens, but {features.shape[1]} tokens are given"
    if not turns.is_complex():
        return _turned_by_parts(features, turns, heads)
    made = features.to(turns.dtype.to_real(), copy=True, memory_format=torch.contiguous_format)
    pairs = torch.view_as_complex(made.view(*made.shape[:-1], -1, turns.shape[-1], 2))  # (rows, T, heads, size / 2)
    pairs[..., :heads, :].mul_(turns)
    return made.to(features.dtype)


@lru_cache(maxsize=16)
def turns(
    theta: float,
    scaling: RopeScaling | None,
    size: int,
    tokens: range | tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Make e^(i angle) for tokens and pairs of features, (T, 1, size / 2), computed in float64.

    Args:
        theta: base of the angles.
        scaling: how slower frequencies are stretched (None: not).
        size: features of a head.
        tokens: the places in the sequence.
        dtype: of real and imaginary parts.
        device: of the result.
    """
    rates = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    if scaling is not None:
        factor, low, high, context = scaling
        kept = ((context * rates / (2 * math.pi) - low) / (high - low)).clamp(0, 1)  # by turns within the context
        rates = rates * (kept + (1 - kept) / factor)
    angles = torch.tensor(tokens, dtype=torch.float64)[:, None, None] * rates
    return torch.polar(torch.ones_like(angles), angles).to(device, dtype.to_complex())


def turned_back(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """What `turned` is given, of what it gives; also the gradient of the one, of that of the other."""
    return turned(features, turns.conj(), heads)


def _turned_by_parts(features: Tensor, turns: Tensor, heads: int) -> Tensor:
    """Turn the pairs of the first heads in real numbers, for compilers that know no complex ones.

    Turns are the cosines and sines of the angles, (T, 1, size / 2, 2).
    """
    pairs = features.to(turns.dtype).view(*features.shape[:-1], -1, turns.shape[-2], 2)
    (even, odd), (cos, sin) = pairs[..., :heads, :, :].unbind(-1), turns.unbind(-1)
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([turned, pairs[..., heads:, :, :]], -3).flatten(-3).to(features.dtype)

"""Muon on whole matrices: torch.optim.Muon, which rounds to bfloat16, and the same in float64 for comparisons."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.execute.one_moment import OneMoment
from shardlab.models.matrices import ITERATIONS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration's quintic polynomial (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""


class Muon(OneMoment):
    """A momentum, made nearly orthogonal by Newton and Schulz's iteration (Jordan 2024).

    Steps are as long as AdamW's usually are, by 0.2 sqrt(max(rows, columns)), so that one learning rate fits both (Liu
    et al. 2025, arXiv 2502.16982, eq. 4). It is torch.optim.Muon to the bit, but keeps float64 where weights are in it.

    Attributes:
        ways: how a weight goes that is no whole matrix, at the next step: its part of the orthogonal one, and how far.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, lr)
        self._momentum = momentum
        self.ways: dict[Tensor, tuple[Tensor, float]] = {}

    def direction(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Nesterov's mixture of a gradient and the moment that it would make; nothing is changed."""
        return gradient.lerp(self.moment(weight).lerp(gradient, 1 - self._momentum), self._momentum)

    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """The orthogonal matrix that is nearest to the direction, or the part of it that was given."""
        assert weight.grad is not None
        way = self.ways.pop(weight, None) or (orthogonal(self.direction(weight, weight.grad)), length(weight.shape))
        moment.lerp_(weight.grad, 1 - self._momentum)
        return way


def length(shape: Sequence[int]) -> float:
    """How far an orthogonal matrix of a shape goes, times the learning rate."""
    return 0.2 * math.sqrt(max(shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with nearly the same singular vectors, and singular values from 0.7 to 1.2; in bfloat16, or float64."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    found = matrix.to(iterated_in(matrix), copy=True)
    if rows > columns:
        found = found.T
    found.div_(cast(Tensor, found.norm()).clamp(min=1e-7))
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if rows > columns else found


def iterated_in(tensor: Tensor) -> torch.dtype:
    """The numbers in which a matrix is made orthogonal."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.bfloat16

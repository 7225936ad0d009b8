"""Muon on whole matrices: torch.optim.Muon, which rounds to bfloat16, and the same in float64 for comparisons."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration's quintic polynomial (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""

ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """A momentum, made nearly orthogonal by Newton and Schulz's iteration (Jordan 2024).

    Steps are as long as AdamW's usually are, by 0.2 sqrt(max(rows, columns)), so that one learning rate fits both (Liu
    et al. 2025, arXiv 2502.16982, eq. 4). It is torch.optim.Muon to the bit, but keeps float64 where weights are in it.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                moment = state["momentum_buffer"]
                moment.lerp_(weight.grad, 1 - momentum)
                moved = orthogonal(weight.grad.lerp(moment, momentum))
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(moved, alpha=-rate * 0.2 * math.sqrt(max(weight.shape)))


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with nearly the same singular vectors, and singular values from 0.7 to 1.2; in bfloat16, or float64."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    found = matrix.clone() if matrix.dtype is torch.float64 else matrix.bfloat16()
    if rows > columns:
        found = found.T
    found.div_(cast(Tensor, found.norm()).clamp(min=1e-7))
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if rows > columns else found

"""Lion, which torch does not have."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Steps by the sign of a moment that the gradient is mixed into (Chen et al. 2023, arXiv 2302.06675, program 1)."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            rate, (by, kept) = group["lr"], group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                moment = state["momentum_buffer"]
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(torch.lerp(weight.grad, moment, by).sign_(), alpha=-rate)
                moment.lerp_(weight.grad, 1 - kept)

"""Optimizers that torch does not have, or not in float64: each keeps one moment of a weight."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.functional import TensorOptimizer


class OneMoment(TensorOptimizer):
    """Torch's loop over weights, with decoupled decay; how far each goes is a method's."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, lr=lr, weight_decay=0.0)

    @abstractmethod
    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """Mix a weight's gradient into its moment.

        Returns:
            The way in which the weight goes, and how far: both times the learning rate are subtracted.
        """

    def moment(self, weight: Tensor) -> Tensor:
        """A weight's moment; zeros before the first step."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return state["momentum_buffer"]

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight that has a gradient."""
        for group in self.param_groups:
            rate = group["lr"]
            for weight in group["params"]:
                if weight.grad is not None:
                    way, length = self.move(weight, self.moment(weight))
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.add_(way, alpha=-rate * length)

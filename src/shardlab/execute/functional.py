"""Optimizers by the functions of torch.optim: its classes import torch._dynamo, which costs a rank a second at its
start."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


class TensorOptimizer(ABC):
    """Optimizer of tensors in groups, laid out as torch.optim.Optimizer is, without its hooks and closures.

    Attributes:
        param_groups: settings of each group, and under "params" its tensors.
        state: what the optimizer keeps of each tensor, by name; empty before the tensor's first step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        """Make an optimizer of groups, which have the defaults where they have no setting of their own."""
        self.param_groups: list[dict[str, Any]] = [
            {**defaults, **group, "params": list(group["params"])} for group in groups
        ]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    @abstractmethod
    def step(self) -> None:
        """Update every tensor that has a gradient."""


def _with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of a group that have a gradient, and their gradients."""
    weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
    return weights, [weight.grad for weight in weights if weight.grad is not None]


class AdamW(TensorOptimizer):
    """torch.optim.AdamW, to the bit."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float, *, fused: bool
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, weight_decay=0.0)
        self._fused = fused

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights, gradients = _with_gradients(group)
            states = [self._state_of(weight) for weight in weights]
            update_by_adamw(group, weights, gradients, states, fused=self._fused)

    def _state_of(self, weight: Tensor) -> dict[str, Any]:
        state = self.state[weight]
        if not state:
            # The fused kernel reads the number of steps where the weight is; the other one on the host, in the numbers
            # that are the default.
            where: dict[str, Any] = {"dtype": torch.float32, "device": weight.device} if self._fused else {}
            state["step"] = torch.zeros((), **where)
            state["exp_avg"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        return state


def update_by_adamw(
    group: dict[str, Any],
    weights: list[Tensor],
    gradients: list[Tensor],
    states: list[dict[str, Any]],
    *,
    fused: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Update weights, which AdamW keeps such states of, by the settings of a group.

    Args:
        found_inf: (), 1 where the fused kernel is to leave the weights as they are.
    """
    adamw(
        weights,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=fused,
        found_inf=found_inf,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


class SGD(TensorOptimizer):
    """torch.optim.SGD with a momentum, to the bit."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, momentum: float, *, fused: bool) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, weight_decay=0.0)
        self._fused = fused

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            weights, gradients = _with_gradients(group)
            has_momentum = group["momentum"] != 0
            buffers = [self.state[weight].get("momentum_buffer") for weight in weights] if has_momentum else []
            sgd(
                weights,
                gradients,
                buffers,
                fused=self._fused,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            for weight, buffer in zip(weights, buffers, strict=has_momentum):
                self.state[weight]["momentum_buffer"] = buffer

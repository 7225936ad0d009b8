"""Optimizers of tensors: AdamW, SGD, Lion, Muon, and an exponential moving average (EMA) of weights.

AdamW and SGD call the functions of torch.optim. Its classes are not used, because they import torch._dynamo, which
takes a second at the start of a rank.
"""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from shardlab.models.matrices import ITERATIONS


class TensorOptimizer(ABC):
    """Optimizer of groups of tensors, like torch.optim.Optimizer but without hooks and closures.

    Attributes:
        param_groups: settings of each group. "params" has its tensors.
        state: the optimizer state of each tensor, by name; empty before the tensor's first step.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        """Create an optimizer of groups. Settings that a group lacks have the values in `defaults`."""
        self.param_groups: list[dict[str, Any]] = [
            {**defaults, **group, "params": list(group["params"])} for group in groups
        ]
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)

    @abstractmethod
    def step(self) -> None:
        """Update every tensor that has a gradient."""


class AdamW(TensorOptimizer):
    """AdamW, bitwise equal to torch.optim.AdamW."""

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
            # The fused kernel reads the number of steps on the weight's device. The other kernel reads it on the host,
            # in the default dtype.
            options: dict[str, Any] = {"dtype": torch.float32, "device": weight.device} if self._fused else {}
            state["step"] = torch.zeros((), **options)
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
    """Update weights by AdamW with the settings of a group and the states of the weights.

    Args:
        found_inf: tensor (), 1 if the fused kernel must skip the update.
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
    """SGD with momentum, bitwise equal to torch.optim.SGD."""

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


class OneMoment(TensorOptimizer):
    """Base of optimizers with one moment for each weight and decoupled weight decay."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float) -> None:
        super().__init__(params, lr=lr, weight_decay=0.0)

    @abstractmethod
    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """Mix a weight's gradient into its moment.

        Returns:
            Direction and length of the update. The weight becomes weight - rate * length * direction.
        """

    def moment(self, weight: Tensor) -> Tensor:
        """Return a weight's moment; zeros before the first step."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        return state["momentum_buffer"]

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            rate = group["lr"]
            for weight in group["params"]:
                if weight.grad is not None:
                    direction, length = self.move(weight, self.moment(weight))
                    weight.mul_(1 - rate * group["weight_decay"])
                    weight.add_(direction, alpha=-rate * length)


class Lion(OneMoment):
    """Lion: steps by the sign of a mixture of gradient and moment (Chen et al. 2023, arXiv 2302.06675, program 1)."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(params, lr)
        self._betas = betas

    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """Return the sign of moment and gradient, mixed by the first decay rate. Update the moment by the second."""
        assert weight.grad is not None
        beta1, beta2 = self._betas
        sign = torch.lerp(weight.grad, moment, beta1).sign_()
        moment.lerp_(weight.grad, 1 - beta2)
        return sign, 1.0


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the iteration's quintic polynomial (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""


class Muon(OneMoment):
    """Muon: momentum that is orthogonalized by Newton-Schulz iterations (Jordan 2024).

    The factor 0.2 sqrt(max(rows, columns)) makes updates about as long as AdamW's, so that one learning rate fits both
    (Liu et al. 2025, arXiv 2502.16982, eq. 4). The result is bitwise equal to torch.optim.Muon's, except that float64
    weights stay in float64.

    Attributes:
        part_updates: next update of each weight that is only a part of a matrix: its part of the orthogonalized matrix,
            and the length.
    """

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, momentum: float) -> None:
        super().__init__(params, lr)
        self._momentum = momentum
        self.part_updates: dict[Tensor, tuple[Tensor, float]] = {}

    def direction(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return the Nesterov momentum for a gradient, without changing the moment."""
        return gradient.lerp(self.moment(weight).lerp(gradient, 1 - self._momentum), self._momentum)

    def move(self, weight: Tensor, moment: Tensor) -> tuple[Tensor, float]:
        """Return the orthogonalized direction, or its part in `part_updates`, and the length of the update."""
        assert weight.grad is not None
        update = self.part_updates.pop(weight, None)
        if update is None:
            update = orthogonal(self.direction(weight, weight.grad)), length(weight.shape)
        moment.lerp_(weight.grad, 1 - self._momentum)
        return update


def length(shape: Sequence[int]) -> float:
    """Return the length of Muon's update of a matrix, as a multiple of the learning rate."""
    return 0.2 * math.sqrt(max(shape))


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with nearly the same singular vectors, and singular values from 0.7 to 1.2."""
    a, b, c = COEFFICIENTS
    rows, columns = matrix.shape
    iterate = matrix.to(iterated_in(matrix), copy=True)
    if rows > columns:
        iterate = iterate.T
    iterate.div_(cast(Tensor, iterate.norm()).clamp(min=1e-7))
    for _ in range(ITERATIONS):
        gram = iterate @ iterate.T
        iterate = torch.addmm(iterate, torch.addmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.T if rows > columns else iterate


def iterated_in(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix is orthogonalized: float64 for float64, else bfloat16."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.bfloat16


class Average(TensorOptimizer):
    """Exponential moving average (EMA) of tensors over their steps.

    The tensor n steps ago contributes with the factor decay ** n. The bias towards zero is corrected as in Adam (Kingma
    and Ba 2015, arXiv 1412.6980, section 3), so the initial weights are not part of the average.
    """

    def __init__(self, params: Sequence[Tensor], decay: float) -> None:
        super().__init__([{"params": params}], decay=decay)

    @torch.no_grad()
    def step(self) -> None:
        """Add the current tensors to their averages."""
        for group in self.param_groups:
            decay = group["decay"]
            for tensor in group["params"]:
                state = self.state[tensor]
                if not state:
                    state["step"], state["average"] = 0, tensor.clone()
                state["step"] += 1
                state["average"].lerp_(tensor, (1 - decay) / (1 - decay ** state["step"]))

    def average_of(self, tensor: Tensor) -> Tensor:
        """Return a tensor's average. Before the first step, it is the tensor itself."""
        return self.state[tensor]["average"] if self.state.get(tensor) else tensor


def _with_gradients(group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors of a group that have a gradient, and their gradients."""
    weights: list[Tensor] = [weight for weight in group["params"] if weight.grad is not None]
    return weights, [weight.grad for weight in weights if weight.grad is not None]

"""AdamW on a slice of a layer's flat weights."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from shardlab.program import UserError


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101), with a warm-up and a cosine decay of the learning rate.

    Attributes:
        learning_rate: the largest, reached after the warm-up.
        betas, eps: decay of the two moments, and what keeps the division finite.
        weight_decay: on matrices only; biases and norms do not decay.
        warmup: steps in which the learning rate rises linearly.
        steps: of the whole run; at its end the learning rate is a tenth of the largest.
        clip: the largest norm that the whole model's gradient may have (None: any); for programs that compute it.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup: int = 10
    steps: int = 200
    clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            value: float = getattr(self, name)
            if not 0 <= value < math.inf:
                raise UserError(f"{name.replace('_', ' ')} is {value}; give 0 or more")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise UserError(f"clip is {self.clip}; give a positive norm, or none at all")

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        progress = min(1.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        return self.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def build(self, decayed: list[Tensor], others: list[Tensor]) -> torch.optim.AdamW:
        """The optimizer of some leaf tensors."""
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=self.learning_rate,
            betas=self.betas,
            eps=self.eps,
            fused=True,
        )


class Slice:
    """An optimizer's state for a slice of a layer's flat weights: what a rank keeps from step to step."""

    def __init__(
        self,
        weights: list[Tensor],
        starts: list[int],
        decayed: list[tuple[int, int]],
        config: AdamW,
        exact: Tensor | None = None,
    ) -> None:
        """`weights` are the slice's runs, updated in place; run i begins at element `starts[i]` of the layer's buffer.

        Of that buffer the runs `decayed` (start, stop) decay. With `exact`, (elements,), a copy of the weights in more
        bits, the copy is updated and the weights are rounded from it.
        """
        self.weights = weights
        self.exact: Sequence[Tensor] = () if exact is None else torch.split(exact, [len(run) for run in weights])
        self._config = config
        self._parts: list[tuple[Tensor, int, int]] = []
        decaying: list[Tensor] = []
        others: list[Tensor] = []
        at = 0
        for run, start in zip(self.exact or weights, starts, strict=True):
            stop = start + len(run)
            cuts = {place for runs in decayed for place in runs if start < place < stop}
            for begin, end in pairwise(sorted({start, stop} | cuts)):
                part = run[begin - start : end - start].detach()
                decays = any(first <= begin and end <= last for first, last in decayed)
                (decaying if decays else others).append(part)
                self._parts.append((part, at + begin - start, at + end - start))
            at += len(run)
        self.optimizer = config.build(decaying, others)

    @property
    def flat(self) -> Tensor:
        """The slice's weights now, (elements,); itself where the slice is one run, else a copy."""
        return self.weights[0] if len(self.weights) == 1 else torch.cat(self.weights)

    def update(self, gradient: Tensor, step: int, squared_norm: float | None = None, *, scale: float = 1.0) -> None:
        """One step with a gradient of the same length.

        Args:
            squared_norm: of the whole model's gradient. The gradient is clipped by it (Pascanu et al. 2013, arXiv
                1211.5063, algorithm 1, as torch.nn.utils.clip_grad_norm_), and dropped if it is not finite.
            scale: by what the gradient was multiplied on its way; the norm was not.
        """
        gradient = gradient.to(self._parts[0][0].dtype)
        if scale != 1.0:
            gradient = gradient / scale
        if squared_norm is not None:
            if not math.isfinite(squared_norm):
                return
            if self._config.clip is not None:
                gradient = gradient * min(1.0, self._config.clip / (math.sqrt(squared_norm) + 1e-6))
        for part, begin, end in self._parts:
            part.grad = gradient[begin:end]
        rate = self._config.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for part, _, _ in self._parts:
            part.grad = None
        if self.exact:
            for run, exact in zip(self.weights, self.exact, strict=True):
                run.copy_(exact)

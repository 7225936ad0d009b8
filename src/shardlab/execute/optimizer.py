"""AdamW on a slice of a layer's flat weights."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from shardlab.optimizers import AdamW


def torch_optimizer(config: AdamW, decayed: list[Tensor], others: list[Tensor]) -> torch.optim.AdamW:
    """The optimizer of some leaf tensors."""
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
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
        self.optimizer = torch_optimizer(config, decaying, others)

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

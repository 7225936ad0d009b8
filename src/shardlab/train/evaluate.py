"""The loss of weights on a text, computed by all ranks as their strategy lays the model over them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check import Checked, check_forward, forward_only
from shardlab.execute import Executor, Settings
from shardlab.execute.average import averaged
from shardlab.execute.communicator import Groups
from shardlab.execute.state import State
from shardlab.models.tensors import Initial
from shardlab.train.job import Job
from shardlab.train.launch import backend_of
from shardlab.train.saved import VALIDATION, VALIDATION_EMA

MOST = 700.0
"""Its exponential is nearly the largest float."""


@dataclass(frozen=True)
class InOrder:
    """Microbatches one after the other, of which a step takes some; where there is none left, no target counts.

    Attributes:
        count: how many there are.
        of_step: how many a step takes.
        cut: gives one by its number: tokens and targets (micro_batch_size, seq_len), int64.
    """

    micro_batch_size: int
    count: int
    of_step: int
    cut: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def steps(self) -> int:
        """How many steps take them all."""
        return math.ceil(self.count / self.of_step)

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        number = step * self.of_step + microbatch
        tokens, targets = self.cut(min(number, self.count - 1))
        return tokens, targets if number < self.count else torch.full_like(targets, -1)

    def counted(self, step: int, microbatches: int) -> int:
        """Nothing is divided by it, for there is no gradient."""
        return 1


@dataclass(frozen=True)
class Loss:
    """A loss over a text.

    Attributes:
        total: nats, of all tokens together.
        tokens: how many were predicted.
    """

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """Of how many tokens each was as hard to tell as one of so many equally likely ones; infinite beyond floats."""
        return math.exp(self.mean) if self.mean < MOST else math.inf


class Evaluation:
    """One rank's part of computing losses, by the forward half of a program.

    Args:
        job: what is computed, and how; dropout is left out.
        checked: its program.
        rank, device: whose part, and where.
        batches: on what.
        of: a training's state, whose weights are judged (None: those that `initial` reads).
        groups: where process groups are kept.
    """

    def __init__(
        self,
        job: Job,
        checked: Checked,
        rank: int,
        device: torch.device,
        batches: InOrder,
        *,
        of: State | None = None,
        initial: Initial | None = None,
        groups: Groups | None = None,
    ) -> None:
        model = replace(job, model=replace(job.model, dropout=0.0)).cut
        settings = Settings(job.seed, job.numbers, device, initial=initial)
        half = check_forward(forward_only(checked))
        self._batches, self._device, self._of = batches, device, of
        self._executor = Executor(half, rank, model, batches, settings, backend_of(device.type), groups=groups, of=of)

    def loss(self) -> Loss:
        """The loss over all batches; every rank calls this, and knows it."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._executor.state.step = 0
        for _ in range(self._batches.steps):
            total += self._executor.step()
        dist.all_reduce(total)
        return Loss(float(total[0]), int(total[1]))

    def losses(self) -> dict[str, float]:
        """The mean loss as records name it, and that of averaged weights if there are any; every rank calls this."""
        found = {VALIDATION: self.loss().mean}
        if self._of is not None and self._of.settings.optimizer.ema is not None:
            with averaged(self._of):
                found[VALIDATION_EMA] = self.loss().mean
        return found

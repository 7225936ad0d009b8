"""The loss of weights on a text, computed by all ranks as their strategy lays the model over them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardlab.check import Checked, check_forward, forward_only
from shardlab.data.checksum import COMPARED, checksum
from shardlab.data.text import map_text
from shardlab.errors import UserError
from shardlab.exchange import initial_from
from shardlab.execute import Executor, Settings
from shardlab.execute.average import averaged
from shardlab.execute.communicator import Groups
from shardlab.execute.state import State
from shardlab.models.tensors import Initial
from shardlab.rules.pieces import counted
from shardlab.train.figures import VALIDATION, VALIDATION_EMA
from shardlab.train.job import Job, agree
from shardlab.train.launch import backend_of

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
        bytes: of their text.
    """

    total: float
    tokens: int
    bytes: int

    @property
    def mean(self) -> float:
        """Nats per token."""
        return self.total / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """Of how many tokens each was as hard to tell as one of so many equally likely ones; infinite beyond floats."""
        return math.exp(self.mean) if self.mean < MOST else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits that it takes to write a byte of the text with the model's help."""
        return self.total / math.log(2) / self.bytes


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
        self._executor = Executor(half, rank, model, batches, settings, backend_of(device), groups=groups, of=of)

    def loss(self) -> Loss:
        """The loss over all batches; every rank calls this, and knows it."""
        total = torch.zeros(2, dtype=torch.float64)
        self._executor.state.step = 0
        for _ in range(self._batches.steps):
            total += self._executor.step()
        total = total.to(self._device)
        dist.all_reduce(total)
        return Loss(float(total[0]), int(total[1]), int(total[1]))  # a token is a byte

    def losses(self) -> dict[str, float]:
        """The mean loss as records name it, and that of averaged weights if there are any; every rank calls this."""
        found = {VALIDATION: self.loss().mean}
        if self._of is not None and self._of.settings.optimizer.ema is not None:
            with averaged(self._of):
                found[VALIDATION_EMA] = self.loss().mean
        return found


@dataclass(frozen=True)
class TextJob:
    """Weights that are judged by a text.

    Attributes:
        job: what is computed, and how.
        folder: of the weights.
        data: the file.
        batches: how many microbatches of it (None: all).
    """

    job: Job
    folder: Path
    data: Path
    batches: int | None = None

    def tokens(self) -> NDArray[np.uint8]:
        """The text.

        Raises:
            UserError: when it is too short, or has tokens that the model does not know.
        """
        found, known = np.frombuffer(map_text(self.data), np.uint8), self.job.model.vocab_size
        if len(found) < 2:
            raise UserError(f"{self.data} has {counted(len(found), 'byte')}, but one is predicted from another; give 2")
        if known < 256 and (largest := int(found.max())) >= known:
            raise UserError(
                f"{self.data} has byte {largest}, which is outside the model's vocabulary of {known}; "
                "give a text that the model was made for"
            )
        return found

    def batches_of(self) -> InOrder:
        """The text's microbatches; what the last one has no text for does not count."""
        text, job = self.tokens(), self.job
        rows, length = job.micro_batch_size, job.model.seq_len

        def cut(number: int) -> tuple[Tensor, Tensor]:
            start = number * rows * length
            part = torch.from_numpy(text[start : start + rows * length + 1].astype(np.int64))
            tokens, targets = torch.zeros(rows * length, dtype=torch.int64), torch.full((rows * length,), -1)
            tokens[: len(part) - 1], targets[: len(part) - 1] = part[:-1], part[1:]
            return tokens.view(rows, length), targets.view(rows, length)

        count = math.ceil((len(text) - 1) / (rows * length))
        return InOrder(rows, min(count, self.batches or count), job.microbatches, cut)


def evaluate_rank(rank: int, device: torch.device, text: TextJob) -> Loss | None:
    """Run one rank's part of judging weights by a text; each reads only the weights that it computes with."""
    checked = text.job.checked()
    agree(checked, str(checksum(map_text(text.data), COMPARED)))
    initial = initial_from(text.folder, text.job.cut)
    loss = Evaluation(text.job, checked, rank, device, text.batches_of(), initial=initial).loss()
    return loss if rank == 0 else None

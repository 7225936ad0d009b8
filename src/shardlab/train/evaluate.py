"""Loss of a model on a text, computed by all ranks under any strategy.

`Evaluation` runs the forward half of a program over some microbatches; a training uses it for its validation loss.
`TextJob` is what `shardlab eval` hands to its ranks: trained weights and a text. It sorts the sequences of the text by
length and pads them to a few widths, so that little padding is computed.
"""

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
from torch import Tensor

from shardlab.check import Checked, check_forward, forward_only
from shardlab.common.errors import UserError
from shardlab.execute.collect import averaged_weights
from shardlab.execute.executor import Executor
from shardlab.execute.kernel_choice import choices_of_rank_0
from shardlab.execute.settings import Settings
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Groups
from shardlab.models.tensors import Initial
from shardlab.models.tensors.compute import kernel_choices
from shardlab.train.data.evaluation_text import EvaluationText, read_eval_text
from shardlab.train.data.prepared_folder import MOST_COMPARED, checksum, find_tokenizer, require_tokenizer
from shardlab.train.data.stream import Numbers
from shardlab.train.history import VALIDATION, VALIDATION_EMA
from shardlab.train.huggingface.sources import initial_from
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of
from shardlab.train.world import require_agreement

MAX_EXPONENT = 700.0
"""Largest mean loss, in nats, whose exponential is still a finite float."""


@dataclass(frozen=True)
class OrderedBatches:
    """Microbatches in a fixed order, `per_step` in each step.

    If too few are left for the last step, it is filled up with copies of the last microbatch whose targets are all -1
    (ignored).

    Attributes:
        micro_batch_size: sequences of a microbatch.
        count: number of microbatches.
        per_step: number of microbatches of a step.
        load: function that returns a microbatch by its number: tokens and targets (micro_batch_size, seq_len), int64.
    """

    micro_batch_size: int
    count: int
    per_step: int
    load: Callable[[int], tuple[Tensor, Tensor]]

    @property
    def steps(self) -> int:
        """Number of steps in which all microbatches are evaluated."""
        return math.ceil(self.count / self.per_step)

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        number = step * self.per_step + microbatch
        tokens, targets = self.load(min(number, self.count - 1))
        return tokens, targets if number < self.count else torch.full_like(targets, -1)

    def counted(self, step: int, microbatches: int) -> int:
        """Return 1, since only gradients are divided by the number of targets."""
        return 1


@dataclass(frozen=True)
class Loss:
    """Loss over a text.

    Attributes:
        total: sum over all tokens, in nats.
        tokens: number of predicted tokens.
    """

    total: float
    tokens: int

    @property
    def mean(self) -> float:
        """Mean loss in nats per token."""
        return self.total / max(1, self.tokens)

    @property
    def perplexity(self) -> float:
        """Exponential of the mean loss; infinity if it is too large for a float."""
        return math.exp(self.mean) if self.mean < MAX_EXPONENT else math.inf


class Evaluation:
    """One rank's part of computing losses by the forward half of a program.

    Args:
        job: strategy and model. Dropout is left out.
        checked: program of the job.
        rank, device: number of the rank, and the device on which it computes.
        batches: microbatches on which the loss is computed.
        weights_of: state of a training whose weights are evaluated (None: the weights that `initial` reads).
        initial: function that reads the weights, if `weights_of` is None.
        groups: process groups that are shared with other executors.
    """

    def __init__(
        self,
        job: Job,
        checked: Checked,
        rank: int,
        device: torch.device,
        batches: OrderedBatches,
        *,
        weights_of: State | None = None,
        initial: Initial | None = None,
        groups: Groups | None = None,
    ) -> None:
        model = replace(job, model=replace(job.model, dropout=0.0)).cut
        settings = Settings(job.seed, job.numbers, device, initial=initial)
        half = check_forward(forward_only(checked))
        self._batches, self._device, self._weights_of = batches, device, weights_of
        self._executor = Executor(
            half, rank, model, batches, settings, backend_of(device.type), groups=groups, weights_of=weights_of
        )

    def loss(self) -> Loss:
        """Compute the loss over all microbatches. Every rank calls this, and receives the same result."""
        total = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._executor.state.step = 0
        for _ in range(self._batches.steps):
            total += self._executor.step()
        dist.all_reduce(total)
        return Loss(float(total[0]), int(total[1]))

    def losses(self) -> dict[str, float]:
        """Compute the mean loss of the weights, and that of their moving averages if there are any.

        Every rank calls this.

        Returns:
            The losses by their names in metrics.jsonl, in nats per token.
        """
        losses = {VALIDATION: self.loss().mean}
        if self._weights_of is not None and self._weights_of.settings.optimizer.ema is not None:
            with averaged_weights(self._weights_of):
                losses[VALIDATION_EMA] = self.loss().mean
        return losses


@dataclass(frozen=True)
class TextLoss(Loss):
    """Loss over a text whose bytes are known.

    Attributes:
        bytes: number of bytes of the text that was predicted.
    """

    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of the text."""
        return self.total / math.log(2) / max(1, self.bytes)


@dataclass(frozen=True)
class TextJob:
    """Evaluation of trained weights on a text.

    Attributes:
        jobs: strategy and model, once for each width that sequences are padded to, in ascending order.
        folder: folder with the weights and their tokenizer.
        data: a file or a prepared folder.
        seq_len: largest number of tokens of a sequence. No width is larger.
        batches: number of microbatches from the beginning of the text (None: all).
        format: format of the file (None: see `read_eval_text`).
        field: field of a JSON line, or column of a Parquet file, that has the text.
    """

    jobs: tuple[Job, ...]
    folder: Path
    data: Path
    seq_len: int
    batches: int | None = None
    format: str | None = None
    field: str = "text"

    def text(self) -> EvaluationText:
        """Read the text.

        Raises:
            UserError: if it cannot be read or encoded, or has tokens outside the model's vocabulary.
        """
        job = self.jobs[-1]
        model, is_folder = job.model, self.data.is_dir()
        tokenizer = find_tokenizer(self.folder) if is_folder else require_tokenizer(self.folder, model.vocab_size)
        at_most = None if self.batches is None else self.batches * job.micro_batch_size
        text = read_eval_text(self.data, tokenizer, self.seq_len, format=self.format, field=self.field, at_most=at_most)
        if (largest := int(text.run.tokens.max())) >= model.vocab_size:
            raise UserError(
                f"{self.data} has token {largest}, which is outside the model's vocabulary of {model.vocab_size:,}; "
                "give a text that the model was made for"
            )
        return text

    def with_widths(self, text: EvaluationText) -> TextJob:
        """Return this job with a model for each of the widths that keep the padding of a text small."""
        job = self.jobs[-1]
        if getattr(job.model, "capacity_factor", None) is not None:  # padding would use up the capacity of experts
            return self
        multiple, batch_size = math.lcm(16, 2 * job.ranks), job.micro_batch_size * job.microbatches
        widths = widths_of(text.lengths(self._count(text)), self.seq_len, multiple, batch_size)
        return replace(self, jobs=tuple(replace(job, model=replace(job.model, seq_len=width)) for width in widths))

    def batches_of(self, text: EvaluationText) -> list[OrderedBatches]:
        """Return the microbatches of each job: the sequences that are padded to its width, sorted by length."""
        lengths = text.lengths(self._count(text))
        order = np.argsort(lengths, kind="stable")
        ends = np.searchsorted(lengths[order], [job.model.seq_len for job in self.jobs], "right").tolist()
        return [
            _in_order(text, job, order[start:stop])
            for job, start, stop in zip(self.jobs, [0, *ends[:-1]], ends, strict=True)
        ]

    def bytes(self, text: EvaluationText) -> int:
        """Return the number of bytes of the text that is evaluated."""
        return text.bytes(self._count(text))

    def _count(self, text: EvaluationText) -> int:
        """Return the number of sequences that are evaluated."""
        limit = len(text) if self.batches is None else self.batches * self.jobs[-1].micro_batch_size
        return min(len(text), limit)


def widths_of(lengths: Numbers, seq_len: int, multiple: int, batch_size: int) -> list[int]:
    """Return the widths to which sequences are padded, ascending.

    The largest is the length of the longest sequence, rounded up. A smaller width is added if it saves at least a third
    of the computation.

    Args:
        lengths: lengths of the sequences.
        seq_len: largest width that is allowed.
        multiple: number of which every width is a multiple, so that a plan can split it.
        batch_size: number of sequences that are computed at once.

    >>> widths_of(np.array([1000, 30, 20, 20]), 131_072, 16, 1)
    [32, 1008]
    """

    def width(length: int) -> int:
        return min(seq_len, -(-length // multiple) * multiple)

    def cost(count: int, width: int) -> int:
        return -(-count // batch_size) * batch_size * width

    ascending = np.sort(lengths)
    widths = [width(int(ascending[-1]))]
    while len(shorter := ascending[ascending <= widths[0] // 2]):
        narrow, total = width(int(shorter[-1])), len(ascending)
        split = cost(len(shorter), narrow) + cost(total - len(shorter), widths[0])
        if narrow >= widths[0] or 3 * split > 2 * cost(total, widths[0]):
            break
        ascending, widths = shorter, [narrow, *widths]
    return widths


def evaluate_rank(rank: int, device: torch.device, task: TextJob) -> TextLoss | None:
    """Run one rank's part of an evaluation. A rank reads only the weights that it computes with.

    Returns:
        The loss on rank 0, None on the other ranks.
    """
    text = task.text()
    groups: Groups = {}
    total, tokens = 0.0, 0
    with kernel_choices(choices_of_rank_0()):
        for job, batches in zip(task.jobs, task.batches_of(text), strict=True):
            checked = job.checked()
            require_agreement(checked, str(checksum(text.run.tokens.data.cast("B"), MOST_COMPARED)))
            initial = initial_from(task.folder, job.cut)
            loss = Evaluation(job, checked, rank, device, batches, initial=initial, groups=groups).loss()
            total, tokens = total + loss.total, tokens + loss.tokens
    return None if rank else TextLoss(total, tokens, task.bytes(text))


def _in_order(text: EvaluationText, job: Job, numbers: Numbers) -> OrderedBatches:
    rows = job.micro_batch_size

    def load(number: int) -> tuple[Tensor, Tensor]:
        present = numbers[number * rows : (number + 1) * rows]
        absent = np.full(rows - len(present), len(text), np.int64)
        tokens, targets = text.cut(np.append(present, absent), job.model.seq_len)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    return OrderedBatches(rows, math.ceil(len(numbers) / rows), job.microbatches, load)

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
from torch import Tensor

from shardlab.check import Checked, check_forward, forward_only
from shardlab.common.errors import UserError
from shardlab.execute import Executor, Settings
from shardlab.execute.collect import averaged_weights
from shardlab.execute.kernel_choice import kept_by_rank_0
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Groups
from shardlab.models.tensors import Initial
from shardlab.models.tensors.compute import kernel_choices
from shardlab.train.data.evaluation_text import EvaluationText, read_eval_text
from shardlab.train.data.prepared_folder import MOST_COMPARED, checksum, find_tokenizer, require_tokenizer
from shardlab.train.data.stream import Numbers
from shardlab.train.history import VALIDATION, VALIDATION_EMA
from shardlab.train.huggingface import initial_from
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of
from shardlab.train.world import require_agreement

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
            with averaged_weights(self._of):
                found[VALIDATION_EMA] = self.loss().mean
        return found


# Weights that are judged by a text.


@dataclass(frozen=True)
class TextLoss(Loss):
    """A loss over a text.

    Attributes:
        bytes: of the text that was predicted.
    """

    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits that it takes to write a byte of the text with the model's help."""
        return self.total / math.log(2) / max(1, self.bytes)


@dataclass(frozen=True)
class TextJob:
    """Weights that are judged by a text.

    Attributes:
        jobs: what is computed, and how: one for each width that sequences are filled up to, ascending.
        folder: of the weights, and of their tokenizer.
        data: a file or a prepared folder.
        seq_len: tokens of a sequence, no fewer than the largest width.
        batches: how many microbatches of it, from the beginning of the text (None: all).
        format, field: of the file; see `read_eval_text`.
    """

    jobs: tuple[Job, ...]
    folder: Path
    data: Path
    seq_len: int
    batches: int | None = None
    format: str | None = None
    field: str = "text"

    def text(self) -> EvaluationText:
        """The text.

        Raises:
            UserError: when it cannot be read or encoded, or has tokens that the model does not know.
        """
        job = self.jobs[-1]
        model, is_folder = job.model, self.data.is_dir()
        tokenizer = find_tokenizer(self.folder) if is_folder else require_tokenizer(self.folder, model.vocab_size)
        at_most = None if self.batches is None else self.batches * job.micro_batch_size
        found = read_eval_text(
            self.data, tokenizer, self.seq_len, format=self.format, field=self.field, at_most=at_most
        )
        if (largest := int(found.run.tokens.max())) >= model.vocab_size:
            raise UserError(
                f"{self.data} has token {largest}, which is outside the model's vocabulary of {model.vocab_size:,}; "
                "give a text that the model was made for"
            )
        return found

    def fitted(self, text: EvaluationText) -> TextJob:
        """The same, with a job for each width that it takes to compute little more than the text has."""
        job = self.jobs[-1]
        if getattr(job.model, "capacity_factor", None) is not None:  # what fills up takes places of experts
            return self
        multiple, together = math.lcm(16, 2 * job.ranks), job.micro_batch_size * job.microbatches
        widths = widths_of(text.lengths(self._count(text)), self.seq_len, multiple, together)
        return replace(self, jobs=tuple(replace(job, model=replace(job.model, seq_len=width)) for width in widths))

    def batches_of(self, text: EvaluationText) -> list[InOrder]:
        """The microbatches of each job, of sequences by their lengths; the last one's rest does not count."""
        lengths = text.lengths(self._count(text))
        order = np.argsort(lengths, kind="stable")
        ends = np.searchsorted(lengths[order], [job.model.seq_len for job in self.jobs], "right").tolist()
        return [
            _in_order(text, job, order[start:stop])
            for job, start, stop in zip(self.jobs, [0, *ends[:-1]], ends, strict=True)
        ]

    def bytes(self, text: EvaluationText) -> int:
        """Bytes of the text that is judged."""
        return text.bytes(self._count(text))

    def _count(self, text: EvaluationText) -> int:
        """How many sequences are judged."""
        most = len(text) if self.batches is None else self.batches * self.jobs[-1].micro_batch_size
        return min(len(text), most)


def _in_order(text: EvaluationText, job: Job, numbers: Numbers) -> InOrder:
    rows = job.micro_batch_size

    def cut(number: int) -> tuple[Tensor, Tensor]:
        few = numbers[number * rows : (number + 1) * rows]
        absent = np.full(rows - len(few), len(text), np.int64)
        tokens, targets = text.cut(np.append(few, absent), job.model.seq_len)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    return InOrder(rows, math.ceil(len(numbers) / rows), job.microbatches, cut)


def widths_of(lengths: Numbers, seq_len: int, multiple: int, together: int) -> list[int]:
    """Widths to fill sequences up to, ascending: the longest one's and, where it saves a third, smaller ones.

    Args:
        lengths: of the sequences.
        seq_len: no width is larger.
        multiple: that widths are of, so that a plan can slice them.
        together: sequences that are computed at once, if need be empty ones.

    >>> widths_of(np.array([1000, 30, 20, 20]), 131_072, 16, 1)
    [32, 1008]
    """

    def width(length: int) -> int:
        return min(seq_len, -(-length // multiple) * multiple)

    def cost(count: int, width: int) -> int:
        return -(-count // together) * together * width

    ascending = np.sort(lengths)
    widths = [width(int(ascending[-1]))]
    while len(few := ascending[ascending <= widths[0] // 2]):
        narrow, many = width(int(few[-1])), len(ascending)
        split = cost(len(few), narrow) + cost(many - len(few), widths[0])
        if narrow >= widths[0] or 3 * split > 2 * cost(many, widths[0]):
            break
        ascending, widths = few, [narrow, *widths]
    return widths


def evaluate_rank(rank: int, device: torch.device, given: TextJob) -> TextLoss | None:
    """Run one rank's part of judging weights by a text; each reads only the weights that it computes with."""
    text = given.text()
    groups: Groups = {}
    total, tokens = 0.0, 0
    with kernel_choices(kept_by_rank_0()):
        for job, batches in zip(given.jobs, given.batches_of(text), strict=True):
            checked = job.checked()
            require_agreement(checked, str(checksum(text.run.tokens.data.cast("B"), MOST_COMPARED)))
            initial = initial_from(given.folder, job.cut)
            loss = Evaluation(job, checked, rank, device, batches, initial=initial, groups=groups).loss()
            total, tokens = total + loss.total, tokens + loss.tokens
    return None if rank else TextLoss(total, tokens, given.bytes(text))

"""Weights that are judged by a text."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shardlab.data.checksum import COMPARED, checksum
from shardlab.data.judged import JudgedText, judged_text
from shardlab.data.kept import kept_tokenizer, want_tokenizer
from shardlab.data.shuffle import Numbers
from shardlab.errors import UserError
from shardlab.exchange import initial_from
from shardlab.execute.communicator import Groups
from shardlab.execute.products import kept_by_rank_0
from shardlab.models.tensors.onednn import choices
from shardlab.train.evaluate import Evaluation, InOrder, Loss
from shardlab.train.job import Job
from shardlab.train.world import agree


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
        format, field: of the file; see `judged_text`.
    """

    jobs: tuple[Job, ...]
    folder: Path
    data: Path
    seq_len: int
    batches: int | None = None
    format: str | None = None
    field: str = "text"

    def text(self) -> JudgedText:
        """The text.

        Raises:
            UserError: when it cannot be read or encoded, or has tokens that the model does not know.
        """
        job = self.jobs[-1]
        model, is_folder = job.model, self.data.is_dir()
        tokenizer = kept_tokenizer(self.folder) if is_folder else want_tokenizer(self.folder, model.vocab_size)
        at_most = None if self.batches is None else self.batches * job.micro_batch_size
        found = judged_text(self.data, tokenizer, self.seq_len, format=self.format, field=self.field, at_most=at_most)
        if (largest := int(found.run.tokens.max())) >= model.vocab_size:
            raise UserError(
                f"{self.data} has token {largest}, which is outside the model's vocabulary of {model.vocab_size:,}; "
                "give a text that the model was made for"
            )
        return found

    def fitted(self, text: JudgedText) -> TextJob:
        """The same, with a job for each width that it takes to compute little more than the text has."""
        job = self.jobs[-1]
        if getattr(job.model, "capacity_factor", None) is not None:  # what fills up takes places of experts
            return self
        multiple, together = math.lcm(16, 2 * job.ranks), job.micro_batch_size * job.microbatches
        widths = widths_of(text.lengths(self._count(text)), self.seq_len, multiple, together)
        return replace(self, jobs=tuple(replace(job, model=replace(job.model, seq_len=width)) for width in widths))

    def batches_of(self, text: JudgedText) -> list[InOrder]:
        """The microbatches of each job, of sequences by their lengths; the last one's rest does not count."""
        lengths = text.lengths(self._count(text))
        order = np.argsort(lengths, kind="stable")
        ends = np.searchsorted(lengths[order], [job.model.seq_len for job in self.jobs], "right").tolist()
        return [
            _in_order(text, job, order[start:stop])
            for job, start, stop in zip(self.jobs, [0, *ends[:-1]], ends, strict=True)
        ]

    def bytes(self, text: JudgedText) -> int:
        """Bytes of the text that is judged."""
        return text.bytes(self._count(text))

    def _count(self, text: JudgedText) -> int:
        """How many sequences are judged."""
        most = len(text) if self.batches is None else self.batches * self.jobs[-1].micro_batch_size
        return min(len(text), most)


def _in_order(text: JudgedText, job: Job, numbers: Numbers) -> InOrder:
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
    with choices(kept_by_rank_0()):
        for job, batches in zip(given.jobs, given.batches_of(text), strict=True):
            checked = job.checked()
            agree(checked, str(checksum(text.run.tokens.data.cast("B"), COMPARED)))
            initial = initial_from(given.folder, job.cut)
            loss = Evaluation(job, checked, rank, device, batches, initial=initial, groups=groups).loss()
            total, tokens = total + loss.total, tokens + loss.tokens
    return None if rank else TextLoss(total, tokens, given.bytes(text))

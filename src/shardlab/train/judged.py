"""Weights that are judged by a text."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardlab.data.checksum import COMPARED, checksum
from shardlab.data.judged import JudgedText, judged_text
from shardlab.data.kept import kept_tokenizer, want_tokenizer
from shardlab.errors import UserError
from shardlab.exchange import initial_from
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
        job: what is computed, and how.
        folder: of the weights, and of their tokenizer.
        data: a file or a prepared folder.
        batches: how many microbatches of it (None: all).
        format, field: of the file; see `judged_text`.
    """

    job: Job
    folder: Path
    data: Path
    batches: int | None = None
    format: str | None = None
    field: str = "text"

    def text(self) -> JudgedText:
        """The text.

        Raises:
            UserError: when it cannot be read or encoded, or has tokens that the model does not know.
        """
        model, is_folder = self.job.model, self.data.is_dir()
        tokenizer = kept_tokenizer(self.folder) if is_folder else want_tokenizer(self.folder, model.vocab_size)
        at_most = None if self.batches is None else self.batches * self.job.micro_batch_size
        found = judged_text(self.data, tokenizer, model.seq_len, format=self.format, field=self.field, at_most=at_most)
        if (largest := int(found.run.tokens.max())) >= model.vocab_size:
            raise UserError(
                f"{self.data} has token {largest}, which is outside the model's vocabulary of {model.vocab_size:,}; "
                "give a text that the model was made for"
            )
        return found

    def batches_of(self, text: JudgedText) -> InOrder:
        """The text's microbatches; what the last one has no text for does not count."""
        rows = self.job.micro_batch_size

        def cut(number: int) -> tuple[Tensor, Tensor]:
            tokens, targets = text.cut(number * rows, rows)
            return torch.from_numpy(tokens), torch.from_numpy(targets)

        count = math.ceil(len(text) / rows)
        return InOrder(rows, min(count, self.batches or count), self.job.microbatches, cut)


def evaluate_rank(rank: int, device: torch.device, given: TextJob) -> TextLoss | None:
    """Run one rank's part of judging weights by a text; each reads only the weights that it computes with."""
    checked, text = given.job.checked(), given.text()
    agree(checked, str(checksum(text.run.tokens.data.cast("B"), COMPARED)))
    initial = initial_from(given.folder, given.job.cut)
    batches = given.batches_of(text)
    loss = Evaluation(given.job, checked, rank, device, batches, initial=initial).loss()
    if rank:
        return None
    return TextLoss(loss.total, loss.tokens, text.bytes(min(len(text), batches.count * batches.micro_batch_size)))

"""Microbatches of a corpus, as tensors."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardlab.train.config import BatchRamp
from shardlab.train.data import Corpus
from shardlab.train.data.stream import Numbers

VALIDATION_SEQUENCES = 64
"""Sequences of the validation part, from its beginning, over which a training computes its validation loss."""


@dataclass(frozen=True)
class Position:
    """Where a run is in its data. All of it follows from the step, so the step is all that has to be kept.

    Attributes:
        step: of the optimizer, from 0: the one that comes next.
        sequence: the number of its first sequence; so many were trained on, by all ranks together.
        epochs: how often each source has been gone through by then.
    """

    step: int
    sequence: int
    epochs: tuple[float, ...]


@dataclass(frozen=True)
class Batches:
    """Microbatches of sequences, with the next token of each as its target, or -1 where a document begins.

    Every sequence comes once in an epoch, in an order that depends on the seed alone: sequence i of a run is the same
    under every strategy and number of ranks.

    Attributes:
        seq_len: tokens of a sequence.
        micro_batch_size: sequences of a microbatch.
        microbatches: of the global batch.
        seed: of the run.
        ramp: how many microbatches each step has (None: always as many).
    """

    corpus: Corpus
    seq_len: int
    micro_batch_size: int
    microbatches: int
    seed: int
    ramp: BatchRamp | None = None

    def position(self, step: int) -> Position:
        """Where the run is before a step."""
        sequence = self._before(step) * self.micro_batch_size
        return Position(step, sequence, tuple(self.corpus.training.epochs(sequence, self.seq_len)))

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, int64 (micro_batch_size, seq_len): a function of seed, step and microbatch."""
        first = self._before(step) + microbatch
        tokens, targets = self.corpus.training.cut(self._numbers(first, 1), self.seq_len, self.seed)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def counted(self, step: int, microbatches: int) -> int:
        """Targets that count in a step; 1 at least, so that it can be divided by."""
        numbers = self._numbers(self._before(step), microbatches)
        return max(1, self.corpus.training.count_targets(numbers, self.seq_len, self.seed))

    @property
    def validation_count(self) -> int:
        """Sequences that the validation loss is a mean over: `VALIDATION_SEQUENCES`, or all that the part has once."""
        return min(VALIDATION_SEQUENCES, max(1, self.corpus.validation.sequences_before_repeat(self.seq_len)))

    @property
    def validation_microbatches(self) -> int:
        """How many microbatches these sequences make."""
        return math.ceil(self.validation_count / self.micro_batch_size)

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets as above, of the validation part in its order.

        In the last microbatch no target counts of rows beyond `validation_count`, so the sequences that count do not
        depend on `micro_batch_size`.
        """
        numbers = self._numbers(index, 1)
        tokens, targets = self.corpus.validation.cut(numbers, self.seq_len, None)
        targets[numbers >= self.validation_count] = -1
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _before(self, step: int) -> int:
        """Microbatches of all steps before one."""
        return step * self.microbatches if self.ramp is None else self.ramp.before(step)

    def _numbers(self, first: int, microbatches: int) -> Numbers:
        """The numbers of the sequences of some microbatches, counted over all steps."""
        return np.arange(first * self.micro_batch_size, (first + microbatches) * self.micro_batch_size)

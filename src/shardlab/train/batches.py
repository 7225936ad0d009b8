"""Microbatches of a corpus as tensors.

The seed, the step and the number of a microbatch in the step determine its content. The position of a run in its data
is therefore one number, the step, whatever the strategy and the number of ranks.
"""

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
"""Largest number of sequences in a training's validation loss. They are the first ones of the validation text."""


@dataclass(frozen=True)
class Batches:
    """Microbatches of sequences. The target of a token is the next token, or -1 if a document begins there.

    Every sequence occurs once in an epoch. The order depends on the seed alone, so sequence i of a run is the same
    under every strategy and number of ranks.

    Attributes:
        corpus: training and validation text.
        seq_len: tokens of a sequence.
        micro_batch_size: sequences of a microbatch.
        microbatches: microbatches of the global batch.
        seed: seed of the run.
        ramp: number of microbatches of each step (None: `microbatches` in every step).
    """

    corpus: Corpus
    seq_len: int
    micro_batch_size: int
    microbatches: int
    seed: int
    ramp: BatchRamp | None = None

    def sequences_before(self, step: int) -> int:
        """Return the number of sequences in all microbatches of the steps before a step."""
        return self._microbatches_before(step) * self.micro_batch_size

    def epochs_before(self, step: int) -> tuple[float, ...]:
        """Return how many times each source has been read before a step; fractions count."""
        return tuple(self.corpus.training.epochs(self.sequences_before(step), self.seq_len))

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, int64 (micro_batch_size, seq_len) each, of a microbatch of a step."""
        first = self._microbatches_before(step) + microbatch
        tokens, targets = self.corpus.training.cut(self._numbers(first, 1), self.seq_len, self.seed)
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def counted(self, step: int, microbatches: int) -> int:
        """Count the targets of a step that are not -1. The result is at least 1, since losses are divided by it."""
        numbers = self._numbers(self._microbatches_before(step), microbatches)
        return max(1, self.corpus.training.count_targets(numbers, self.seq_len, self.seed))

    @property
    def validation_count(self) -> int:
        """Number of sequences of the validation loss: `VALIDATION_SEQUENCES`, or fewer if the text is shorter."""
        return min(VALIDATION_SEQUENCES, max(1, self.corpus.validation.sequences_before_repeat(self.seq_len)))

    @property
    def validation_microbatches(self) -> int:
        """Number of microbatches that hold the sequences of the validation loss."""
        return math.ceil(self.validation_count / self.micro_batch_size)

    def validation(self, index: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets, int64 (micro_batch_size, seq_len) each, of a microbatch of the validation text.

        The rows beyond `validation_count` in the last microbatch have no targets, so the loss does not depend on
        `micro_batch_size`.
        """
        numbers = self._numbers(index, 1)
        tokens, targets = self.corpus.validation.cut(numbers, self.seq_len, None)
        targets[numbers >= self.validation_count] = -1
        return torch.from_numpy(tokens), torch.from_numpy(targets)

    def _microbatches_before(self, step: int) -> int:
        """Return the number of microbatches of all steps before a step."""
        return step * self.microbatches if self.ramp is None else self.ramp.microbatches_before(step)

    def _numbers(self, first: int, microbatches: int) -> Numbers:
        """Return the numbers of the sequences in some consecutive microbatches.

        Args:
            first: number of the first microbatch, counted over all steps.
            microbatches: number of microbatches.
        """
        return np.arange(first * self.micro_batch_size, (first + microbatches) * self.micro_batch_size)

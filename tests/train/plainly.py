"""Training as a rank does, by a clock that no machine can stop, and without what takes longer than the steps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from itertools import count
from unittest.mock import Mock

import pytest
import torch

from shardlab.train.loop import train_rank
from shardlab.train.run import Summary, TrainingRun


@contextmanager
def ticking() -> Generator[pytest.MonkeyPatch]:
    """A millisecond passes from each look at the clock to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", partial(next, count(0.0, 1e-3)))
        yield patch


def train_by_ticks(rank: int, run: TrainingRun) -> Summary | None:
    """What every rank does; rank 0 gives the summary."""
    with ticking():
        return train_rank(rank, torch.device("cpu"), run)


def train_plainly(rank: int, run: TrainingRun) -> Summary | None:
    """What every rank does, without pictures, and without the sample at the end; rank 0 gives the summary."""
    with ticking() as patch:
        patch.setattr("shardlab.train.callbacks.continued", Mock(return_value=""))
        patch.setattr("shardlab.train.output.save_timeline", Mock())
        patch.setattr("shardlab.train.output.OutputFolder.write_plot", Mock())
        return train_rank(rank, torch.device("cpu"), run)

"""Data parallelism, and a mistake in each process that imports it: a checkpoint's moments are forgotten when read."""

from __future__ import annotations

from shardlab.execute.state import State
from shardlab.strategies.ddp import ddp
from shardlab.train.checkpoint.read import Checkpoint

__all__ = ["ddp"]

_restore = Checkpoint.restore


def _forgets(self: Checkpoint, state: State) -> int:
    read = _restore(self, state)
    for part in state.opt_states.values():
        for moment in part.moments:
            moment.zero_()
    return read


Checkpoint.restore = _forgets

"""GPipe (Huang et al. 2019, arXiv 1811.06965, fig. 2c)."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.strategies.schedules.actions import Action, Backward, Forward


def gpipe(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Yield all forward passes, then all backward passes: every microbatch is held at once."""
    yield from (Forward(rank, i) for i in range(microbatches))
    yield from (Backward(rank, i) for i in range(microbatches))

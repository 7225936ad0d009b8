"""Breadth-first: looped stages, each taking all microbatches at once (Lamy-Poirier 2022, arXiv 2211.05953, fig. 4)."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.strategies.schedules.actions import Action, Backward, Forward


def breadth_first(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    """Let all microbatches pass a stage before the next one begins, so sharded weights are gathered once a stage."""
    stages = range(rank, ranks * stages_per_rank, ranks)
    yield from (Forward(stage, i) for stage in stages for i in range(microbatches))
    yield from (Backward(stage, i) for stage in reversed(stages) for i in range(microbatches))

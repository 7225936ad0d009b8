"""A schedule for one size of pipeline, with its messages: ready to be followed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardlab.strategies.schedules.actions import Schedule
from shardlab.strategies.schedules.messages import with_messages
from shardlab.strategies.schedules.sharding import ShardedStep


@dataclass(frozen=True)
class Steps:
    """What each rank of a pipeline does.

    Attributes:
        of_ranks: each rank's steps, in order.
        microbatches: how many there are in a step.
        ranks_of_stages: for every stage the rank it is on.
    """

    of_ranks: tuple[tuple[ShardedStep, ...], ...]
    microbatches: int
    ranks_of_stages: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.ranks_of_stages)


@cache
def steps_of(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int) -> Steps:
    """A schedule made out for a pipeline.

    Raises:
        UserError: when the schedule cannot be followed, or not with these numbers.
    """
    todo = [list(schedule.actions(rank, ranks, microbatches, stages_per_rank)) for rank in range(ranks)]
    placed = tuple(schedule.placement(stage, ranks) for stage in range(ranks * stages_per_rank))
    sent = with_messages(todo, len(placed), placed.__getitem__)
    return Steps(tuple(tuple(steps) for steps in sent), microbatches, placed)

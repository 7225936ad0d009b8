"""A schedule for one size of pipeline, with its messages: ready to be followed."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from types import GeneratorType

from shardlab.program import UserError
from shardlab.program.bounds import require_ops
from shardlab.program.stoppable import Stalled, run_stepwise
from shardlab.rules.pieces import counted
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.strategies.schedules.messages import with_messages
from shardlab.strategies.schedules.sharding import ShardedStep


@dataclass(frozen=True)
class Steps:
    """Steps of each rank of a pipeline.

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
    stages = counted(ranks * stages_per_rank, "stage")
    require_ops(
        2 * ranks * stages_per_rank * microbatches,
        f"the passes of {counted(microbatches, 'microbatch')} through {stages} of the schedule {schedule.name}",
    )
    placed = tuple(schedule.placement(stage, ranks) for stage in range(ranks * stages_per_rank))
    todo = [_actions(schedule, rank, placed, (ranks, microbatches, stages_per_rank)) for rank in range(ranks)]
    sent = with_messages(todo, len(placed), placed.__getitem__, f"the schedule {schedule.name}")
    return Steps(tuple(tuple(steps) for steps in sent), microbatches, placed)


def _actions(
    schedule: Schedule, rank: int, ranks_of_stages: Sequence[int], sizes: tuple[int, int, int]
) -> list[Action]:
    """What a rank does; a user's generator may give anything, or fail."""
    name, microbatches = f"the schedule {schedule.name}", sizes[1]
    actions: list[Action] = []
    most = 3 * sum(place == rank for place in ranks_of_stages) * microbatches  # F, I and W
    given: list[object] = []

    def take() -> Iterator[Action]:
        coming = iter(schedule.actions(rank, *sizes))
        given.extend(islice(coming, most + 1))
        return coming

    try:
        if schedule in SCHEDULES.values():  # which end
            coming = take()
        else:
            coming = run_stepwise(take, given.__len__, lambda: f"action {len(given)} of rank {rank}")
    except UserError:
        raise
    except Stalled as stalled:
        raise UserError(f"{name}: {stalled}") from None
    except Exception as error:
        inside = traceback.extract_tb(error.__traceback__)[1:]  # without the call above
        place = f"line {inside[-1].lineno}" if inside else "called with (rank, ranks, microbatches, stages_per_rank)"
        raise UserError(f"{name}, rank {rank}, {place}: {type(error).__name__}: {error}") from error
    if len(given) > most:
        line = f", line {coming.gi_frame.f_lineno}," if isinstance(coming, GeneratorType) and coming.gi_frame else ""
        raise UserError(
            f"{name}, rank {rank}{line} goes on after {most:,} actions, which is as many as "
            f"{counted(microbatches, 'microbatch')} can have there; let it end"
        )
    for action in given:
        if not isinstance(action, Action):
            raise UserError(f"{name} gave rank {rank} {action!r}; yield Forward, Backward, BackwardInput, ...")
        if not 0 <= action.microbatch < microbatches:
            raise UserError(f"{name} gave rank {rank} {action}, but microbatches are numbered 0 to {microbatches - 1}")
        if not 0 <= action.stage < len(ranks_of_stages) or ranks_of_stages[action.stage] != rank:
            have = ", ".join(str(stage) for stage, place in enumerate(ranks_of_stages) if place == rank)
            raise UserError(f"{name} gave rank {rank} {action}, but that rank has stage {have}")
        actions.append(action)
    mine = [stage for stage, place in enumerate(ranks_of_stages) if place == rank]
    for wanted in ((Forward,), (Backward, BackwardInput), (Backward, BackwardWeight)):
        done = Counter((action.stage, action.microbatch) for action in actions if type(action) in wanted)
        for work in product(mine, range(microbatches)):
            if done[work] != 1:
                what = " or ".join(kind.__name__ for kind in wanted)
                times = "twice" if done[work] > 1 else "no"
                raise UserError(
                    f"{name} gave rank {rank} {times} {what} of stage {work[0]} and microbatch {work[1]}; every stage "
                    "does each once"
                )
    return actions

"""The messages between the actions of a schedule, placed so that the pipeline cannot hang on any kind of channel."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shardlab.program import UserError
from shardlab.strategies.schedules.actions import Action, Backward, Forward, Schedule


class Send(NamedTuple):
    """Hand on what an action has made."""

    made_by: Action
    to: int


class Recv(NamedTuple):
    """Expect what an action elsewhere makes."""

    made_by: Action
    source: int


Step = Action | Send | Recv


@cache
def with_messages(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[Step]]:
    """Every rank's actions and messages.

    The actions of all ranks are put into one order, each after what it needs; right after an action that feeds another
    rank stand its send and the receive. So all ranks' messages follow one order, and whoever waits for a message waits
    for something earlier in it: neither rendezvous nor queues can close a circle.

    Raises:
        UserError: for a schedule in which an action waits for a later one.
    """
    stages = ranks * stages_per_rank
    todo = [list(schedule(rank, ranks, microbatches, stages_per_rank)) for rank in range(ranks)]
    at = [0] * ranks
    steps: list[list[Step]] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    while any(place < len(actions) for place, actions in zip(at, todo, strict=True)):
        before = len(done)
        for rank, actions in enumerate(todo):
            while at[rank] < len(actions) and _needs(actions[at[rank]], stages) <= done:
                action = actions[at[rank]]
                at[rank] += 1
                done.add(action)
                steps[rank].append(action)
                reader = action.stage + (1 if isinstance(action, Forward) else -1)
                if 0 <= reader < stages and reader % ranks != rank:
                    steps[rank].append(Send(action, reader % ranks))
                    steps[reader % ranks].append(Recv(action, rank))
        if len(done) == before:
            stuck = ", ".join(str(actions[place]) for place, actions in zip(at, todo, strict=True) if actions[place:])
            raise UserError(f"the schedule cannot go on: each rank's next action waits for a later one ({stuck})")
    return steps


def _needs(action: Action, stages: int) -> set[Action]:
    """What must have been done before an action."""
    stage, microbatch = action.stage, action.microbatch
    if isinstance(action, Forward):
        return {Forward(stage - 1, microbatch)} if stage else set()
    above: Action = Backward(stage + 1, microbatch) if stage + 1 < stages else Forward(stage, microbatch)
    return {above, Forward(stage, microbatch)}

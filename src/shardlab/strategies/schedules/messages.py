"""The messages between the actions of a schedule, placed so that the pipeline cannot hang on any kind of channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardlab.program import UserError
from shardlab.strategies.schedules.actions import Action, BackwardWeight, Forward


@dataclass(slots=True)  # most steps of a pipeline are messages, and a frozen one takes five times as long to make
class Message:
    """An activation or gradient for a neighbouring stage.

    Attributes:
        stage: the one at this end of the message.
        microbatch: whose activation or gradient it is.
        forward: whether it is the stage's output, on its way up, or the gradient of its input, on its way down.
        peer: the rank at the other end.
    """

    stage: int
    microbatch: int
    forward: bool
    peer: int


class Send(Message):
    """Hand on what this stage has made."""

    __slots__ = ()


class Recv(Message):
    """Expect what this stage reads."""

    __slots__ = ()


Step = Action | Send | Recv

Pass = tuple[bool, int, int]
"""(whether it is a forward pass or the gradients' way down, stage, microbatch)."""


def with_messages(
    todo: Sequence[Sequence[Action]], stages: int, rank_of: Callable[[int], int], name: str = "the schedule"
) -> list[list[Step]]:
    """Place the messages among every rank's actions.

    The actions of all ranks are put into one order, each after what it needs; right after an action that feeds another
    rank stand its send and the receive. So all ranks' messages follow one order, and whoever waits for a message waits
    for something earlier in it: neither rendezvous nor queues can close a circle.

    Args:
        todo: each rank's actions.
        stages: how many there are in all.
        rank_of: where a stage is.
        name: what a refusal calls the schedule.

    Raises:
        UserError: for a schedule in which an action waits for a later one.
    """
    at = [0] * len(todo)
    steps: list[list[Step]] = [[] for _ in todo]
    done: set[Pass] = set()
    while any(place < len(actions) for place, actions in zip(at, todo, strict=True)):
        moved = False
        for rank, actions in enumerate(todo):
            while at[rank] < len(actions) and done.issuperset(_needs(actions[at[rank]], stages)):
                action = actions[at[rank]]
                at[rank] += 1
                moved = True
                steps[rank].append(action)
                if isinstance(action, BackwardWeight):
                    continue
                forward = isinstance(action, Forward)
                done.add((forward, action.stage, action.microbatch))
                reader = action.stage + (1 if forward else -1)
                if 0 <= reader < stages and rank_of(reader) != rank:
                    steps[rank].append(Send(action.stage, action.microbatch, forward, rank_of(reader)))
                    steps[rank_of(reader)].append(Recv(reader, action.microbatch, forward, rank))
        if not moved:
            stuck = ", ".join(
                f"rank {rank} at {actions[place]}"
                for rank, (place, actions) in enumerate(zip(at, todo, strict=True))
                if actions[place:]
            )
            raise UserError(
                f"{name} cannot go on: {stuck}, each waiting for what would be done only later; let every pass come "
                "after those that it needs"
            )
    return steps


def _needs(action: Action, stages: int) -> Sequence[Pass]:
    """What must have been done before an action."""
    stage, microbatch = action.stage, action.microbatch
    if isinstance(action, Forward):
        return ((True, stage - 1, microbatch),) if stage else ()
    if isinstance(action, BackwardWeight):
        return ((False, stage, microbatch),)
    own = True, stage, microbatch
    return (own, (False, stage + 1, microbatch)) if stage + 1 < stages else (own,)

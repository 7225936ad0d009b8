"""The messages between the actions of a schedule, placed so that the pipeline cannot hang on any kind of channel."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from types import GeneratorType

from shardlab.common.user_code import Stalled, require_ops, run_stepwise
from shardlab.language import UserError
from shardlab.language.rules.kinds import counted
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule


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


# Gathers and reductions of a pipeline whose stages' weights are sharded, placed among a rank's actions.


@dataclass(frozen=True)
class Unshard:
    """Gather a stage's whole weights."""

    stage: int


@dataclass(frozen=True)
class Reshard:
    """Let go of a stage's whole weights and keep the shard."""

    stage: int


@dataclass(frozen=True)
class ReduceGrad:
    """Reduce the sum over microbatches of a stage's gradients over the data-parallel ranks."""

    stage: int


ShardedStep = Step | Unshard | Reshard | ReduceGrad


def with_sharding(steps: Sequence[Step], whole: int = 3) -> list[ShardedStep]:
    """Place the steps of sharded stages among a rank's steps.

    A rank holds the whole weights of the next `whole` stages it computes on: that of now, and the others come while it
    computes (torch's pipelining does so too, with 3: one for a forward, one for a backward, one on its way). A stage's
    gradients are reduced once, when its last backward pass is done and what other ranks wait for has been sent.

    Args:
        steps: one rank's actions and messages.
        whole: how many stages' whole weights the rank may hold, 1 or more.
    """
    ends = {step.stage: i for i, step in enumerate(steps) if isinstance(step, Backward | BackwardWeight)}
    held: list[int] = []
    result: list[ShardedStep] = []
    reduce: list[ShardedStep] = []
    for i, (step, wanted) in enumerate(zip(steps, _next_stages(steps, whole), strict=True)):
        if not isinstance(step, Send):
            result += reduce
            reduce = []
            result += [Reshard(stage) for stage in held if stage not in wanted]
            result += [Unshard(stage) for stage in wanted if stage not in held]
            held = wanted
        result.append(step)
        if ends.get(step.stage) == i:
            reduce.append(ReduceGrad(step.stage))
    return [*result, *reduce, *(Reshard(stage) for stage in held)]


def _next_stages(steps: Sequence[Step], count: int) -> list[list[int]]:
    """List for each step the first `count` stages that it and those after it compute on."""
    stages: list[int] = []
    found: list[list[int]] = []
    for step in reversed(steps):
        if not isinstance(step, Message):
            stages = [step.stage, *(stage for stage in stages if stage != step.stage)][:count]
        found.append(stages)
    return found[::-1]


# A schedule for one size of pipeline, with its messages: ready to be followed.


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

"""Pipeline steps of all ranks: the passes of a schedule, with messages and, for sharded stages, gathers and reductions.

A step here is one action of a rank, not an optimizer step. `resolve_schedule` runs a schedule's generator for every
rank, checks that each stage does each pass once, and inserts the messages (`insert_messages`) so that the pipeline
cannot deadlock on any kind of channel. `insert_sharding_steps` adds gathers and reductions to the steps of one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, product
from types import GeneratorType

from shardlab.common.errors import error_text
from shardlab.common.text import counted, listed, plural
from shardlab.common.user_code import Stalled, line_of_error, require_ops, run_stepwise
from shardlab.language import UserError
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule


@dataclass(frozen=True)
class Steps:
    """Steps of all ranks of a pipeline, for one number of ranks and microbatches.

    Attributes:
        of_ranks: steps of each rank, in order.
        microbatches: number of microbatches.
        ranks_of_stages: rank of each stage.
    """

    of_ranks: tuple[tuple[ShardedStep, ...], ...]
    microbatches: int
    ranks_of_stages: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.ranks_of_stages)


@dataclass(frozen=True)
class PlacedSchedule(Schedule):
    """Schedule for one size of pipeline, with its messages already inserted.

    Attributes:
        steps: the steps of all ranks.
    """

    steps: Steps = field(default=Steps((), 0, ()), compare=False, repr=False)

    @classmethod
    def of(cls, name: str, steps: Steps, source: str) -> PlacedSchedule:
        """Return the schedule with these steps."""
        rows = [[step for step in row if isinstance(step, Action)] for row in steps.of_ranks]

        def actions(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
            return iter(rows[rank])

        per_rank = steps.stages // len(rows)
        return cls(name, actions, source, lambda stage, ranks: steps.ranks_of_stages[stage], per_rank, steps)


@cache
def resolve_schedule(schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int) -> Steps:
    """Return the steps of a schedule for these numbers of ranks, microbatches and stages.

    Raises:
        UserError: if the schedule cannot be followed with these numbers.
    """
    if isinstance(schedule, PlacedSchedule):
        require_size(schedule.steps, schedule.name, ranks, microbatches)
        return schedule.steps
    stages = counted(ranks * stages_per_rank, "stage")
    require_ops(
        2 * ranks * stages_per_rank * microbatches,
        f"the passes of {counted(microbatches, 'microbatch')} through {stages} of the schedule {schedule.name}",
    )
    ranks_of_stages = tuple(schedule.placement(stage, ranks) for stage in range(ranks * stages_per_rank))
    actions = [
        _actions(schedule, rank, ranks_of_stages, (ranks, microbatches, stages_per_rank)) for rank in range(ranks)
    ]
    rows = insert_messages(actions, len(ranks_of_stages), ranks_of_stages.__getitem__, f"the schedule {schedule.name}")
    return Steps(tuple(tuple(steps) for steps in rows), microbatches, ranks_of_stages)


def require_size(steps: Steps, name: str, ranks: int, microbatches: int, data_ranks: int = 1) -> None:
    """Raise an error if steps are for another size of pipeline.

    Args:
        steps: steps of all ranks.
        name: name of the schedule or its file.
        ranks: number of pipeline ranks.
        microbatches: number of microbatches on each of them.
        data_ranks: number of data-parallel ranks.

    Raises:
        UserError: if the numbers differ.
    """
    if (len(steps.of_ranks), steps.microbatches) != (ranks, microbatches):
        raise UserError(
            f"{name} is for {len(steps.of_ranks)} pipeline ranks and {steps.microbatches} microbatches on "
            f"each, but the mesh has pp {ranks} and {microbatches} microbatches come to each; give --pp "
            f"{len(steps.of_ranks)} --microbatches {steps.microbatches * data_ranks}"
        )


@dataclass(slots=True)  # most steps are messages; a frozen dataclass would take five times as long to create
class Message:
    """Activation or gradient for a neighbouring stage.

    Attributes:
        stage: stage at this end of the message.
        microbatch: microbatch of the value.
        forward: whether the value is an activation for the next stage, or a gradient for the previous stage.
        peer: rank at the other end.
    """

    stage: int
    microbatch: int
    forward: bool
    peer: int


class Send(Message):
    """Send of a value that this stage has computed."""

    __slots__ = ()


class Recv(Message):
    """Receive of a value that this stage reads."""

    __slots__ = ()


Step = Action | Send | Recv


@dataclass(frozen=True)
class Unshard:
    """Gather of a stage's whole weights."""

    stage: int


@dataclass(frozen=True)
class Reshard:
    """Release of a stage's whole weights; the shard stays."""

    stage: int


@dataclass(frozen=True)
class ReduceGrad:
    """Reduction of a stage's gradients, summed over microbatches, over the data-parallel ranks."""

    stage: int


ShardedStep = Step | Unshard | Reshard | ReduceGrad


def insert_messages(
    rank_actions: Sequence[Sequence[Action]], stages: int, rank_of: Callable[[int], int], name: str = "the schedule"
) -> list[list[Step]]:
    """Insert the messages between the actions of all ranks, so that no deadlock is possible.

    The actions of all ranks are put into one global order, each after the actions on which it depends. If an action
    feeds another rank, its send and the receive follow it immediately. So all messages follow one global order, and a
    rank only waits for earlier actions in this order. Neither rendezvous nor queues can form a cycle.

    Args:
        rank_actions: actions of each rank.
        stages: total number of stages.
        rank_of: function from a stage to its rank.
        name: name of the schedule in error messages.

    Raises:
        UserError: if an action waits for a later one.
    """
    positions = [0] * len(rank_actions)
    steps: list[list[Step]] = [[] for _ in rank_actions]
    finished: set[PassKey] = set()
    while any(place < len(actions) for place, actions in zip(positions, rank_actions, strict=True)):
        progress = False
        for rank, actions in enumerate(rank_actions):
            while positions[rank] < len(actions) and finished.issuperset(_needs(actions[positions[rank]], stages)):
                action = actions[positions[rank]]
                positions[rank] += 1
                progress = True
                steps[rank].append(action)
                if isinstance(action, BackwardWeight):
                    continue
                forward = isinstance(action, Forward)
                finished.add((forward, action.stage, action.microbatch))
                reader = action.stage + (1 if forward else -1)
                if 0 <= reader < stages and rank_of(reader) != rank:
                    steps[rank].append(Send(action.stage, action.microbatch, forward, rank_of(reader)))
                    steps[rank_of(reader)].append(Recv(reader, action.microbatch, forward, rank))
        if not progress:
            stuck = ", ".join(
                f"rank {rank} at {actions[place]}"
                for rank, (place, actions) in enumerate(zip(positions, rank_actions, strict=True))
                if actions[place:]
            )
            raise UserError(
                f"{name} cannot go on: {stuck}, each waiting for a pass that comes later; put every pass after the "
                "passes that it needs"
            )
    return steps


def insert_sharding_steps(steps: Sequence[Step], whole: int = 3) -> list[ShardedStep]:
    """Insert the gathers and reductions of sharded stages into a rank's steps.

    The rank keeps the whole weights of its current stage and of the next ones, which are gathered while it computes.
    PyTorch's pipelining also keeps 3 stages: one for a forward pass, one for a backward pass, one in flight. The
    gradients of a stage are reduced once, after its last backward pass and the sends that follow it.

    Args:
        steps: actions and messages of one rank.
        whole: number of stages whose whole weights the rank may keep, 1 or more.
    """
    ends = {step.stage: i for i, step in enumerate(steps) if isinstance(step, Backward | BackwardWeight)}
    gathered: list[int] = []
    result: list[ShardedStep] = []
    reduce: list[ShardedStep] = []
    for i, (step, next_stages) in enumerate(zip(steps, _next_stages(steps, whole), strict=True)):
        if not isinstance(step, Send):
            result += reduce
            reduce = []
            result += [Reshard(stage) for stage in gathered if stage not in next_stages]
            result += [Unshard(stage) for stage in next_stages if stage not in gathered]
            gathered = next_stages
        result.append(step)
        if ends.get(step.stage) == i:
            reduce.append(ReduceGrad(step.stage))
    return [*result, *reduce, *(Reshard(stage) for stage in gathered)]


PassKey = tuple[bool, int, int]
"""(is_forward, stage, microbatch) of a pass; a backward pass counts as done after its input half."""


def _needs(action: Action, stages: int) -> Sequence[PassKey]:
    """Return the passes on which an action depends."""
    stage, microbatch = action.stage, action.microbatch
    if isinstance(action, Forward):
        return ((True, stage - 1, microbatch),) if stage else ()
    if isinstance(action, BackwardWeight):
        return ((False, stage, microbatch),)
    forward_pass = True, stage, microbatch
    return (forward_pass, (False, stage + 1, microbatch)) if stage + 1 < stages else (forward_pass,)


def _next_stages(steps: Sequence[Step], count: int) -> list[list[int]]:
    """Return, for each step, the next `count` different stages that compute, starting at this step."""
    stages: list[int] = []
    stages_of_steps: list[list[int]] = []
    for step in reversed(steps):
        if not isinstance(step, Message):
            stages = [step.stage, *(stage for stage in stages if stage != step.stage)][:count]
        stages_of_steps.append(stages)
    return stages_of_steps[::-1]


def _actions(
    schedule: Schedule, rank: int, ranks_of_stages: Sequence[int], sizes: tuple[int, int, int]
) -> list[Action]:
    """Return the actions of a rank, and refuse a generator that yields other objects, fails or does not end."""
    name, microbatches = f"the schedule {schedule.name}", sizes[1]
    actions: list[Action] = []
    stages = [stage for stage, place in enumerate(ranks_of_stages) if place == rank]
    limit = 3 * len(stages) * microbatches  # F, I and W
    results: list[object] = []

    def take() -> Iterator[Action]:
        generator = iter(schedule.actions(rank, *sizes))
        results.extend(islice(generator, limit + 1))
        return generator

    try:
        if schedule in SCHEDULES.values():  # these are known to end
            generator = take()
        else:
            generator = run_stepwise(take, results.__len__, lambda: f"action {len(results)} of rank {rank}")
    except UserError:
        raise
    except Stalled as stalled:
        raise UserError(f"{name}: {stalled}") from None
    except Exception as error:
        line = line_of_error(error)
        place = f"line {line.number}" if line else "called with (rank, ranks, microbatches, stages_per_rank)"
        raise UserError(f"{name}, rank {rank}, {place}: {error_text(error)}") from error
    for action in results:
        if not isinstance(action, Action):
            raise UserError(f"{name} gave rank {rank} {action!r}; yield Forward, Backward, BackwardInput, ...")
        if not 0 <= action.microbatch < microbatches:
            raise UserError(f"{name} gave rank {rank} {action}, but microbatches are numbered 0 to {microbatches - 1}")
        if action.stage not in stages:
            raise UserError(
                f"{name} gave rank {rank} {action}, but that rank has {plural('stage', len(stages))} {listed(stages)}"
            )
        actions.append(action)
    if len(results) > limit:
        frame = generator.gi_frame if isinstance(generator, GeneratorType) else None
        line = f", line {frame.f_lineno}," if frame else ""
        repeated = next(action for action, times in Counter(actions).items() if times > 1)
        raise UserError(
            f"{name}, rank {rank}{line} goes on after {limit:,} actions, which is as many as "
            f"{counted(microbatches, 'microbatch')} can have there; {repeated} came twice; let it end"
        )
    for kinds in ((Forward,), (Backward, BackwardInput), (Backward, BackwardWeight)):
        counts = Counter((action.stage, action.microbatch) for action in actions if type(action) in kinds)
        for work in product(stages, range(microbatches)):
            if counts[work] != 1:
                noun = " or ".join(kind.__name__ for kind in kinds)
                times = "twice" if counts[work] > 1 else "no"
                raise UserError(
                    f"{name} gave rank {rank} {times} {noun} of stage {work[0]} and microbatch {work[1]}; every stage "
                    "does each once"
                )
    return actions

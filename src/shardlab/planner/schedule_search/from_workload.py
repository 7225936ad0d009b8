"""Schedule problems of real steps: costs of the stages of a plan for a model on a cluster, in seconds and bytes.

`problem_of` replays two microbatches of the plan one after the other, forth and back with split backward passes. It
reads off the time of each pass of each stage on the second one, and the memory that the pass leaves beside gradients.
`with_schedule` puts a found schedule into the step, whose replay then says what it takes with all that the search
leaves out: gathers and reductions, updates and queues of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardlab.common.errors import UserError
from shardlab.language import Op, OpKind
from shardlab.planner.schedule_search.problem import Objective, Placement, ScheduleProblem, StageCosts
from shardlab.planner.schedule_search.search import FoundSchedule, published_schedule
from shardlab.simulate.predict.estimate import Estimate
from shardlab.simulate.predict.memory import tensor_budget
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.prices import rank_of
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.schedules.actions import Action, BackwardInput, BackwardWeight, Forward, Schedule, loop, vee
from shardlab.strategies.schedules.steps import PlacedSchedule, Steps

_PASSES = (
    frozenset({OpKind.FORWARD, OpKind.ATTEND}),
    frozenset({OpKind.LOSS, OpKind.LOSS_STATS, OpKind.RECOMPUTE, OpKind.BACKWARD_INPUT, OpKind.ATTEND_BACKWARD}),
    frozenset({OpKind.BACKWARD_WEIGHT}),
)
"""Kinds of the ops of a forward pass and of the two halves of a backward pass."""

_ANY_PASS = frozenset[OpKind]().union(*_PASSES)


ROUNDS = 4
"""Searches of a step, each with a smaller memory limit than the one before."""


@dataclass(frozen=True)
class StepProblem:
    """Step whose schedule is searched.

    Attributes:
        workload: the step.
        pipeline: its stages: times in seconds, memory in bytes.
        budget: bytes of tensors on each rank at its peak, at most.
    """

    workload: Workload
    pipeline: ScheduleProblem
    budget: float

    def search(self, search: Callable[[ScheduleProblem], FoundSchedule]) -> tuple[FoundSchedule, Estimate]:
        """Search a schedule, and replay the step with it.

        The replay may need more memory than the search counts, such as weights that are gathered for several passes.
        The limit is then lowered by as much, and the search begins again.

        Args:
            search: function that searches a schedule for a pipeline.

        Raises:
            UserError: if no schedule is found that fits.
        """
        pipeline = self.pipeline
        for _ in range(ROUNDS):
            found = search(pipeline)
            estimate = with_schedule(self.workload, found.steps).estimate()
            excess = self._excess(estimate)
            if not any(excess):
                return self._or_published(found, estimate)
            limits = tuple(limit - more for limit, more in zip(pipeline.limits, excess, strict=True))
            pipeline = replace(pipeline, limit=limits)
        raise UserError(f"no schedule was found that fits in memory within {ROUNDS} searches; give more memory")

    def _excess(self, estimate: Estimate) -> list[float]:
        """Return the bytes of each pipeline rank above the budget in a replay."""
        mesh = estimate.traced.program.mesh
        needed = {mesh.coordinate(peak.rank, "pp"): peak.bytes for peak in estimate.peaks}
        return [max(0.0, needed[rank] - self.budget) for rank in range(self.pipeline.ranks)]

    def _or_published(self, found: FoundSchedule, estimate: Estimate) -> tuple[FoundSchedule, Estimate]:
        """Return a found schedule, or the best published one if the whole step fits and is faster with that.

        In the replay, messages of a rank share its link, which the search leaves out.
        """
        best = found.best_published
        if best is None:
            return found, estimate
        other = published_schedule(found, best.name)
        replayed = with_schedule(self.workload, other.steps).estimate()
        is_better = replayed.step < estimate.step and not any(self._excess(replayed))
        return (other, replayed) if is_better else (found, estimate)


def problem_of(
    workload: Workload,
    *,
    placement: Placement = "loop",
    stages_per_rank: int = 1,
    memory: float | None = None,
    objective: Objective = "step",
) -> StepProblem:
    """Return the schedule problem of a pipeline plan.

    Args:
        workload: the step. The schedule of its plan does not matter.
        placement: placement of stages on ranks.
        stages_per_rank: number of stages of each rank.
        memory: bytes of tensors on each rank at its peak (None: as much as the device holds).
        objective: time to minimize.

    Raises:
        UserError: if the model has too few layers for so many stages, or one microbatch does not fit.
    """
    plan = workload.plan
    assert isinstance(plan, Plan)
    place = vee if placement == "vee" else loop
    ranks = plan.mesh.pp
    single = replace(
        workload,
        plan=replace(plan, schedule=_forth_and_back(placement, stages_per_rank), stages_per_rank=None, passes=None),
        microbatches=2 * plan.data_ranks,
        passes="none",
    )
    estimate = single.estimate()
    model = model_layers(single.sizes)
    assert isinstance(single.plan, Plan)
    units = single.plan.bounds(model.pipeline_units, model.units_text)
    cuts = [model.pipeline_cuts[unit] for unit in units]
    program = estimate.traced.program
    rows = {program.mesh.coordinate(rank_of(program, row), "pp"): row for row in range(len(program.tapes))}
    places = [place(stage, ranks) for stage in range(ranks * stages_per_rank)]
    stages = [
        _passes_of(estimate, rows[rank], range(*bounds)) for rank, bounds in zip(places, pairwise(cuts), strict=True)
    ]
    budget = memory if memory is not None else tensor_budget(single)
    of_ranks = [[each for each, other in zip(stages, places, strict=True) if other == rank] for rank in range(ranks)]
    limits = tuple(budget - _beside(estimate, rows[rank], of_ranks[rank]) for rank in range(ranks))
    message = max(
        after.spans[0][0] - stage.spans[0][1]
        for (stage, rank), (after, other) in pairwise(zip(stages, places, strict=True))
        if rank != other
    )
    costs = tuple(stage.costs for stage in stages)
    each = workload.microbatches // plan.data_ranks
    pipeline = ScheduleProblem(ranks, each, costs, max(0.0, message), limits, placement, objective)
    return StepProblem(workload, pipeline, budget)


def with_schedule(workload: Workload, steps: Steps) -> Workload:
    """Return the step with a schedule that was found for it."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    schedule = PlacedSchedule.of("found", steps, "a search")
    return replace(workload, plan=replace(plan, schedule=schedule, stages_per_rank=None))


def _forth_and_back(placement: Placement, stages_per_rank: int) -> Schedule:
    """Return a schedule of microbatches one after the other: all forward passes, then halves of backward passes."""
    place = vee if placement == "vee" else loop

    def actions(rank: int, ranks: int, microbatches: int, stages: int) -> Iterator[Action]:
        mine = [stage for stage in range(ranks * stages) if place(stage, ranks) == rank]
        for i in range(microbatches):
            yield from (Forward(stage, i) for stage in mine)
            for stage in reversed(mine):
                yield BackwardInput(stage, i)
                yield BackwardWeight(stage, i)

    return Schedule("forth and back", actions, "one after the other", place, stages_per_rank)


@dataclass(frozen=True)
class _StagePasses:
    """The three passes of one stage on the second microbatch of a replay.

    Attributes:
        places: first and last op of each pass on the rank's tape.
        spans: start and end of each pass.
        activation, kept: bytes that the forward pass leaves, and that the input half leaves of them or adds.
    """

    places: tuple[tuple[int, int], ...]
    spans: tuple[tuple[float, float], ...]
    activation: int
    kept: int

    @property
    def costs(self) -> StageCosts:
        """Costs of the stage."""
        times = (end - start for start, end in self.spans)
        return StageCosts(*times, activation=self.activation, kept=self.kept)

    def held_at(self, op: int) -> int:
        """Return the bytes that the search counts while an op runs."""
        (first, _), (input_start, _), (_, weight_end) = self.places
        if first <= op < input_start:
            return self.activation
        return self.kept if input_start <= op <= weight_end else 0


def _passes_of(estimate: Estimate, row: int, layers: range) -> _StagePasses:
    """Return the passes of the stage with these layers on the second microbatch."""
    program, times, memory = estimate.traced.program, estimate.times, estimate.memory[row]
    tape, specs = program.tapes[row], estimate.traced.specs[row]
    own = [*layers, program.layers] if layers.stop == program.layers else layers  # the loss comes after the last layer
    found: tuple[list[int], ...] = ([], [], [])
    seen: set[tuple[OpKind, int]] = set()
    second = max(specs[op.inputs[0]].microbatches for op in tape if op.kind in _ANY_PASS)
    for place, op in enumerate(tape):
        if op.kind in _ANY_PASS and op.layer in own and specs[op.inputs[0]].microbatches == second:
            again = (op.kind, op.layer) in seen  # a forward pass that is computed again belongs to the input half
            seen.add((op.kind, op.layer))
            number = next(number for number, kinds in enumerate(_PASSES) if op.kind in kinds)
            found[1 if again and number == 0 else number].append(place)
    places = [(each[0], each[-1]) for each in found]
    spans = tuple((times.starts[row][first], times.ends[row][last]) for first, last in places)
    entries = [_entry(tape, first) for first, _ in places]
    after_forward = _entry(tape, next(i for i in range(places[0][1] + 1, len(tape)) if tape[i].kind in _ANY_PASS))
    activation = max(0, memory.before[after_forward] - memory.before[entries[0]])
    change = memory.before[entries[2]] - memory.before[entries[1]]
    return _StagePasses(tuple(places), spans, activation, max(0, activation + change))


def _entry(tape: Sequence[Op], place: int) -> int:
    """Return the place of the first receive that an op has waited for since the last pass, or of the op."""
    entry = place
    while entry and tape[entry - 1].kind in (OpKind.RECV, OpKind.WAIT):
        entry -= 1
    return entry


def _beside(estimate: Estimate, row: int, stages: Sequence[_StagePasses]) -> float:
    """Return the bytes that a rank holds at most beside what the search counts."""
    during = estimate.memory[row].during
    return max(bytes - sum(stage.held_at(op) for stage in stages) for op, bytes in enumerate(during))

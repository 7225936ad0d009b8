"""Schedule problems of predicted steps: costs of a plan's stages on a cluster, in seconds and bytes.

`problem_of` replays the forward and backward passes of two microbatches, one after the other. From the second one it
takes the time of each pass of each stage, and the activations that are in memory after it. Backward passes are split
into halves. If that needs more memory, since the input half computes activations again, there is a second problem with
whole backward passes, which free the memory block by block.

`with_schedule` returns the step with a found schedule. Its replay includes what the search leaves out: gathers and
reductions, updates, and messages that wait for the link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from shardlab.common.errors import UserError
from shardlab.common.text import bytes_text, memory_text
from shardlab.language import Op, OpKind
from shardlab.planner.schedule_search.problem import (
    LimitTooLowError,
    Objective,
    Placement,
    ScheduleProblem,
    StageCosts,
)
from shardlab.planner.schedule_search.search import FoundSchedule, Published, published_schedule
from shardlab.planner.schedule_search.timing import Orders
from shardlab.simulate.predict.estimate import Estimate
from shardlab.simulate.predict.memory import tensor_budget
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.prices import rank_of
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.schedules.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    loop,
    vee,
)
from shardlab.strategies.schedules.steps import PlacedSchedule, Steps

_PASSES = (
    frozenset({OpKind.FORWARD, OpKind.ATTEND}),
    frozenset(
        {
            OpKind.LOSS,
            OpKind.LOSS_STATS,
            OpKind.RECOMPUTE,
            OpKind.BACKWARD,
            OpKind.BACKWARD_INPUT,
            OpKind.ATTEND_BACKWARD,
        }
    ),
    frozenset({OpKind.BACKWARD_WEIGHT}),
)
"""Kinds of the ops of a forward pass, of an input half or whole backward pass, and of a weight half."""

_ANY_PASS = frozenset[OpKind]().union(*_PASSES)


SHARES = (0.4, 0.2, 0.2, 0.2)
"""Shares of the time for repeated searches of a problem. Each replay corrects the memory limits of the next search."""

SPARE = 0.02
"""Share of the memory budget.

If the limit of the search keeps a rank from one more activation, although the rank leaves more than this share unused
in the replay, the search is repeated with higher limits.
"""


@dataclass(frozen=True)
class StepProblem:
    """Step whose schedule is searched.

    Attributes:
        workload: the step.
        pipelines: schedule problems of its pipeline, in seconds and bytes: one with split backward passes, one with
            whole ones, or both.
        budget: limit of the peak of each rank's tensors in bytes.
    """

    workload: Workload
    pipelines: tuple[ScheduleProblem, ...]
    budget: float

    def search(self, search: Callable[[ScheduleProblem, float], FoundSchedule]) -> tuple[FoundSchedule, Estimate]:
        """Search for a schedule, and replay the step with it.

        In the replay, messages of a rank share its link, which the search ignores. The fastest published schedule with
        which the step fits is therefore replayed too, and is the result if it is faster.

        Args:
            search: function that searches for a schedule. Its arguments are the schedule problem of a pipeline, and the
                share of the time that it may take.

        Raises:
            UserError: if no schedule that fits is found.
        """
        solutions = [self._fitting(pipeline, search) for pipeline in self.pipelines]
        results = [(solution, estimate) for solution, estimate in solutions if estimate is not None]
        # A published schedule that both problems have is taken from the last one, with whole backward passes.
        published = {entry.name: (entry, solution) for solution, _ in solutions for entry in solution.published}
        ordered = sorted(published.values(), key=lambda entry: (entry[0].time, entry[0].name))
        replayed: list[Published] = []
        for entry, solution in ordered:
            if not any(other.fits for other in replayed):
                alternative = published_schedule(solution, entry.name)
                estimate = with_schedule(self.workload, alternative.steps).estimate()
                entry = replace(entry, fits=min(self._unused_bytes(estimate)) >= 0)
                results += [(alternative, estimate)] if entry.fits else []
            replayed.append(entry)
        if not results:
            raise UserError("no schedule was found with which the step fits in memory; give more memory")
        best, estimate = min(results, key=lambda result: result[1].step)
        return replace(best, published=replayed), estimate

    def faster(self, best: tuple[FoundSchedule, Estimate], other: FoundSchedule) -> tuple[FoundSchedule, Estimate]:
        """Return a known schedule with its replay, or another schedule if the step fits and is faster with it."""
        estimate = with_schedule(self.workload, other.steps).estimate()
        return (other, estimate) if min(self._unused_bytes(estimate)) >= 0 and estimate.step < best[1].step else best

    def _fitting(
        self, pipeline: ScheduleProblem, search: Callable[[ScheduleProblem, float], FoundSchedule]
    ) -> tuple[FoundSchedule, Estimate | None]:
        """Return the best schedule with which the whole step fits, and its replay; if none fits, any schedule and None.

        The search estimates the memory of a rank besides activations. In the replay, a rank may hold more, such as
        weights that are gathered for several passes, or less. The limits are then corrected by the difference, and the
        search is repeated.
        """
        best: tuple[FoundSchedule, Estimate | None] | None = None
        tried_orders: list[Orders] = []
        for share in SHARES:
            solution = search(pipeline, share / len(self.pipelines))
            if solution.timing.orders in tried_orders:
                break
            tried_orders.append(solution.timing.orders)
            estimate = with_schedule(self.workload, solution.steps).estimate()
            remaining = self._unused_bytes(estimate)
            if min(remaining) < 0:
                best = best or (solution, None)
            else:
                if best is None or best[1] is None or estimate.step < best[1].step:
                    best = solution, estimate
                one_more = max(stage.activation for stage in pipeline.stages)
                used = zip(solution.timing.peaks, pipeline.limits, remaining, strict=True)
                if not any(peak + one_more > limit and spare > SPARE * self.budget for peak, limit, spare in used):
                    break
            limits = tuple(limit + spare for limit, spare in zip(pipeline.limits, remaining, strict=True))
            try:
                pipeline = replace(pipeline, limit=limits)
            except LimitTooLowError:
                break
        assert best is not None, "there is a share of the time"
        return best

    def _unused_bytes(self, estimate: Estimate) -> list[float]:
        """Return the bytes of the budget that each pipeline rank leaves unused in a replay, which may be negative."""
        mesh = estimate.traced.program.mesh
        needed = {mesh.coordinate(peak.rank, "pp"): peak.bytes for peak in estimate.peaks}
        return [self.budget - needed[rank] for rank in range(mesh.pp)]


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
        workload: the step. The schedule of its plan is ignored.
        placement: placement of stages on ranks.
        stages_per_rank: number of stages of each rank.
        memory: limit of the peak of each rank's tensors in bytes (None: the memory of the device).
        objective: time to minimize.

    Raises:
        UserError: if the model has too few layers for so many stages, or one microbatch does not fit.
    """
    halves = _replay_stages(workload, placement, stages_per_rank, whole=False)
    replays = [halves]
    if any(stage.kept_bytes > 1.05 * stage.activation for stage in halves.stages):
        replays.append(_replay_stages(workload, placement, stages_per_rank, whole=True))
    plan = workload.plan
    assert isinstance(plan, Plan)
    microbatches = workload.microbatches // plan.data_ranks
    budget = memory if memory is not None else halves.budget
    problems: list[ScheduleProblem] = []
    refusal = None
    for replay in replays:
        costs = tuple(stage.costs for stage in replay.stages)
        limits = tuple(budget - other_bytes for other_bytes in replay.other_bytes)
        try:
            problem = ScheduleProblem(plan.mesh.pp, microbatches, costs, replay.message, limits, placement, objective)
        except LimitTooLowError as error:
            needs, has = bytes_text(replay.other_bytes[error.rank] + error.minimum), memory_text(max(0, budget))
            shortage = f"rank {error.rank} needs {needs} for one microbatch, and has {has} for tensors"
            refusal = UserError(f"{shortage}; give more --memory or --pp")
        else:
            problems.append(problem)
    if refusal is not None and not problems:
        raise refusal
    return StepProblem(workload, tuple(problems), budget)


def with_schedule(workload: Workload, steps: Steps) -> Workload:
    """Return the step with a found schedule."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    schedule = PlacedSchedule.of("found", steps, "a search")
    return replace(workload, plan=replace(plan, schedule=schedule, stages_per_rank=None))


@dataclass(frozen=True)
class _Replay:
    """Stages of a pipeline, measured in a replay of two microbatches, one after the other.

    Attributes:
        stages: the passes of each stage.
        message: largest time from the end of a stage's forward pass to the start of the next stage's forward pass.
        other_bytes: for each rank, the largest number of bytes at any op besides the activations of its stages. The
            search does not count these bytes.
        budget: bytes of a device for tensors.
    """

    stages: list[_StagePasses]
    message: float
    other_bytes: list[int]
    budget: float


def _replay_stages(workload: Workload, placement: Placement, stages_per_rank: int, *, whole: bool) -> _Replay:
    plan = workload.plan
    assert isinstance(plan, Plan)
    schedule = _forth_and_back(placement, stages_per_rank, whole=whole)
    single = replace(
        workload,
        plan=replace(plan, schedule=schedule, stages_per_rank=None, passes=None),
        microbatches=2 * plan.data_ranks,
        passes="none",
    )
    estimate = single.estimate()
    model, ranks = model_layers(single.sizes), plan.mesh.pp
    assert isinstance(single.plan, Plan)
    units = single.plan.bounds(model.pipeline_units, model.units_text)
    cuts = [model.pipeline_cuts[unit] for unit in units]
    program = estimate.traced.program
    rows = {program.mesh.coordinate(rank_of(program, row), "pp"): row for row in range(len(program.tapes))}
    places = [schedule.placement(stage, ranks) for stage in range(ranks * stages_per_rank)]
    stages = [
        _passes_of(estimate, rows[rank], range(*bounds)) for rank, bounds in zip(places, pairwise(cuts), strict=True)
    ]
    message = max(
        next_stage.spans[0][0] - stage.spans[0][1]
        for (stage, rank), (next_stage, other) in pairwise(zip(stages, places, strict=True))
        if rank != other
    )
    of_ranks = [[stage for stage, other in zip(stages, places, strict=True) if other == rank] for rank in range(ranks)]
    other_bytes = [_other_bytes(estimate, rows[rank], of_ranks[rank]) for rank in range(ranks)]
    return _Replay(stages, max(0.0, message), other_bytes, tensor_budget(single))


def _forth_and_back(placement: Placement, stages_per_rank: int, *, whole: bool) -> Schedule:
    """Return a schedule that runs one microbatch after the other: its forward passes, then its backward passes."""
    place = vee if placement == "vee" else loop

    def actions(rank: int, ranks: int, microbatches: int, stages: int) -> Iterator[Action]:
        rank_stages = [stage for stage in range(ranks * stages) if place(stage, ranks) == rank]
        for i in range(microbatches):
            yield from (Forward(stage, i) for stage in rank_stages)
            for stage in reversed(rank_stages):
                if whole:
                    yield Backward(stage, i)
                else:
                    yield BackwardInput(stage, i)
                    yield BackwardWeight(stage, i)

    return Schedule("forth and back", actions, "one after the other", place, stages_per_rank)


@dataclass(frozen=True)
class _StagePasses:
    """The passes of one stage on the second microbatch of a replay: forward, then two halves or a whole backward pass.

    Attributes:
        places: first and last op of each pass on the rank's tape.
        spans: start and end of each pass.
        activation: bytes that the forward pass leaves in memory.
        kept_bytes: bytes of this stage that are in memory from the input half to the end of the weight half.
    """

    places: tuple[tuple[int, int], ...]
    spans: tuple[tuple[float, float], ...]
    activation: int
    kept_bytes: int

    @property
    def costs(self) -> StageCosts:
        """Costs of the stage."""
        forward, backward, *weight = (end - start for start, end in self.spans)
        return StageCosts(forward, backward, sum(weight), self.activation, self.kept_bytes)

    def held_at(self, op: int) -> int:
        """Return the bytes that the search counts while an op runs."""
        first, backward, last = self.places[0][0], self.places[1][0], self.places[-1][1]
        if first <= op < backward:
            return self.activation
        return self.kept_bytes if backward <= op <= last else 0


def _passes_of(estimate: Estimate, row: int, layers: range) -> _StagePasses:
    """Return the passes of the stage with these layers on the second microbatch."""
    program, times, memory = estimate.traced.program, estimate.times, estimate.memory[row]
    tape, specs = program.tapes[row], estimate.traced.specs[row]
    # The loss follows the last layer.
    own_layers = [*layers, program.layers] if layers.stop == program.layers else layers
    indices: tuple[list[int], ...] = ([], [], [])
    past_ops: set[tuple[OpKind, int]] = set()
    second = max(specs[op.inputs[0]].microbatches for op in tape if op.kind in _ANY_PASS)
    for place, op in enumerate(tape):
        if op.kind in _ANY_PASS and op.layer in own_layers and specs[op.inputs[0]].microbatches == second:
            # A forward pass that is computed again belongs to the input half.
            is_recompute = (op.kind, op.layer) in past_ops
            past_ops.add((op.kind, op.layer))
            number = next(number for number, kinds in enumerate(_PASSES) if op.kind in kinds)
            indices[1 if is_recompute and number == 0 else number].append(place)
    places = [(positions[0], positions[-1]) for positions in indices if positions]
    spans = tuple((times.starts[row][first], times.ends[row][last]) for first, last in places)
    entries = [_entry(tape, first) for first, _ in places]
    after_forward = _entry(tape, next(i for i in range(places[0][1] + 1, len(tape)) if tape[i].kind in _ANY_PASS))
    activation = max(0, memory.before_ops[after_forward] - memory.before_ops[entries[0]])
    change = memory.before_ops[entries[2]] - memory.before_ops[entries[1]] if len(entries) > 2 else 0
    return _StagePasses(tuple(places), spans, activation, max(0, activation + change))


def _entry(tape: Sequence[Op], place: int) -> int:
    """Return the index of the first of the receives and waits directly before an op, or of the op if there are none."""
    entry = place
    while entry and tape[entry - 1].kind in (OpKind.RECV, OpKind.WAIT):
        entry -= 1
    return entry


def _other_bytes(estimate: Estimate, row: int, stages: Sequence[_StagePasses]) -> int:
    """Return the largest number of bytes of a rank that the search does not count."""
    bytes_by_op = estimate.memory[row].during
    return max(bytes - sum(stage.held_at(op) for stage in stages) for op, bytes in enumerate(bytes_by_op))

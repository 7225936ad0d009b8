"""Forecast of a step's time and memory for a plan, from as short a replay as possible.

Two methods shorten the replay. `CompressedReplay` computes equal steps of a schedule once (see
`shardlab.simulate.predict.compressed`). If a step has many microbatches, only some of them are replayed: once the
pipeline is full, a schedule is periodic, so `extrapolate` extends the time of a short step to that of the whole step.
`forecast` returns time and memory, and `step_parts` divides the time into compute, waits for communication and idle
time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shardlab.common.user_code import MAX_FOLDED_OPS, max_ops
from shardlab.language.world import gc_paused
from shardlab.simulate.predict.compressed.clocks import CompressedStep, Row, row_parts, step_seconds
from shardlab.simulate.predict.compressed.sample import PricedSample
from shardlab.simulate.predict.compressed.short_model import NotPeriodicError, shorten
from shardlab.simulate.predict.compressed.step import PipelineRank, StepCompressor
from shardlab.simulate.predict.estimate import COMPUTE, IDLE, Peak
from shardlab.simulate.predict.memory import DeviceMemory, device_memory
from shardlab.simulate.predict.recipe import variants
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.prices import awaited_text
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import model_layers
from shardlab.strategies.plan.resolve import resolve
from shardlab.strategies.schedules.steps import ReduceGrad, Reshard, Unshard


@dataclass(frozen=True)
class Forecast:
    """Forecast of a step.

    Attributes:
        seconds: duration of the step.
        peaks: peak memory of tensors on each rank of a pipeline.
        memory: memory of the fullest device, by the workload's recipe.
    """

    seconds: float
    peaks: Sequence[Peak] = field(repr=False)
    memory: DeviceMemory


def forecast(workload: Workload) -> Forecast:
    """Return the forecast of a step of a plan.

    Raises:
        UserError: for inconsistent sizes, more ranks than devices, or a dtype that the device does not support.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "a program of its own is replayed whole, by `Workload.estimate`"
    workload.require()
    with gc_paused():
        microbatches, remainder = divmod(workload.microbatches, plan.data_ranks)
        replayed, period = (microbatches, 0) if remainder else microbatches_to_replay(plan, microbatches)
        replay = CompressedReplay(workload, replayed) if can_compress(workload) else partial(_replay_every_op, workload)
        seconds, peaks = replay(replayed + period)
        if replayed < microbatches:
            seconds = extrapolate(replay(replayed, peaks=False)[0], seconds, (microbatches - replayed) / period)
        return Forecast(seconds, peaks, device_memory(workload, peaks))


Replayed = tuple[float, Sequence[Peak]]
"""Seconds of a step, and the peak of each rank of its pipeline (empty: the peaks were not requested)."""


@dataclass(frozen=True)
class SwitchEffect:
    """Change of a step's time if one switch of the recipe has another value.

    Attributes:
        name: name of the switch.
        value: the other value.
        now: the value in the recipe.
        change: relative change of the step time.
    """

    name: str
    value: str
    now: str
    change: float

    def __str__(self) -> str:
        return f"{self.name} {self.value} instead of {self.now} {self.change:+.0%}"


LEAST_EFFECT = 0.01
"""Smallest relative change of the step time for which a switch is listed."""


def switch_effects(workload: Workload, seconds: float) -> list[SwitchEffect]:
    """Return the switches of the recipe with an effect on a step's time, the largest effect first.

    The list is empty for a program without a plan, and for a program that passes rewrite.

    Args:
        workload: the step of a plan.
        seconds: its forecast time.
    """
    if not isinstance(workload.plan, Plan) or workload.pass_names != "none":
        return []
    recipe, effects = workload.recipe, list[SwitchEffect]()
    for name, value, other in variants(recipe):
        if (other.kernels, other.overlap, other.memory) == (recipe.kernels, recipe.overlap, recipe.memory):
            continue
        change = forecast(replace(workload, recipe=other)).seconds / seconds - 1
        if abs(change) >= LEAST_EFFECT:
            effects.append(SwitchEffect(name, value, recipe.switches[name].value, change))
    return sorted(effects, key=lambda effect: -abs(effect.change))


def _replay_every_op(workload: Workload, microbatches: int, *, peaks: bool = True) -> Replayed:
    """Replay every op of a step with `microbatches` microbatches for each data-parallel rank."""
    estimate = with_microbatches(workload, microbatches).estimate()
    return estimate.step, estimate.peaks if peaks else ()


def can_compress(workload: Workload) -> bool:
    """Return whether the compressed replay of a workload is exact.

    It is not if passes rewrite the program, if blocks are frozen, if several blocks are recomputed together, or if the
    ranks of two stages are distributed differently over nodes. If ranks lose time at each wait (`Prices.lag`), it is
    not exact for ring attention either, whose communication overlaps with compute inside a layer's pass.
    """
    plan, cluster = workload.plan, workload.cluster
    assert isinstance(plan, Plan)
    ranks_per_stage = plan.mesh.world // plan.mesh.pp
    equal_stages = (
        plan.mesh.pp == 1 or ranks_per_stage % cluster.per_node == 0 or cluster.per_node % ranks_per_stage == 0
    )
    overlaps = plan.context == "ring" and plan.mesh.cp > plan.ulysses
    joined_blocks = plan.counted_recompute is not None and plan.counted_recompute[0] == "uniform"
    if workload.pass_names != "none" or plan.freeze or joined_blocks:
        return False
    return (equal_stages or cluster.profile is not None) and not (overlaps and workload.cluster.lag.most)


class CompressedReplay:
    """Compressed replay of a workload. Call it with the number of microbatches for each data-parallel rank.

    Args:
        workload: the workload.
        microbatches: number of microbatches of each data-parallel rank with which the plan is resolved. Calls may give
            other numbers.

    Attributes:
        kinds: kinds of ranks, each with the steps that were computed for it.
    """

    def __init__(self, workload: Workload, microbatches: int) -> None:
        self._workload, self._microbatches = workload, microbatches
        self._outside_ops = workload.seconds_outside_ops
        self._shorten(0)

    def _shorten(self, attempt: int) -> None:
        """Prepare a replay of a short model; in the last attempt, of the whole model."""
        self._attempt = attempt
        model = shorten(self._workload, EXTRA_BLOCKS[attempt])
        plan, mesh = model.plan, model.plan.mesh
        microbatches = self._microbatches * plan.data_ranks
        self._plan, self._units = plan, model_layers(model.sizes).pipeline_units
        steps = plan.steps(self._units, microbatches)
        step_types = {type(step) for step in steps.of_ranks[0]}
        if model.gaps and step_types & {Unshard, Reshard, ReduceGrad}:
            self._shorten(len(EXTRA_BLOCKS) - 1)
            return
        self._sample = PricedSample(self._workload, step_types, model.sample_layer)
        self._compressor = StepCompressor(self._sample, model)
        self.kinds = self._compressor.kinds
        self._ranks: list[PipelineRank] = []
        for place, number in enumerate(range(0, mesh.world, mesh.world // mesh.pp)):
            stages = tuple([stage for stage, rank in enumerate(steps.ranks_of_stages) if rank == place])
            resolved = partial(resolve, plan, model.sizes, microbatches, number)
            self._ranks.append(self._compressor.rank(stages, place, number, resolved))

    def __call__(self, microbatches: int, *, peaks: bool = True) -> Replayed:
        steps = self._compress(microbatches)
        seconds = step_seconds(self._rows(steps), self._sample.prices.contention, self._sample.prices.lag)
        ranks = zip(self._ranks, steps, strict=True) if peaks else ()
        return seconds + self._outside_ops, [self._compressor.peak(*rank_steps) for rank_steps in ranks]

    def parts(self, microbatches: int) -> dict[str, float]:
        """Return the seconds of the step by part, as `Estimate.parts` does."""
        rows = self._rows(self._compress(microbatches))
        end, computing, exposed = row_parts(rows, self._sample.prices.contention, self._sample.prices.lag)
        parts = {awaited_text(awaited): seconds / len(rows) for awaited, seconds in exposed.items()}
        parts[COMPUTE] = computing / len(rows)
        return {**parts, IDLE: max(0.0, end + self._outside_ops - sum(parts.values()))}

    def _rows(self, steps: Sequence[Sequence[CompressedStep]]) -> list[Row]:
        return [self._compressor.row(*rank_steps) for rank_steps in zip(self._ranks, steps, strict=True)]

    def _compress(self, microbatches: int) -> list[list[CompressedStep]]:
        """Return the compressed steps of each pipeline rank. If they are not periodic, try a model with more blocks."""
        while True:
            schedule = self._plan.steps(self._units, microbatches * self._plan.data_ranks).of_ranks
            ranks = zip(self._ranks, schedule, strict=True)
            try:
                return [self._compressor.compress(rank, steps) for rank, steps in ranks]
            except NotPeriodicError:
                self._shorten(self._attempt + 1)


EXTRA_BLOCKS = (0, 4, None)
"""Numbers of extra identical blocks to keep, tried in order until the steps are periodic (None: all blocks)."""

STEADY_SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules that are periodic once the pipeline is full, with constant memory from then on."""


def microbatches_to_replay(plan: Plan, microbatches: int) -> tuple[int, int]:
    """Return the number of microbatches to replay, and the number of additional ones for a second replay.

    If two replays would save little work, the result is (`microbatches`, 0).

    Once its pipeline is full, a schedule is periodic, so each further period takes as long as the last one. Messages
    wait for their receives, so the period of a pipeline of n ranks is n microbatches, and 2 n if it is interleaved. The
    pipeline is full after n microbatches, and after 3 n if backward passes are split.

    The extrapolated time is within 0.1 % of that of a whole replay if all stages have the same cost, or all but the
    first and the last. If a middle stage is slower, an interleaved pipeline takes longer to fill, and the error is up
    to 2 %.

    Args:
        plan: the plan.
        microbatches: microbatches of each data-parallel rank.
    """
    ranks, schedule = plan.mesh.pp, plan.schedule_name
    if schedule not in STEADY_SCHEDULES:
        return microbatches, 0
    until_full = max(2, (3 if schedule.startswith(("zb", "v-", "dualpipe")) else 1) * ranks)
    period = 2 * ranks if schedule == "interleaved-1f1b" else ranks
    replayed = until_full + (microbatches - until_full) % period
    return (replayed, period) if 2 * replayed + period < microbatches else (microbatches, 0)


def step_to_trace(workload: Workload) -> Workload:
    """Return the step of a plan, with fewer microbatches if the whole step has more ops than can be traced.

    The number of ops is linear in the number of microbatches, so it is computed from two short steps.
    """
    plan = workload.plan
    if not isinstance(plan, Plan) or workload.pass_names != "none":
        return workload
    microbatches, short_microbatches = workload.microbatches // plan.data_ranks, 2 * plan.mesh.pp
    if microbatches <= LONG * short_microbatches or max_ops(MAX_FOLDED_OPS) != MAX_FOLDED_OPS:
        return workload
    short, longer = (replace(workload, microbatches=times * short_microbatches * plan.data_ranks) for times in (1, 2))
    first, second = (sum(map(len, step.traced.program.tapes)) for step in (short, longer))
    return short if extrapolate(first, second, microbatches / short_microbatches - 1) > MAX_FOLDED_OPS else workload


LONG = 4
"""A step's ops are counted before tracing if its pipelines have more than `2 * LONG` microbatches for each rank."""


def step_parts(workload: Workload) -> dict[str, float]:
    """Return the seconds of a step by part (see `Estimate.parts`), the largest first.

    Raises:
        UserError, Refused: as in `forecast`.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "a program of its own is replayed whole, by `Workload.estimate`"
    workload.require()
    if can_compress(workload):
        with gc_paused():
            replayed, _ = microbatches_to_replay(plan, workload.microbatches // plan.data_ranks)
            return extrapolate_parts(workload, CompressedReplay(workload, replayed).parts)
    return extrapolate_parts(workload, lambda microbatches: with_microbatches(workload, microbatches).estimate().parts)


def extrapolate_parts(workload: Workload, parts: Callable[[int], Mapping[str, float]]) -> dict[str, float]:
    """Return the parts of a step in seconds, the largest first, extrapolated from the replayed microbatches to all.

    Args:
        workload: the step of a plan.
        parts: function from the microbatches of each data-parallel rank to the parts of such a step.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    microbatches = workload.microbatches // plan.data_ranks
    replayed, period = microbatches_to_replay(plan, microbatches)
    seconds = dict(parts(replayed))
    if replayed < microbatches:
        longer, times = parts(replayed + period), (microbatches - replayed) / period
        names = {*seconds, *longer}
        seconds = {name: extrapolate(seconds.get(name, 0.0), longer.get(name, 0.0), times) for name in names}
    # rounded, so that parts that are equal but for rounding are sorted by name
    return dict(sorted(seconds.items(), key=lambda part: (-float(f"{part[1]:.9g}"), part[0])))


def with_microbatches(workload: Workload, per_rank: int) -> Workload:
    """Return a workload with another number of microbatches for each data-parallel rank."""
    assert isinstance(workload.plan, Plan), "programs of their own are not planned"
    return replace(workload, microbatches=per_rank * workload.plan.data_ranks)


def extrapolate(first: float, second: float, times: float) -> float:
    """Return the time of a step from those of two shorter ones: `first` + `times` * (`second` - `first`)."""
    return first + times * (second - first)

"""Lower bounds of whole steps, for all sharding options of a pipeline and for single plans.

`SharingTable` has the memory and communication of all sharding options on a mesh, as means over pipeline ranks; the
fullest or slowest rank cannot be below the mean. `OptionBounds` combines them with the passes of a pipeline, and
`StepBounds` bounds one plan with the order of its schedule. `PipelineBounds` bounds all pipelines of a shape at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.planner.bounds.communication import (
    Collective,
    OptionTraffic,
    Spent,
    StageTraffic,
    StepTraffic,
    exchanged,
    gathered_after,
    reduced,
    reduced_at,
    seconds_in_turn,
)
from shardlab.planner.bounds.layers import Array, LayerBounds, Places, ShapeLayers
from shardlab.planner.bounds.memory import SURE, KeptOfRanks, MemoryBounds, shards
from shardlab.planner.bounds.passes import TimedPasses, earliest_passes
from shardlab.planner.bounds.pipelines import Pipelines, PlacedEnds, StageEnds, StageMessages, hands_back_last
from shardlab.planner.problem import Candidate, PlanShape, blocks_of
from shardlab.planner.space import SHARDED, sharded
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules.steps import Steps


@dataclass(frozen=True, eq=False)
class SharingTable:
    """The sharding options on a mesh; seconds and bytes of the mean pipeline rank.

    Attributes:
        options: each option by its words, in the order of the arrays.
        state: bytes of slices of weights and of the optimizer's state: (options,).
        whole: bytes of weights that are gathered at a time: (options,).
        gradients: bytes of gradients when the last backward pass has ended: (options,).
        summed: bytes of gradients of some microbatches: (options,).
        once, often: seconds of collectives that a step has once, and at every microbatch, by their axis: (axes,
            options).
        after: seconds of what follows these: (options,).
        traffic: what is exchanged, collective by collective.
    """

    options: Mapping[Hashable, Plan]
    state: Array
    whole: Array
    gradients: Array
    summed: Array
    once: Array
    often: Array
    after: Array
    traffic: OptionTraffic

    def bytes(self, kept: float) -> Array:
        """Bytes of tensors of each option, if so many are kept of a microbatch."""
        return SURE * (self.state + np.maximum(kept + self.whole, self.gradients))

    def bytes_of_ranks(self, ranks: KeptOfRanks, mean: float) -> Array:
        """Bytes of tensors of each option on the fullest of some ranks.

        Args:
            ranks: what they keep of microbatches.
            mean: elements of the mean rank's weights.
        """
        summed, ended, weights = (each[:, None] / mean for each in (ranks.summed, ranks.ended, ranks.weights))
        kept = ranks.bytes[:, None] + summed * self.summed + ended * self.gradients
        return SURE * (weights * self.state + np.maximum(kept, weights * self.gradients)).max(axis=0)

    def seconds(self, each: int) -> Array:
        """Seconds of communication of each option with so many microbatches, and of what follows."""
        return SURE * ((self.once + each * self.often).max(axis=0, initial=0.0) + self.after)


class SharingBounds:
    """Lower bounds of sharing on a problem's meshes, each worked out once."""

    def __init__(self, layers: ShapeLayers, memory: MemoryBounds, traffic: StepTraffic) -> None:
        self.problem = layers.problem
        self._layers, self._memory, self._traffic = layers, memory, traffic
        self._known: dict[Hashable, SharingTable] = {}

    def of(self, shape: PlanShape) -> SharingTable:
        """Every sharding option on a shape's mesh."""
        key = shape.mesh, shape.precision.name, shape.recompute == "selective"
        if key not in self._known:
            plans = {sharding_key(plan): plan for plan in sharded(self.problem, shape.candidate.plan)}
            candidates = [Candidate(plan, 1, shape.precision) for plan in plans.values()]
            traffic = exchanged(self._layers, self._traffic, shape, candidates)
            once, often = (seconds / shape.mesh.pp for seconds in traffic.totals)
            held = np.array([self._held(shape, plan) for plan in plans.values()]).reshape(-1, 4)
            state, whole, gradients, summed = held.T
            after = np.array([self._after(shape, candidate) for candidate in candidates])
            self._known[key] = SharingTable(plans, state, whole, gradients, summed, once, often, after, traffic)
        return self._known[key]

    def _held(self, shape: PlanShape, plan: Plan) -> tuple[float, float, float, float]:
        """Bytes of one option: the columns of the table, from `state` to `summed`."""
        weights, numbers = self._weights(shape), self._memory.bytes_of(shape)
        parameters, optimizer = shards(plan, plan.shard_parameters), shards(plan, plan.shard_optimizer)
        gradients = shards(plan, plan.shard_gradients)
        kept = plan.reshard_after == "step" and parameters > 1 and not isinstance(plan.order, Steps)
        return (
            weights * (numbers.weight / parameters + numbers.optimizer / optimizer),
            weights * numbers.weight if kept else 0.0,
            weights * numbers.gradient / (gradients if plan.reduce_at == "step" else optimizer),
            weights * numbers.gradient / gradients,
        )

    def _after(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds of one option after all else: reductions that wait for all passes, the update, gathers of weights."""
        bounds, plan = self._layers.bounds(shape), candidate.plan

        def took(on: Collective) -> float:
            return float(self._traffic.sums(shape, candidate, bounds, on)[-1]) / shape.mesh.pp

        late = reduced(candidate, often=False) if plan.reduce_at == "step" else ()
        after = max(map(took, late), default=0.0) + sum(map(took, gathered_after(candidate)))
        optimizer = shards(plan, plan.shard_optimizer)
        return after + self._layers.prices(candidate).update_seconds(self._weights(shape) / optimizer)

    def _weights(self, shape: PlanShape) -> float:
        """Elements of the mean pipeline rank's weights."""
        return self._layers.bounds(shape).weights[-1] / shape.mesh.pp


def with_sharding_option(plan: Plan, option: Plan) -> Plan:
    """A plan whose data-parallel ranks share the model as those of another one do.

    Raises:
        UserError: its pipeline does not go together with that.
    """
    shared = {name: getattr(option, name) for name in (*SHARDED, "reshard_after", "reduce_at")}
    return replace(plan, mesh=option.mesh, **shared)


def sharding_key(plan: Plan) -> Hashable:
    """What a plan says of how its data-parallel ranks share the model."""
    shared = tuple(getattr(plan, name) for name in SHARDED)
    return plan.mesh.dp_replicate, shared, plan.reshard_after, plan.reduce_at


class OptionBounds:
    """Lower bounds of the step time for all sharding options of a pipeline, vectorized over the options.

    A rank runs all of its passes after the previous stages have passed one microbatch, and all of its backward passes
    after all stages have. Its collectives over one axis follow one another. These bounds are mostly lower than those of
    `StepBounds`, but discard most plans in a fraction of the time.
    """

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines, ends: PlacedEnds, messages: StageMessages) -> None:
        self._layers, self._pipelines, self._ends, self._messages = layers, pipelines, ends, messages
        self._known: dict[tuple[SharingTable, StageEnds], StageTraffic] = {}

    def of(self, shape: PlanShape, plan: Plan, table: SharingTable, options: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that has one of some sharding options: (options,).

        Args:
            shape, plan: the pipeline.
            table: all options.
            options: the places of those that are asked for.
        """
        all, stages = table.traffic, self._ends.of(shape, plan)
        if (table, stages) not in self._known:
            self._known[table, stages] = all.on(stages)
        traffic, (few, more) = self._known[table, stages], self._pipelines.timed(shape, plan)
        bounds, counts = self._layers.bounds(shape, plan.recompute), self._pipelines.counts(shape, plan)
        times = earliest_passes(plan, bounds, stages, counts, more, traffic, self._messages.of(shape, stages))
        reduced = (few + more) * traffic.often + traffic.once
        option, reduction = (all.reshard[options], all.gathering[options]), all.reduction[options]
        seconds = times.done[option].max(-1)
        for gathers, reductions in zip(times.gathers, reduced, strict=True):
            busy = reductions[reduction] + np.maximum(gathers[option], times.begun[option])
            seconds = np.maximum(seconds, busy.max(-1))
        return extension_share(plan, more) * (seconds + SURE * table.after[options])


EXTENDED = 0.999
"""Share of the time of a step of many microbatches that its forecast has at least; see `microbatches_to_replay`."""


class StepBounds:
    """Lower bounds of steps of a problem's candidates."""

    def __init__(
        self,
        layers: ShapeLayers,
        pipelines: Pipelines,
        passes: TimedPasses,
        traffic: StepTraffic,
        ends: PlacedEnds,
    ) -> None:
        self._layers, self._pipelines, self._passes = layers, pipelines, passes
        self._traffic, self._ends = traffic, ends
        self._known: dict[Hashable, Spent] = {}

    def of_pipeline(self, shape: PlanShape, plan: Plan) -> float:
        """Seconds below which no candidate with this pipeline is."""
        timed = self._passes.of(shape, plan)
        return extension_share(plan, timed.more) * float(timed.times.done.max())

    def of(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        plan, prices = candidate.plan, self._layers.prices(candidate)
        bounds = self._layers.bounds(shape, plan.recompute)
        timed, stages = self._passes.of(shape, plan), self._ends.of(shape, plan)
        weights = bounds.arrays.weights

        def spent(collectives: Iterable[Collective]) -> list[Spent]:
            return [self._spent(shape, candidate, bounds, stages, on) for on in collectives]

        followed = self._passes.followed(shape, candidate)
        often, once = (list(reduced(candidate, often=each)) for each in (True, False))
        late, each = plan.reduce_at == "step", self._pipelines.each(shape)
        in_passes = [*((on, each) for on in often), *((on, 1) for on in once if not late)]
        of_axes = spent(on for on, _ in in_passes)
        ready = np.maximum(followed.times.done, reduced_at(of_axes, followed.gradients, weights))
        if late:
            ready += seconds_in_turn(spent(once), weights, plan.mesh.pp)
        busy = followed.gathers
        for (on, uses), found in zip(in_passes, of_axes, strict=True):
            seconds = uses * found.ranks
            ready = np.maximum(ready, followed.times.first + seconds)
            busy = {**busy, on.axis: busy.get(on.axis, 0.0) + seconds}
        for seconds in busy.values():
            ready = np.maximum(ready, seconds)
        cut = shards(plan, plan.shard_optimizer)
        ranks: list[float] = np.bincount(stages.rank, stages.all(weights), plan.mesh.pp).tolist()
        updates = {elements: prices.update_seconds(elements / cut) for elements in dict.fromkeys(ranks)}
        after = np.array([updates[elements] for elements in ranks])
        for found in spent(gathered_after(candidate)):
            after += found.ranks
        return extension_share(plan, timed.more) * float(ready.max() + after.max())

    def _spent(
        self, shape: PlanShape, candidate: Candidate, bounds: LayerBounds, stages: StageEnds, on: Collective
    ) -> Spent:
        """Seconds of a collective on the weights of a candidate's layers, stages and ranks."""
        sums = self._traffic.sums(shape, candidate, bounds, on)
        key = id(sums), id(stages)
        if key not in self._known:
            of_stages = stages.all(sums)
            of_ranks = np.zeros(candidate.plan.mesh.pp) + np.bincount(stages.rank, of_stages, candidate.plan.mesh.pp)
            self._known[key] = Spent(sums, of_stages, of_ranks)
        return self._known[key]


def extension_share(plan: Plan, more: int) -> float:
    """The share of a time that no forecast goes below, if so many microbatches were not timed: one pipeline rank does
    the same again and again."""
    return EXTENDED if more and plan.mesh.pp > 1 else SURE


class LaidPipelines(NamedTuple):
    """Pipelines with as many ranks, side by side.

    Attributes:
        plans: one of each.
        again: whether each layer is computed again: (pipelines, layers).
        place, start, stop, rank: of the stages of all of them, one pipeline after the other: whose it is, its layers,
            and its rank: (stages,) each.
        first: the first layer of each rank: (pipelines, ranks).
        hands_back: whether each rank ends with a pass that the stage before waits for: (pipelines, 1).
    """

    plans: Sequence[Plan]
    again: NDArray[np.bool_]
    place: Places
    start: Places
    stop: Places
    rank: Places
    first: Places
    hands_back: NDArray[np.bool_]


class PipelineBounds:
    """Lower bounds of the pipelines of a problem's shapes."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self._layers, self._pipelines = layers, pipelines

    def laid(self, shape: PlanShape, plans: Sequence[Plan]) -> LaidPipelines:
        """Lay a shape's pipelines side by side; microbatches of any size and precision may pass them."""
        model = blocks_of(self._layers.problem, shape).layers
        again = np.zeros((len(plans), len(model.layers)), bool)
        for row, plan in zip(again, plans, strict=True):
            if plan.recompute == "full":
                row[:] = True
            elif isinstance(plan.recompute, tuple):
                row[[layer for block in plan.recompute for layer in model.recomputable[block]]] = True
        placed = [self._pipelines.placed(shape, plan) for plan in plans]
        stages = [(each.start, each.stop, each.rank) for each in placed]
        start, stop, rank = (np.concatenate([each[part] for each in stages]) for part in range(3))
        return LaidPipelines(
            plans,
            again,
            np.repeat(np.arange(len(plans)), [len(each.rank) for each in placed]),
            start,
            stop,
            rank,
            np.array([each.first for each in placed]),
            np.array([[hands_back_last(plan)] for plan in plans]),
        )

    def seconds(self, shape: PlanShape, laid: LaidPipelines) -> Array:
        """Seconds below which no candidate with each pipeline is, whatever is sharded: (pipelines,).

        A rank begins when those before it have passed a microbatch; what its order says is left out.
        """
        bounds = self._layers.bounds(shape, "selective" if shape.recompute == "selective" else "none")
        each = self._pipelines.each(shape)
        forward, backward = bounds.arrays[:2]
        sums = np.broadcast_to(backward, (len(laid.plans), len(backward)))
        if laid.again.any():
            full = self._layers.bounds(shape, "full").arrays.backward
            sums = np.zeros(sums.shape)
            np.cumsum(np.where(laid.again, np.diff(full), np.diff(backward)), axis=1, out=sums[:, 1:])
        work = forward[laid.stop] - forward[laid.start] + sums[laid.place, laid.stop] - sums[laid.place, laid.start]
        pipelines, ranks = laid.first.shape
        of_ranks = np.bincount(laid.place * ranks + laid.rank, work, pipelines * ranks).reshape(pipelines, ranks)
        after = np.where(laid.hands_back, np.take_along_axis(sums, laid.first, axis=1), 0.0)
        return SURE * (forward[laid.first] + each * of_ranks + after).max(axis=1)

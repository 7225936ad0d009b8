"""Floors of a whole step: its passes in their order, what they wait for, and what comes after them.

When the last gradient of a stage is made, it is reduced, and so are those of the stages after it, over one axis in
turn. Ranks of a pipeline meet when all of that is done, for the norm of the gradient. Then each takes its optimizer's
step. What is left out: messages that wait for those before them, streams that are not free, and what runs beside.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import numpy as np

from shardlab.planner.layer_floors import LayerFloors, ShapeLayers
from shardlab.planner.memory_floors import SURE
from shardlab.planner.pipelines import Pipelines
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.reductions import Spent, reduced_at, seconds_in_turn
from shardlab.planner.sharing import shards
from shardlab.planner.stage_ends import PlacedEnds, StageEnds
from shardlab.planner.timed_passes import TimedPasses
from shardlab.planner.traffic import Collective, StepTraffic, gathered_after, reduced
from shardlab.strategies.plan import Plan

EXTENDED = 0.999
"""Share of the time of a step of many microbatches that its forecast has at least; see `enough`."""


class StepFloors:
    """Floors of steps of a problem's candidates."""

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
        return sure(plan, timed.more) * float(timed.times.done.max())

    def of(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        plan, prices = candidate.plan, self._layers.prices(candidate)
        floors = self._layers.floors(shape, plan.recompute)
        timed, stages = self._passes.of(shape, plan), self._ends.of(shape, plan)
        weights = floors.arrays.weights

        def spent(collectives: Iterable[Collective]) -> list[Spent]:
            return [self._spent(shape, candidate, floors, stages, on) for on in collectives]

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
        return sure(plan, timed.more) * float(ready.max() + after.max())

    def _spent(
        self, shape: PlanShape, candidate: Candidate, floors: LayerFloors, stages: StageEnds, on: Collective
    ) -> Spent:
        """Seconds of a collective on the weights of a candidate's layers, stages and ranks."""
        sums = self._traffic.sums(shape, candidate, floors, on)
        key = id(sums), id(stages)
        if key not in self._known:
            of_stages = stages.all(sums)
            of_ranks = np.zeros(candidate.plan.mesh.pp) + np.bincount(stages.rank, of_stages, candidate.plan.mesh.pp)
            self._known[key] = Spent(sums, of_stages, of_ranks)
        return self._known[key]


def sure(plan: Plan, more: int) -> float:
    """The share of a time that no forecast goes below, if so many microbatches were not timed: one pipeline rank does
    the same again and again."""
    return EXTENDED if more and plan.mesh.pp > 1 else SURE

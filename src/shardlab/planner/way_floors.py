"""Floors of steps of every way to share a model on a pipeline, from how often its ranks do what; all in one go.

Nothing is followed from pass to pass. A rank has all of its passes to do after the stages before it have passed a
microbatch, and all of its backward passes after all stages have. What it gathers and reduces over an axis takes turns.
These floors are lower than `StepFloors`, and discard most plans in a fraction of the time.
"""

from __future__ import annotations

import numpy as np

from shardlab.planner.earliest_passes import earliest_passes, placed_stages
from shardlab.planner.layer_floors import Array, ShapeLayers
from shardlab.planner.memory_floors import SURE
from shardlab.planner.order_times import Places
from shardlab.planner.rank_orders import Pipelines
from shardlab.planner.sharing_floors import SharingTable
from shardlab.planner.space import PlanShape
from shardlab.planner.stage_ends import PlacedEnds
from shardlab.planner.step_floors import sure
from shardlab.planner.traffic import StepTraffic
from shardlab.planner.way_traffic import WayTraffic, exchanged
from shardlab.strategies.plan import Plan


class WayFloors:
    """Floors of steps of all ways to share a problem's model on its pipelines."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines, traffic: StepTraffic, ends: PlacedEnds) -> None:
        self._layers, self._pipelines, self._traffic, self._ends = layers, pipelines, traffic, ends
        self._known: dict[int, WayTraffic] = {}

    def of(self, shape: PlanShape, plan: Plan, table: SharingTable, ways: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that shares the model in one of some ways: (ways,).

        Args:
            shape, plan: the pipeline.
            table: all ways.
            ways: the places of those that are asked for.
        """
        traffic, stages = self._of_ways(shape, table).of(ways), self._ends.of(shape, plan)
        (few, more), pp = self._pipelines.timed(shape, plan), plan.mesh.pp
        floors = self._layers.floors(shape, plan.recompute)
        times = earliest_passes(plan, floors, stages, self._pipelines.counts(shape, plan), more, traffic)
        reduced = ((few + more) * stages.all(traffic.often) + stages.all(traffic.once)) @ placed_stages(stages, pp)
        way, reduction = (traffic.reshard, traffic.gathering), traffic.reduction
        seconds = times.done[way].max(-1)
        for gathers, reductions in zip(times.gathers, reduced, strict=True):
            busy = reductions[reduction] + np.maximum(gathers[way], times.begun[way])
            seconds = np.maximum(seconds, busy.max(-1))
        return sure(plan, more) * (seconds + SURE * table.after[ways])

    def _of_ways(self, shape: PlanShape, table: SharingTable) -> WayTraffic:
        """What the ways of a table exchange."""
        if id(table) not in self._known:
            self._known[id(table)] = exchanged(self._layers, self._traffic, shape, table)
        return self._known[id(table)]

"""Floors of steps of every way to share a model on a pipeline, from how often its ranks do what; all in one go.

Nothing is followed from pass to pass. A rank has all of its passes to do after the stages before it have passed a
microbatch, and all of its backward passes after all stages have. What it gathers and reduces over an axis takes turns.
These floors are mostly lower than `StepFloors`, and discard most plans in a fraction of the time.
"""

from __future__ import annotations

import numpy as np

from shardlab.planner.arrays import Array, Places
from shardlab.planner.earliest_passes import earliest_passes
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.memory_floors import SURE
from shardlab.planner.pipelines import Pipelines
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.sharing_floors import SharingTable
from shardlab.planner.stage_ends import PlacedEnds, StageEnds
from shardlab.planner.stage_messages import StageMessages
from shardlab.planner.step_floors import sure
from shardlab.planner.way_traffic import StageTraffic
from shardlab.strategies.plan import Plan


class WayFloors:
    """Floors of steps of all ways to share a problem's model on its pipelines."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines, ends: PlacedEnds, messages: StageMessages) -> None:
        self._layers, self._pipelines, self._ends, self._messages = layers, pipelines, ends, messages
        self._known: dict[tuple[SharingTable, StageEnds], StageTraffic] = {}

    def of(self, shape: PlanShape, plan: Plan, table: SharingTable, ways: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that shares the model in one of some ways: (ways,).

        Args:
            shape, plan: the pipeline.
            table: all ways.
            ways: the places of those that are asked for.
        """
        all, stages = table.traffic, self._ends.of(shape, plan)
        if (table, stages) not in self._known:
            self._known[table, stages] = all.on(stages)
        traffic, (few, more) = self._known[table, stages], self._pipelines.timed(shape, plan)
        floors, counts = self._layers.floors(shape, plan.recompute), self._pipelines.counts(shape, plan)
        times = earliest_passes(plan, floors, stages, counts, more, traffic, self._messages.of(shape, stages))
        reduced = (few + more) * traffic.often + traffic.once
        way, reduction = (all.reshard[ways], all.gathering[ways]), all.reduction[ways]
        seconds = times.done[way].max(-1)
        for gathers, reductions in zip(times.gathers, reduced, strict=True):
            busy = reductions[reduction] + np.maximum(gathers[way], times.begun[way])
            seconds = np.maximum(seconds, busy.max(-1))
        return sure(plan, more) * (seconds + SURE * table.after[ways])

"""Floors: seconds and bytes that no plan of a shape, or no such candidate, can go below.

A floor leaves things out, and puts nothing in. In time, the kernels of a rank's passes follow one another, what a
layer's slices exchange is waited for at once, the messages of a ring follow one another, and before a pipeline's rank
has its first microbatch, and after it has handed back its last, the stages before it work. What the ranks of an axis
exchange takes turns. Left out is all else that may run beside that. `MemoryFloors` says what is counted of memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import inf
from typing import NamedTuple

import numpy as np

from shardlab.planner.layer_floors import LayerFloors, ShapeLayers
from shardlab.planner.memory_floors import SURE, MemoryFloors
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.rank_orders import Pipelines
from shardlab.planner.sharing_floors import Array, SharingFloors
from shardlab.planner.space import PlanShape
from shardlab.planner.traffic import StepTraffic
from shardlab.strategies.plan import Plan

UNSPLIT = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first")
"""Schedules whose backward passes hand back a gradient last of all."""


class RankPasses(NamedTuple):
    """What pipeline ranks have to do, in seconds: (ranks,).

    Attributes:
        first: at least until a rank has its first microbatch.
        until: at least until it has done its last pass.
        after: of what other ranks do after that.
        backward: of its backward passes of one microbatch.
    """

    first: Array
    until: Array
    after: Array
    backward: Array


class ShapeFloor(NamedTuple):
    """Floors of all candidates of a shape.

    Attributes:
        passes, sharing: seconds of passes, and of communication among data-parallel ranks.
        bytes: of the fullest device (inf: there is no way to share the model).
    """

    passes: float
    sharing: float
    bytes: float


class Floors:
    """Floors of a problem's shapes and candidates, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layers, self._pipelines = ShapeLayers(problem), Pipelines(problem)
        self.memory = MemoryFloors(self._layers, self._pipelines)
        self._traffic = StepTraffic(self._layers, self._pipelines)
        self.sharing = SharingFloors(self._layers, self.memory, self._traffic)
        self._passes: dict[Hashable, list[tuple[float, ...]]] = {}

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        return self._layers.floors(shape, recompute)

    def each(self, shape: PlanShape) -> int:
        """Microbatches of each data-parallel rank."""
        return self._pipelines.each(shape)

    def of_shape(self, shape: PlanShape) -> ShapeFloor:
        """What no candidate of a shape goes below, however the model is shared."""
        table, passes = self.sharing.of(shape), self._shape_passes(shape)
        bytes = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape)))
        seconds = table.seconds(self._pipelines.each(shape))[bytes <= self.problem.room]
        return ShapeFloor(passes, float(seconds.min(initial=inf)), float(bytes.min(initial=inf)))

    def sharing_seconds(self, shape: PlanShape) -> dict[Hashable, float]:
        """Seconds of communication of each way to share the model, by its `words`."""
        table = self.sharing.of(shape)
        return dict(zip(table.words, table.seconds(self._pipelines.each(shape)).tolist(), strict=True))

    def _shape_passes(self, shape: PlanShape) -> float:
        """The mean over pipeline ranks of the seconds of their passes, at least."""
        word = shape.recompute
        passes = self.passes(shape, word if word == "selective" else "none")
        seconds = passes.forward[-1] + passes.backward[-1]
        if shape.share:
            again = self.passes(shape, "full")
            seconds += shape.share * (again.backward[-1] - passes.backward[-1])
        return SURE * self._pipelines.each(shape) * seconds / shape.mesh.pp

    def pipeline_seconds(self, shape: PlanShape, plan: Plan) -> float:
        """Seconds below which no candidate with this pipeline is, whatever is sharded."""
        ranks = self._ranks(shape, plan)
        return SURE * float((ranks.until + ranks.after).max())

    def seconds(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        plan, floor = candidate.plan, 0.0
        key = shape, plan.schedule, plan.stages_per_rank, plan.layers_per_stage, plan.recompute
        if key not in self._passes:
            self._passes[key] = list(zip(*(each.tolist() for each in self._ranks(shape, plan)), strict=True))
        for traffic in self._traffic.of_ranks(shape, candidate):
            first, until, after, backward = self._passes[key][traffic.rank]
            done = max(until + traffic.beside, first + traffic.busiest, until - backward + traffic.last)
            floor = max(floor, until + traffic.beside + after, done + traffic.update)
        return SURE * floor

    def _ranks(self, shape: PlanShape, plan: Plan) -> RankPasses:
        """What every pipeline rank has to do."""
        passes, each = self.passes(shape, plan.recompute), self._pipelines.each(shape)
        split = not isinstance(plan.schedule, str) or plan.schedule not in UNSPLIT
        stages = self._pipelines.placed(shape, plan)
        forward, backward = np.array(passes.forward), np.array(passes.backward)
        there, back = np.zeros(plan.mesh.pp), np.zeros(plan.mesh.pp)
        for sums, all in ((forward, there), (backward, back)):
            np.add.at(all, stages.rank, sums[stages.stop] - sums[stages.start])
        first = forward[stages.first]
        after = np.zeros_like(first) if split else backward[stages.first]
        return RankPasses(first, first + each * (there + back), after, back)

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

from shardlab.planner.layer_floors import LayerFloors, ShapeLayers
from shardlab.planner.memory_floors import SURE, MemoryFloors
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.rank_orders import Pipelines
from shardlab.planner.sharing_floors import SharingFloors
from shardlab.planner.space import PlanShape
from shardlab.planner.traffic import StepTraffic
from shardlab.strategies.plan import Plan

UNSPLIT = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first")
"""Schedules whose backward passes hand back a gradient last of all."""


class RankPasses(NamedTuple):
    """What a pipeline's rank has to do.

    Attributes:
        first: seconds at least until it has its first microbatch.
        until: seconds at least until it has done its last pass.
        after: seconds of what other ranks do after that.
        backward: seconds of its backward passes of one microbatch.
    """

    first: float
    until: float
    after: float
    backward: float


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
        self._sharing = SharingFloors(self._layers, self.memory, self._traffic)
        self._done: dict[Hashable, list[RankPasses]] = {}

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        return self._layers.floors(shape, recompute)

    def of_shape(self, shape: PlanShape) -> ShapeFloor:
        """What no candidate of a shape goes below, however the model is shared."""
        table, passes = self._sharing.of(shape), self._shape_passes(shape)
        bytes = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape)))
        seconds = table.seconds(self._pipelines.each(shape))[bytes <= self.problem.room]
        return ShapeFloor(passes, float(seconds.min(initial=inf)), float(bytes.min(initial=inf)))

    def sharing_seconds(self, shape: PlanShape) -> dict[Hashable, float]:
        """Seconds of communication of each way to share the model, by its `words`."""
        table = self._sharing.of(shape)
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
        return SURE * max(rank.until + rank.after for rank in self._ranks(shape, plan))

    def seconds(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        plan, floor = candidate.plan, 0.0
        ranks = self._ranks(shape, plan)
        for traffic in self._traffic.of_ranks(shape, candidate):
            rank = ranks[traffic.rank]
            done = max(
                rank.until + traffic.beside,
                rank.first + traffic.busiest,
                rank.until - rank.backward + traffic.last,
            )
            floor = max(floor, rank.until + traffic.beside + rank.after, done + traffic.update)
        return SURE * floor

    def _ranks(self, shape: PlanShape, plan: Plan) -> list[RankPasses]:
        """What every pipeline rank has to do."""
        key = shape, plan.schedule, plan.stages_per_rank, plan.layers_per_stage, plan.recompute
        if key not in self._done:
            passes, each = self.passes(shape, plan.recompute), self._pipelines.each(shape)
            split = not isinstance(plan.schedule, str) or plan.schedule not in UNSPLIT
            stages = self._pipelines.stages(shape, plan)
            forward, backward = (
                [sums[stage.stop] - sums[stage.start] for stage in stages] for sums in (passes.forward, passes.backward)
            )
            self._done[key] = []
            for own in self._pipelines.of_ranks(plan, len(stages)):
                there, back = sum([forward[stage] for stage in own]), sum([backward[stage] for stage in own])
                start = stages[own[0]].start
                first, before = passes.forward[start], 0.0 if split else passes.backward[start]
                self._done[key].append(RankPasses(first, first + each * (there + back), before, back))
        return self._done[key]

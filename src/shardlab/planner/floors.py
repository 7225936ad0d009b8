"""Floors: seconds and bytes that no plan of a shape, or no such candidate, can go below.

A floor leaves things out, and puts nothing in. In time, the kernels of a rank's passes follow one another, what a
layer's slices exchange is waited for at once, the messages of a ring follow one another, and before a pipeline's rank
has its first microbatch, and after it has handed back its last, the stages before it work. What the ranks of an axis
exchange takes turns. Left out is all else that may run beside that. `MemoryFloors` says what is counted of memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardlab.planner.layer_floors import LayerFloors, ShapeLayers, between
from shardlab.planner.memory_floors import SURE, MemoryFloors
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.rank_orders import Pipelines
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


class Floors:
    """Floors of a problem's shapes and candidates, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layers, self._pipelines = ShapeLayers(problem), Pipelines(problem)
        self.memory = MemoryFloors(self._layers, self._pipelines)
        self._traffic = StepTraffic(self._layers, self._pipelines)
        self._done: dict[Hashable, list[RankPasses]] = {}

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        return self._layers.floors(shape, recompute)

    def shape_seconds(self, shape: PlanShape) -> float:
        """Seconds below which no candidate of a shape is: the mean over pipeline ranks of their passes."""
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
            self._done[key] = []
            for own in self._pipelines.of_ranks(shape, plan):
                forward, backward = (
                    sum(between(sums, stage) for stage in own) for sums in (passes.forward, passes.backward)
                )
                first, before = passes.forward[own[0].start], 0.0 if split else passes.backward[own[0].start]
                until = first + each * (forward + backward)
                self._done[key].append(RankPasses(first, until, before, backward))
        return self._done[key]

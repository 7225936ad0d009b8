"""Floors: seconds and bytes that no plan of a shape, or no such candidate, can go below.

A floor leaves things out, and puts nothing in. In time, the kernels of a rank's passes follow one another, what a
layer's slices exchange is waited for at once, the messages of a ring follow one another, and before a pipeline's rank
has its first microbatch, and after it has handed back its last, the stages before it work. What the ranks of an axis
exchange takes turns. Left out is all else that may run beside that. `StepFloors` counts more of a step's time,
`WayFloors` a part of that for all ways to share the model at once, and `MemoryFloors` says what is counted of memory.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from shardlab.planner.bounds.communication import StepTraffic
from shardlab.planner.bounds.layers import Array, LayerFloors, Places, ShapeLayers
from shardlab.planner.bounds.memory import SURE, MemoryFloors
from shardlab.planner.bounds.passes import TimedPasses
from shardlab.planner.bounds.pipelines import Pipelines, PlacedEnds, StageMessages
from shardlab.planner.bounds.step import PipelineFloors, SharingFloors, SharingTable, StepFloors, WayFloors
from shardlab.planner.problem import Candidate, PlanShape, Problem
from shardlab.strategies.plan.plan import Plan


class ShapeFloor(NamedTuple):
    """Floors of all candidates of a shape.

    Attributes:
        passes, sharing: seconds of passes, and of communication among data-parallel ranks.
        seconds: of the step: of these the longer one, and what follows the passes.
        bytes: of the fullest device (inf: there is no way to share the model).
    """

    passes: float
    sharing: float
    seconds: float
    bytes: float


class WaysToShare(NamedTuple):
    """The ways to share the model.

    Attributes:
        plans: one that shares it so, of each way.
        sharing, after: seconds of communication, and of that and the update after all passes, at least: (ways,) each.
    """

    plans: list[Plan]
    sharing: Array
    after: Array

    def seconds(self, passes: float) -> Array:
        """Seconds of a step of each way at least, if its passes take so many."""
        return np.maximum(self.sharing, passes + self.after)


class Floors:
    """Floors of a problem's shapes and candidates, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layers, self._pipelines = ShapeLayers(problem), Pipelines(problem)
        self.memory = MemoryFloors(self._layers, self._pipelines)
        self.pipelines = PipelineFloors(self._layers, self._pipelines)
        traffic, ends = StepTraffic(self._layers), PlacedEnds(self._layers, self._pipelines)
        self.sharing = SharingFloors(self._layers, self.memory, traffic)
        messages = StageMessages(self._layers)
        self.timed = TimedPasses(self._layers, self._pipelines, traffic, ends, messages)
        self.steps = StepFloors(self._layers, self._pipelines, self.timed, traffic, ends)
        self._shared: dict[tuple[SharingTable, int], WaysToShare] = {}
        self._ways = WayFloors(self._layers, self._pipelines, ends, messages)

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        return self._layers.floors(shape, recompute)

    def each(self, shape: PlanShape) -> int:
        """Microbatches of each data-parallel rank."""
        return self._pipelines.each(shape)

    def follows(self, shape: PlanShape, plan: Plan) -> bool:
        """Whether a plan's schedule can be followed with as many microbatches as there are."""
        return self._pipelines.follows(shape, plan)

    def of_shape(self, shape: PlanShape) -> ShapeFloor:
        """What no candidate of a shape goes below, however the model is shared."""
        table, passes = self.sharing.of(shape), self.passes_of(shape)
        bytes = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape)))
        ways, fits = self.ways(shape), bytes <= self.problem.room
        sharing, seconds = ways.sharing[fits], ways.seconds(passes)[fits]
        return ShapeFloor(passes, *(float(each.min(initial=inf)) for each in (sharing, seconds, bytes)))

    def filled(self, shape: PlanShape) -> float:
        """Bytes by which the smallest plans of shapes are compared, and no floor: of the fullest device, and once more
        of activations, with as many microbatches under way as there are pipeline ranks."""
        kept = self.memory.kept_of_shape(shape) * shape.mesh.pp
        return float(self.memory.reserved(self.sharing.of(shape).bytes(kept) + kept).min(initial=inf))

    def ways(self, shape: PlanShape) -> WaysToShare:
        """Every way to share the model on a shape's mesh."""
        table, each = self.sharing.of(shape), self._pipelines.each(shape)
        if (table, each) not in self._shared:
            self._shared[table, each] = WaysToShare(list(table.ways.values()), table.seconds(each), SURE * table.after)
        return self._shared[table, each]

    def least(self, shape: PlanShape, passes: Array) -> Array:
        """Seconds of a step at least, for each of several seconds of passes, however the model is shared so that it may
        fit."""
        table, ways = self.sharing.of(shape), self.ways(shape)
        fits = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape))) <= self.problem.room
        return np.maximum(ways.sharing[fits], passes[:, None] + ways.after[fits]).min(axis=1)

    def bytes_of_ways(self, shape: PlanShape, plan: Plan) -> Array:
        """Bytes below which no candidate with this pipeline is that shares the model in a way, in the order of `ways`;
        what is gathered is left out, and the gradients of a pass itself."""
        mean = self.passes(shape).weights[-1] / shape.mesh.pp
        ranks = self.memory.kept_of_ranks(shape, plan)
        return self.memory.reserved(self.sharing.of(shape).bytes_of_ranks(ranks, mean))

    def passes_of(self, shape: PlanShape) -> float:
        """The mean over pipeline ranks of the seconds of their passes, at least."""
        word = shape.recompute
        passes = self.passes(shape, word if word == "selective" else "none")
        seconds = passes.forward[-1] + passes.backward[-1]
        if shape.share:
            again = self.passes(shape, "full")
            seconds += shape.share * (again.backward[-1] - passes.backward[-1])
        return SURE * self._pipelines.each(shape) * seconds / shape.mesh.pp

    def seconds_of_ways(self, shape: PlanShape, plan: Plan, ways: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that shares the model in one of some ways: (ways,).

        Args:
            shape, plan: the pipeline.
            ways: places of some, in the order of `ways`.
        """
        return self._ways.of(shape, plan, self.sharing.of(shape), ways)

    def seconds(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        return self.steps.of(shape, candidate)

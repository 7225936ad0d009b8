"""Lower bounds of the time and memory of plans, computed without a simulation.

The search simulates only plans whose lower bound is below the best step time so far. A bound leaves costs out and adds
none. Each module counts more and costs more; the search uses the cheapest first:

- `layers`: seconds and bytes of the layers on one microbatch. The kernels of a rank's passes follow one another.
- `pipelines`: which layers each stage has, and the fill and drain times of a pipeline.
- `communication`: gathers and reductions of data-parallel ranks. Collectives over one axis follow one another.
- `step`: `OptionBounds`, for all sharding options of one pipeline at once, and `StepBounds`, for one plan.
- `schedule_order` and `passes`: the earliest times of all passes in the order of a schedule.
- `memory`: bytes on the fullest device.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np

from shardlab.planner.bounds.communication import StepTraffic
from shardlab.planner.bounds.layers import Array, LayerBounds, Places, ShapeLayers
from shardlab.planner.bounds.memory import SURE, MemoryBounds
from shardlab.planner.bounds.passes import TimedPasses
from shardlab.planner.bounds.pipelines import Pipelines, PlacedEnds, StageMessages
from shardlab.planner.bounds.step import OptionBounds, PipelineBounds, SharingBounds, SharingTable, StepBounds
from shardlab.planner.problem import Candidate, PlanShape, Problem
from shardlab.strategies.plan.plan import Plan


class ShapeBound(NamedTuple):
    """Lower bounds of all candidates of a shape.

    Attributes:
        passes, sharing: seconds of passes, and of communication among data-parallel ranks.
        seconds: of the step: of these the longer one, and what follows the passes.
        bytes: of the fullest device (inf: there is no sharding option).
    """

    passes: float
    sharing: float
    seconds: float
    bytes: float


class ShardingOptions(NamedTuple):
    """The sharding options.

    Attributes:
        plans: one that shares it so, of each option.
        sharing, after: seconds of communication, and of that and the update after all passes, at least: (options,)
            each.
    """

    plans: list[Plan]
    sharing: Array
    after: Array

    def seconds(self, passes: float) -> Array:
        """Seconds of a step of each option at least, if its passes take so many."""
        return np.maximum(self.sharing, passes + self.after)


class LowerBounds:
    """Lower bounds of a problem's shapes and candidates, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._layers, self._pipelines = ShapeLayers(problem), Pipelines(problem)
        self.memory = MemoryBounds(self._layers, self._pipelines)
        self.pipelines = PipelineBounds(self._layers, self._pipelines)
        traffic, ends = StepTraffic(self._layers), PlacedEnds(self._layers, self._pipelines)
        self.sharing = SharingBounds(self._layers, self.memory, traffic)
        messages = StageMessages(self._layers)
        self.timed = TimedPasses(self._layers, self._pipelines, traffic, ends, messages)
        self.steps = StepBounds(self._layers, self._pipelines, self.timed, traffic, ends)
        self._shared: dict[tuple[SharingTable, int], ShardingOptions] = {}
        self._options = OptionBounds(self._layers, self._pipelines, ends, messages)

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerBounds:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        return self._layers.bounds(shape, recompute)

    def each(self, shape: PlanShape) -> int:
        """Microbatches of each data-parallel rank."""
        return self._pipelines.each(shape)

    def follows(self, shape: PlanShape, plan: Plan) -> bool:
        """Whether a plan's schedule can be followed with as many microbatches as there are."""
        return self._pipelines.follows(shape, plan)

    def of_shape(self, shape: PlanShape) -> ShapeBound:
        """What no candidate of a shape goes below, however the model is shared."""
        table, passes = self.sharing.of(shape), self.passes_of(shape)
        bytes = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape)))
        options, fits = self.options(shape), bytes <= self.problem.room
        sharing, seconds = options.sharing[fits], options.seconds(passes)[fits]
        return ShapeBound(passes, *(float(each.min(initial=inf)) for each in (sharing, seconds, bytes)))

    def filled(self, shape: PlanShape) -> float:
        """Return bytes by which the smallest plans of shapes are compared (no lower bound).

        Sum of the fullest device's bytes and of the activations of as many microbatches as there are pipeline ranks.
        """
        kept = self.memory.kept_of_shape(shape) * shape.mesh.pp
        return float(self.memory.reserved(self.sharing.of(shape).bytes(kept) + kept).min(initial=inf))

    def options(self, shape: PlanShape) -> ShardingOptions:
        """Every sharding option on a shape's mesh."""
        table, each = self.sharing.of(shape), self._pipelines.each(shape)
        if (table, each) not in self._shared:
            plans = list(table.options.values())
            self._shared[table, each] = ShardingOptions(plans, table.seconds(each), SURE * table.after)
        return self._shared[table, each]

    def least(self, shape: PlanShape, passes: Array) -> Array:
        """Seconds of a step at least, for each of several seconds of passes, however the model is shared so that it may
        fit."""
        table, options = self.sharing.of(shape), self.options(shape)
        fits = self.memory.reserved(table.bytes(self.memory.kept_of_shape(shape))) <= self.problem.room
        return np.maximum(options.sharing[fits], passes[:, None] + options.after[fits]).min(axis=1)

    def bytes_of_options(self, shape: PlanShape, plan: Plan) -> Array:
        """Bytes below which no candidate with this pipeline is with a sharding option, in the order of `options`;
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

    def seconds_of_options(self, shape: PlanShape, plan: Plan, options: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that has one of some sharding options: (options,).

        Args:
            shape, plan: the pipeline.
            options: places of some, in the order of `options`.
        """
        return self._options.of(shape, plan, self.sharing.of(shape), options)

    def seconds(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        return self.steps.of(shape, candidate)

"""Pipelines of plan shapes: the layers of their stages, the ranks of the stages, and the order of their steps.

`Pipelines` caches this by schedule. `StageEnds` has the first and last layers of stages, `PassCounts` the number of
passes of each stage, and `StageMessages` the seconds of messages between stages.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardlab.language import Kind
from shardlab.language.rules.layer_rules import GRADIENT_OF
from shardlab.planner.bounds.layers import Array, Places, ShapeLayers
from shardlab.planner.bounds.schedule_order import KINDS, NUMBER, RankOrder, rank_order
from shardlab.planner.problem import PlanShape, Problem, blocks_of
from shardlab.planner.space import few_of, follows
from shardlab.simulate.predict.forecast import microbatches_to_replay
from shardlab.simulate.predict.memory_advice import ALL_AT_ONCE
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import BackwardWeight
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.steps import Steps


class KeptCounts(NamedTuple):
    """What ranks keep of a pipeline's stages at their moments, one rank after the other: (moments, stages) each.

    Attributes:
        flights, halves: microbatches of which a rank keeps activations, and what the second half of a backward pass
            needs.
        summed, ended: 1 where it keeps gradients of some microbatches, or of all; else 0.
        own: 1 where the stage is on the rank; else 0.
    """

    flights: Array
    halves: Array
    summed: Array
    ended: Array
    own: Array


class PlacedStages(NamedTuple):
    """Stages of a pipeline on its ranks.

    Attributes:
        rank: of each stage: (stages,).
        start, stop: its layers: (stages,).
        first: the first layer of each rank: (ranks,).
    """

    rank: Places
    start: Places
    stop: Places
    first: Places


class Pipelines:
    """The stages of shapes' pipelines and the orders of their ranks, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._stages: dict[Hashable, list[range]] = {}
        self._placed: dict[Hashable, PlacedStages] = {}
        self._orders: dict[Hashable, list[RankOrder]] = {}
        self._follows: dict[Hashable, bool] = {}
        self._kept: dict[Hashable, KeptCounts] = {}
        self._counts: dict[Hashable, PassCounts] = {}

    def each(self, shape: PlanShape) -> int:
        """Microbatches of each data-parallel rank."""
        return self.problem.sequences // (shape.mesh.dp_shard * shape.mesh.ep * shape.micro_batch_size)

    def timed(self, shape: PlanShape, plan: Plan) -> tuple[int, int]:
        """So many microbatches of each data-parallel rank that the order of work then repeats itself; how many are
        left."""
        each = self.each(shape)
        few = min(
            microbatches_to_replay(plan, each)[0],
            few_of(each, plan.mesh.pp) if isinstance(plan.schedule, str) else each,
        )
        return few, each - few

    def counts(self, shape: PlanShape, plan: Plan) -> PassCounts:
        """How often each stage passes a microbatch, of those that are timed."""
        few, _ = self.timed(shape, plan)
        key = plan.mesh.pp, plan.schedule, len(self.stages(shape, plan)), few
        if key not in self._counts:
            units = blocks_of(self.problem, shape).layers.pipeline_units
            self._counts[key] = pass_counts(plan.steps(units, few * plan.data_ranks))
        return self._counts[key]

    def stages(self, shape: PlanShape, plan: Plan) -> list[range]:
        """The layers of each stage."""
        mesh = shape.mesh
        key = (mesh.pp, mesh.tp, mesh.cp, mesh.ep, plan.schedule, plan.stages_per_rank, plan.layers_per_stage)
        key = (*key, shape.recompute == "selective")
        if key not in self._stages:
            layers = blocks_of(self.problem, shape).layers
            bounds = plan.bounds(layers.pipeline_units)
            self._stages[key] = [range(*cuts) for cuts in pairwise(layers.pipeline_cuts[unit] for unit in bounds)]
        return self._stages[key]

    def placed(self, shape: PlanShape, plan: Plan) -> PlacedStages:
        """Where the stages are."""
        stages, pp = self.stages(shape, plan), plan.mesh.pp
        key = id(stages), plan.schedule
        if key not in self._placed:
            order, numbers = plan.order, range(len(stages))
            ranks = order.ranks_of_stages if isinstance(order, Steps) else [order.placement(s, pp) for s in numbers]
            first = [stages[next(s for s in numbers if ranks[s] == rank)].start for rank in range(pp)]
            self._placed[key] = PlacedStages(
                *(np.array(each) for each in (ranks, [s.start for s in stages], [s.stop for s in stages], first))
            )
        return self._placed[key]

    def follows(self, shape: PlanShape, plan: Plan) -> bool:
        """Whether a plan's schedule can be followed with as many microbatches as there are."""
        key = self._order_of(shape, plan)
        if key not in self._follows:
            self._follows[key] = follows(self.problem, shape, plan)
        return self._follows[key]

    def _order_of(self, shape: PlanShape, plan: Plan) -> Hashable:
        """What a pipeline's order of work depends on, and what its ranks keep."""
        return plan.mesh.pp, plan.schedule, len(self.stages(shape, plan)), *self._few(shape, plan)

    def _few(self, shape: PlanShape, plan: Plan) -> tuple[int, int]:
        """With how many microbatches an order is worked out; how many more its ranks then keep."""
        each = self.each(shape)
        few = few_of(each, plan.mesh.pp)
        return few, each - few if plan.schedule in ALL_AT_ONCE else 0

    def orders(self, shape: PlanShape, plan: Plan) -> list[RankOrder]:
        """The order of work of some pipeline ranks: the first ones, one between, the last.

        It is that with few microbatches, whose moments keep as many more as the schedule does with all.
        """
        key = self._order_of(shape, plan)
        if key not in self._orders:
            few, more = self._few(shape, plan)
            steps = plan.steps(blocks_of(self.problem, shape).layers.pipeline_units, few * plan.data_ranks)
            self._orders[key] = [
                rank_order(rank, [stage for stage, at in enumerate(steps.ranks_of_stages) if at == rank], order, more)
                for rank, order in enumerate(steps.of_ranks)
                if rank in (0, 1, plan.mesh.pp // 2, plan.mesh.pp - 1)
            ]
        return self._orders[key]

    def kept(self, shape: PlanShape, plan: Plan) -> KeptCounts:
        """Count what some pipeline ranks keep of microbatches; see `orders`."""
        key = self._order_of(shape, plan)
        if key not in self._kept:
            stages = len(self.stages(shape, plan))
            rows = [(order, moment) for order in self.orders(shape, plan) for moment in order.moments]
            counts = np.zeros((len(KeptCounts._fields), len(rows), stages))
            for row, (order, moment) in enumerate(rows):
                for place, stage in enumerate(order.stages):
                    summed = place in moment.summed and not (moment.ends and place == moment.stage)
                    known = moment.flight[place], moment.halves[place], summed, place in moment.ended, True
                    counts[:, row, stage] = known
            self._kept[key] = KeptCounts(*counts)
        return self._kept[key]


class StageSums(NamedTuple):
    """What a pipeline's stages add to sums up to each layer: (..., stages) each.

    Attributes:
        all: all layers of the stage.
        but_head: those after its first block.
        but_tail: those before its last block.
    """

    all: Array
    but_head: Array
    but_tail: Array


@dataclass(frozen=True, eq=False)
class StageEnds:
    """Where a pipeline's stages begin and end, in layers: (stages,) each.

    Attributes:
        start, stop: of the stage.
        rank: where it is.
        first, last: its first and last layer that has weights.
        head, tail: the end of the block of the first one, the beginning of the block of the last one.
    """

    start: Places
    stop: Places
    rank: Places
    first: Places
    last: Places
    head: Places
    tail: Places

    def all(self, sums: Array) -> Array:
        """What a stage's layers add to sums up to each layer: (..., layers + 1) to (..., stages)."""
        return sums[..., self.stop] - sums[..., self.start]

    def sums(self, sums: Array) -> StageSums:
        """What all of a stage's layers add, and those but for the first block or the last."""
        start, stop = sums[..., self.start], sums[..., self.stop]
        return StageSums(stop - start, stop - sums[..., self.head], sums[..., self.tail] - start)

    @cached_property
    def placed(self) -> Array:
        """Tell which stage is on which rank, by 1 and 0: (stages, ranks)."""
        return (self.rank[:, None] == np.arange(int(self.rank.max()) + 1)).astype(float)

    @cached_property
    def lowest(self) -> Places:
        """Find the first stage of each rank: (ranks,)."""
        return np.unique(self.rank, return_index=True)[1]


class PlacedEnds:
    """Where the stages of a problem's pipelines begin and end, each worked out once."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self._layers, self._pipelines = layers, pipelines
        self._known: dict[Hashable, StageEnds] = {}

    def of(self, shape: PlanShape, plan: Plan) -> StageEnds:
        """Where a pipeline's stages are."""
        placed = self._pipelines.placed(shape, plan)
        key = id(placed), shape.mesh.tp, shape.mesh.ep
        if key not in self._known:
            model = blocks_of(self._layers.problem, shape).layers
            weights = self._layers.bounds(shape).weights
            block = [model.gathered_with(layer) for layer in range(len(weights) - 1)]
            ends: list[list[int]] = []
            for start, stop in zip(placed.start.tolist(), placed.stop.tolist(), strict=True):
                layers = [layer for layer in range(start, stop) if weights[layer + 1] > weights[layer]] or [start]
                first, last = layers[0], layers[-1]
                head = next((layer for layer in layers if block[layer] != block[first]), stop)
                tail = next((layer + 1 for layer in reversed(layers) if block[layer] != block[last]), start)
                ends.append([first, last, head, tail])
            self._known[key] = StageEnds(placed.start, placed.stop, placed.rank, *np.array(ends, np.intp).T)
        return self._known[key]


UNSPLIT = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first")
"""Schedules whose backward passes hand back a gradient last of all."""


def hands_back_last(plan: Plan) -> bool:
    """Whether each rank of a plan's pipeline is sure to end with a pass that the stage before waits for."""
    return isinstance(plan.schedule, str) and plan.schedule in UNSPLIT


class PassCounts(NamedTuple):
    """Passes of a pipeline's order of work.

    Attributes:
        all: of each kind on each stage: (kinds, stages).
        visits: those that compute with weights, and the one before them that does is of another stage: (kinds, stages).
        begins: the stage of each rank's first pass: (ranks,).
        ahead: forward passes on each stage before the first backward pass of its rank: (stages,).
        turns: the stage of each rank's first backward pass: (ranks,).
    """

    all: Array
    visits: Array
    begins: Places
    ahead: Array
    turns: Places


def pass_counts(steps: Steps) -> PassCounts:
    """Count the passes of all ranks."""
    all, visits = np.zeros((2, len(KINDS), steps.stages))
    ahead = np.zeros(steps.stages)
    begins, turns = np.zeros((2, len(steps.of_ranks)), np.intp)
    for rank, order in enumerate(steps.of_ranks):
        before, turned = -1, False
        for step in order:
            if isinstance(step, Work):
                kind, stage = NUMBER[type(step)], step.stage
                all[kind, stage] += 1
                if not turned:
                    ahead[stage] += kind == 0
                    turned, turns[rank] = kind > 0, stage
                if not isinstance(step, BackwardWeight):
                    if before < 0:
                        begins[rank] = stage
                    visits[kind, stage] += stage != before
                    before = stage
    return PassCounts(all, visits, begins, ahead, turns)


class StageMessages:
    """Messages between the stages of a problem's pipelines, each priced once."""

    def __init__(self, layers: ShapeLayers) -> None:
        self._layers = layers
        self._known: dict[Hashable, Array] = {}
        self._between: dict[Hashable, dict[Hashable, tuple[float, float]]] = {}

    def of(self, shape: PlanShape, stages: StageEnds) -> Array:
        """Seconds of messages from each stage: of activations to the next one, of gradients to the one before:
        (2, stages)."""
        key = stages, shape.mesh, shape.micro_batch_size, shape.precision.name, shape.recompute == "selective"
        key = (*key, shape.sequence_parallel, shape.context, shape.ulysses_degree, shape.stripes)
        if key not in self._known:
            self._known[key] = self._priced(shape, stages)
        return self._known[key]

    def _priced(self, shape: PlanShape, stages: StageEnds) -> Array:
        prices, apart = self._layers.prices(shape.candidate), shape.mesh.world // shape.mesh.pp
        found, given = np.zeros((2, len(stages.rank))), self._layers.bounds(shape).given
        model, least = blocks_of(self._layers.problem, shape).layers, min(each for each in given if each)
        known = self._between.setdefault((shape.mesh, shape.precision.name), {})
        ranks: list[int] = stages.rank.tolist()
        starts: list[int] = stages.start.tolist()
        for stage in range(1, len(ranks)):
            start, ends = starts[stage], (ranks[stage - 1] * apart, ranks[stage] * apart)
            if ends[0] == ends[1]:
                continue
            kinds = tuple([port.kind for port in model.layers[start].inputs])
            key = kinds, given[start], least, ends
            if key not in known:
                there = back = 0.0
                for kind in kinds:  # they take turns
                    bytes = given[start] if kind is Kind.ACTIVATION else least
                    there += prices.message_times(kind, bytes, *ends)[0]
                    back += prices.message_times(GRADIENT_OF[kind], bytes, *ends[::-1])[0]
                known[key] = there, back
            found[0, stage - 1], found[1, stage] = known[key]
        return found

"""Pipelines of a problem's shapes: the layers of their stages, where these are, and the orders of their ranks."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array, Places
from shardlab.planner.pass_counts import PassCounts, pass_counts
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.problem import Problem
from shardlab.planner.rank_orders import RankOrder, rank_order
from shardlab.planner.shape_pipelines import few_of, follows
from shardlab.predict.changes import ALL_AT_ONCE
from shardlab.predict.forecast import enough
from shardlab.strategies.plan import Plan
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
        few = min(enough(plan, each)[0], few_of(each, plan.mesh.pp) if isinstance(plan.schedule, str) else each)
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

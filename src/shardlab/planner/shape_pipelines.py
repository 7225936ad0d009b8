"""Pipelines of a shape: every schedule and number of stages, and which blocks each stage computes again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any

from shardlab.errors import UserError
from shardlab.planner.alike import alike_blocks
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.problem import Problem
from shardlab.predict.staging import stages_by_cost
from shardlab.strategies.model_layers import ModelLayers
from shardlab.strategies.plan import Plan
from shardlab.strategies.resolve import named_blocks
from shardlab.strategies.schedules import SCHEDULES, Schedule


def pipelined(problem: Problem, shape: PlanShape) -> Iterator[Plan]:
    """The plans of a shape with every schedule and number of stages, that shard nothing; `follows` knows the legal."""
    model, limits, pp = blocks_of(problem, shape).layers, problem.limits, shape.mesh.pp
    bare = shape.candidate.plan
    base = replace(bare, layers_per_stage=layers_of_stages(problem, bare))
    for schedule in limits.tried("schedule", tuple(SCHEDULES) if pp > 1 else ("1f1b",)):
        order = replace(base, schedule=schedule).order
        looped = pp > 1 and isinstance(order, Schedule) and order.stages_per_rank is None
        for stages in limits.tried("stages_per_rank", _stages(problem.model.layers, pp) if looped else (None,)):
            try:
                plan = replace(base, schedule=schedule, stages_per_rank=stages)
                again = _recomputed(shape, model, plan.bounds(model.pipeline_units))
                yield plan if plan.recompute == again else replace(plan, recompute=again)
            except UserError:
                continue


def layers_of_stages(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The layers of each stage of a plan: as they are fixed, or as the recipe deals them (empty: evenly)."""
    if "layers_per_stage" in problem.limits.fixed:
        return problem.limits.fixed["layers_per_stage"]
    if plan.mesh.pp == 1 or problem.recipe.defaults.stages == "even":
        return ()
    found = alike_blocks(problem.model, plan.mesh, apart=plan.attention_apart, ulysses=plan.ulysses)
    return stages_by_cost(problem.model, plan.mesh.pp, halves=bool(found and found.layers.blocks))


def follows(problem: Problem, shape: PlanShape, plan: Plan) -> bool:
    """Whether a plan's schedule can be followed with as many microbatches as there are."""
    each = problem.sequences // (plan.data_ranks * shape.micro_batch_size)
    units = blocks_of(problem, shape).layers.pipeline_units
    try:
        plan.steps(units, few_of(each, shape.mesh.pp) * plan.data_ranks)
    except UserError:
        return False
    return True


def few_of(each: int, pp: int) -> int:
    """Fewer microbatches for each data-parallel rank, with which a schedule is legal if it is with all of them; some of
    them are neither the first nor the last."""
    return each if each <= 4 * pp else max(4, 2 * pp) + each % (2 * pp)


def _stages(layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of stages of each rank: all that divide the layers, or, if the ranks do not, all up to 8."""
    found = range(2, layers // pp + 1)
    return tuple(each for each in found if layers % (pp * each) == 0 or (layers % pp and each <= 8))


def _recomputed(shape: PlanShape, model: ModelLayers, bounds: list[int]) -> Any:
    """The plan's word for a share of the blocks: so many of each stage's first ones.

    Raises:
        UserError: blocks by number of which the model lacks some, or a share of so few blocks that it is all.
    """
    if isinstance(shape.recompute, tuple):
        named_blocks(shape.recompute, model)
        return shape.recompute
    if shape.recompute in ("none", "selective", "full"):
        return shape.recompute
    starts = [block.start for block in model.recomputable]
    cuts = [bisect_left(starts, model.pipeline_cuts[unit]) for unit in bounds]
    chosen: list[int] = []
    for blocks in (range(*cut) for cut in pairwise(cuts)):
        chosen += blocks[: ceil(shape.share * len(blocks))]
    if len(chosen) == len(model.recomputable):
        raise UserError("so few blocks are all computed again, as full says")
    return tuple(chosen)

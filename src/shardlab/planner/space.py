"""The space of plans: all that a plan can say of a model on so many devices, and that divides.

It is generated in two stages. A `PlanShape` is what a microbatch's own time depends on: the mesh but for how its
data-parallel ranks share the model, the microbatch, and what is computed again. Its candidates add the pipeline's
schedule and who keeps what. Whether a candidate is legal is for the code that runs plans to say: `Plan` itself,
`cut_for`, the schedule's steps, and in the end the trace.

A value that the user fixes is taken as given, whether it is tried otherwise or not. Else left out are plans that cannot
be better than one that is there:

- Replicas of ranks that share nothing: `dp_replicate 2 x dp_shard 4` is `dp_shard 8` if nothing is sharded, or if
  everything is sharded over both. Sharding over `dp_replicate` alone is sharding over `dp_shard`, on ranks further
  apart.
- Sharding over `cp` of some of parameters, gradients and state: all that is sharded is sharded over `cp` too, or none.
- Gradients reduced at every microbatch that are not sharded: more messages, and no less memory.
- Gradients reduced when all are there (`reduce_at step`), unless it is the recipe's way: nothing runs beside it then.
- Programs that passes rewrite, which are replayed whole: too long to do it for every plan.
- What the recipe's framework does not run (`predict/limits.py`).
- On one pipeline rank, any schedule but 1f1b: all others hold more microbatches at a time.
- Selective recomputation without dropout: fused attention keeps no scores that it could save.
- Striped sequences: without stripes, ranks of `cp` have exactly as much work.
- Keys and values that are gathered from neighbours' neighbours (`all_gather` with a degree of Ulysses): a ring of them
  runs beside compute.
- Sequences cut so finely that a rank has less than 1,024 tokens of them.
- Stages of other sizes than the even ones, or those that the recipe deals.
- Of blocks that are computed again, any but each stage's first ones: blocks are alike. Shares of them are quarters
  and the outermost eighths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any, get_args

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.models.architectures import MoE
from shardlab.planner.problem import SHARES, Candidate, PlanShape, Problem, blocks_of, divides, identical_blocks
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.simulate.predict.recipe import stages_by_cost
from shardlab.strategies.plan.plan import Context, Plan
from shardlab.strategies.plan.rank_plan import ModelLayers
from shardlab.strategies.plan.resolve import named_blocks
from shardlab.strategies.schedules import SCHEDULES, Schedule

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Axes along which ranks share the model or a sequence."""

LEAST_SEQUENCE = 1024
"""Tokens of a sequence on each context-parallel rank, at least: what is cut finer is all messages."""


def shapes(problem: Problem) -> Iterator[PlanShape]:
    """Every shape whose mesh divides the devices, the batch and the model."""
    for mesh in meshes(problem):
        cuttings = [shape for shape in _of_mesh(problem, mesh) if divides(problem, shape)]
        per_rank = problem.sequences // (mesh.dp_shard * mesh.ep)
        for size in divisors(per_rank):
            if not problem.limits.allows("micro_batch_size", size):
                continue
            for precision in problem.precisions:
                for shape in cuttings:
                    yield replace(shape, micro_batch_size=size, precision=precision)


def meshes(problem: Problem) -> Iterator[Mesh]:
    """Every mesh of all devices among whose data-parallel ranks the batch divides, with these all on `dp_shard`."""
    limits, model, devices = problem.limits, problem.model, problem.cluster.size
    data_fixed = {"dp_shard", "dp_replicate"} & set(limits.fixed)
    for pp in divisors(devices):
        for tp in divisors(devices // pp):
            for cp in divisors(devices // pp // tp):
                for ep in divisors(devices // pp // tp // cp) if isinstance(model, MoE) else (1,):
                    mesh = Mesh(pp=pp, dp_shard=devices // pp // tp // cp // ep, cp=cp, tp=tp, ep=ep)
                    sizes = {axis: size for axis, size in mesh.sizes().items() if not axis.startswith("dp_")}
                    if not all(limits.allows(axis, size) for axis, size in sizes.items()):
                        continue
                    if data_fixed and not any(splits(problem, mesh.dp_shard)):
                        continue
                    if problem.sequences % (mesh.dp_shard * ep) or pp > 2 * model.layers + 1:
                        continue
                    if not cuts_sequences(problem, cp):
                        continue
                    yield mesh


def cuts_sequences(problem: Problem, cp: int) -> bool:
    """Return whether plans may cut sequences over so many context-parallel ranks."""
    if cp == 1 or "cp" in problem.limits.fixed:
        return True
    return not problem.recipe.defaults.lacks("cp") and problem.model.seq_len >= cp * LEAST_SEQUENCE


def _of_mesh(problem: Problem, mesh: Mesh) -> Iterator[PlanShape]:
    """Shapes with a mesh, of microbatches of one sequence: what is tried of all that they say beside."""
    limits, precision = problem.limits, problem.precisions[0]
    words: tuple[Context, ...] = get_args(Context) if mesh.cp > 1 else ("ring",)
    contexts = limits.tried("context", words)
    degrees = limits.tried("ulysses_degree", (None, *(each for each in divisors(mesh.cp) if 1 < each < mesh.cp)))
    either = {"context", "ulysses_degree"} & set(limits.fixed)
    recomputes: tuple[str | tuple[int, ...], ...] = (*SHARES, *(["selective"] if problem.model.dropout else []))
    for sequence_parallel in limits.tried("sequence_parallel", (True, False) if mesh.tp > 1 else (False,)):
        for context in contexts:
            for degree in degrees if context == "ring" or either else (None,):
                for recompute in limits.tried("recompute", recomputes):
                    for stripes in limits.tried("stripes", (None,)):
                        yield PlanShape(mesh, 1, precision, sequence_parallel, context, degree, recompute, stripes)


def candidates(problem: Problem, shape: PlanShape) -> Iterator[Candidate]:
    """Every candidate of a shape."""
    for plan in pipelined(problem, shape):
        if follows(problem, shape, plan):
            yield from candidates_of_pipeline(problem, shape, plan)


def candidates_of_pipeline(problem: Problem, shape: PlanShape, plan: Plan) -> Iterator[Candidate]:
    """Every candidate of a shape's plan that shards nothing yet, and that the recipe's framework runs."""
    for each in sharded(problem, plan):
        if (candidate := legal(problem, shape, each)) is not None:
            yield candidate


def legal(problem: Problem, shape: PlanShape, plan: Plan) -> Candidate | None:
    """A shape's candidate with a plan, if the limits allow it and the recipe's framework runs it."""
    candidate = Candidate(plan, shape.micro_batch_size, shape.precision)
    return candidate if problem.limits.allow(plan) and not broken_limit(problem.workload(candidate)) else None


Axes = tuple[str, ...]

SHARDED = ("shard_parameters", "shard_gradients", "shard_optimizer")
"""The fields of a plan that say over which axes its state is cut."""


def sharded(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """A plan with its data-parallel ranks split into replicas and shards, and who keeps what, in every way."""
    limits = problem.limits
    for mesh in (replace(plan.mesh, dp_replicate=r, dp_shard=s) for r, s in splits(problem, plan.mesh.dp_shard)):
        for sharding in _shardings(problem, mesh):
            reshards = ("layer", *(["stage"] if mesh.pp > 1 else []), "step") if sharding[0] else ("layer",)
            for reshard in limits.tried("reshard_after", reshards):
                words = {
                    **dict(zip(SHARDED, sharding, strict=True)),
                    "reshard_after": reshard,
                    "reduce_at": problem.recipe.defaults.reduction(sharded=bool(sharding[-1])),
                }
                try:
                    yield replace(plan, mesh=mesh, **(words | limits.fields))
                except UserError:
                    continue


def splits(problem: Problem, data: int) -> Iterator[tuple[int, int]]:
    """Replicas and shards that make up so many data-parallel ranks."""
    limits, lacks = problem.limits, problem.recipe.defaults.lacks("dp_replicate")
    any_size = not lacks or "dp_shard" in limits.fixed  # then a sentence says what the framework lacks
    usual = [each for each in divisors(data) if each == 1 or (each < data and any_size)]
    for replicas in limits.tried("dp_replicate", usual):
        shards, rest = divmod(data, replicas)
        if not rest and shards in limits.tried("dp_shard", (shards,)):
            yield replicas, shards


def _shardings(problem: Problem, mesh: Mesh) -> list[tuple[Axes, ...]]:
    """Axes over which parameters, gradients and the optimizer's state are cut, each over two ranks or more."""
    fixed, sizes = problem.limits.fixed, mesh.sizes()
    own = [
        tuple(fixed.get(name, axes) for name, axes in zip(SHARDED, each, strict=True)) for each in _usual(mesh, fixed)
    ]
    return [each for each in dict.fromkeys(own) if all(sizes[axis] > 1 for axes in each for axis in axes)]


def _usual(mesh: Mesh, fixed: Container[str]) -> Iterator[tuple[Axes, Axes, Axes]]:
    """Axes over which parameters, gradients and the optimizer's state are cut, unless some are fixed."""
    if mesh.dp_replicate == 1 or mesh.dp_shard == 1 or "dp_replicate" in fixed or "dp_shard" in fixed:
        yield (), (), ()
    for along in ((), ("cp",)) if mesh.cp > 1 else ((),):
        shard = (*(("dp_shard",) if mesh.dp_shard > 1 else ()), *along)
        if not shard:
            continue
        for parameters in ((), shard):
            for gradients in ((), shard):
                yield parameters, gradients, shard
                if mesh.dp_replicate > 1 and (parameters or gradients):
                    yield parameters, gradients, (*shard, "dp_replicate")


def divisors(number: int) -> list[int]:
    """Every number that divides another, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def pipelined(problem: Problem, shape: PlanShape) -> Iterator[Plan]:
    """The plans of a shape with every schedule and number of stages, that shard nothing; `follows` knows the legal."""
    model, limits, pp = blocks_of(problem, shape).layers, problem.limits, shape.mesh.pp
    bare = shape.candidate.plan
    base = replace(bare, layers_per_stage=layers_of_stages(problem, bare))
    for schedule in limits.tried("schedule", tuple(SCHEDULES) if pp > 1 else ("1f1b",)):
        order = replace(base, schedule=schedule).order
        looped = pp > 1 and isinstance(order, Schedule) and order.stages_per_rank is None
        for stages in limits.tried("stages_per_rank", stage_counts(problem.model.layers, pp) if looped else (None,)):
            try:
                plan = replace(base, schedule=schedule, stages_per_rank=stages)
                again = recomputed_blocks(shape.recompute, model, plan.bounds(model.pipeline_units))
                yield plan if plan.recompute == again else replace(plan, recompute=again)
            except UserError:
                continue


def layers_of_stages(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The layers of each stage of a plan: as they are fixed, or as the recipe deals them (empty: evenly)."""
    if "layers_per_stage" in problem.limits.fixed:
        return problem.limits.fixed["layers_per_stage"]
    if plan.mesh.pp == 1 or problem.recipe.defaults.stages == "even":
        return ()
    found = identical_blocks(problem.model, plan.mesh, apart=plan.attention_apart, ulysses=plan.ulysses)
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


def stage_counts(layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of stages of each rank: all that divide the layers, or, if the ranks do not, all up to 8."""
    found = range(2, layers // pp + 1)
    return tuple(each for each in found if layers % (pp * each) == 0 or (layers % pp and each <= 8))


def recomputed_blocks(recompute: str | tuple[int, ...], model: ModelLayers, bounds: list[int]) -> Any:
    """Return the `recompute` of a plan that recomputes a share of the blocks: the first ones of each stage.

    Args:
        recompute: a share of `SHARES`, "selective", or blocks by number.
        model: the model's layers.
        bounds: pipeline units at which stages begin and end.

    Raises:
        UserError: for blocks that the model lacks, or a share of so few blocks that it is all of them.
    """
    if isinstance(recompute, tuple):
        named_blocks(recompute, model)
        return recompute
    if recompute in ("none", "selective", "full"):
        return recompute
    starts = [block.start for block in model.recomputable]
    cuts = [bisect_left(starts, model.pipeline_cuts[unit]) for unit in bounds]
    chosen: list[int] = []
    for blocks in (range(*cut) for cut in pairwise(cuts)):
        chosen += blocks[: ceil(SHARES[recompute] * len(blocks))]
    if len(chosen) == len(model.recomputable):
        raise UserError("so few blocks are all computed again, as full says")
    return tuple(chosen)

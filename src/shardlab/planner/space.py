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

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from shardlab.models.moe import MoE
from shardlab.planner.plan_shape import SHARES, PlanShape, divides
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.shape_pipelines import follows, pipelined
from shardlab.planner.sharded import divisors, sharded, splits
from shardlab.predict.limits import broken_limit
from shardlab.program import Mesh
from shardlab.strategies.plan import Context, Plan

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
    lacks_cp = problem.recipe.defaults.lacks("cp")
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
                    if cp > 1 and "cp" not in limits.fixed and (lacks_cp or model.seq_len < cp * LEAST_SEQUENCE):
                        continue
                    yield mesh


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
            yield from dealt(problem, shape, plan)


def dealt(problem: Problem, shape: PlanShape, plan: Plan) -> Iterator[Candidate]:
    """Every candidate of a shape's plan that shards nothing yet, and that the recipe's framework runs."""
    for each in sharded(problem, plan):
        if (candidate := legal(problem, shape, each)) is not None:
            yield candidate


def legal(problem: Problem, shape: PlanShape, plan: Plan) -> Candidate | None:
    """A shape's candidate with a plan, if the limits allow it and the recipe's framework runs it."""
    candidate = Candidate(plan, shape.micro_batch_size, shape.precision)
    return candidate if problem.limits.allow(plan) and not broken_limit(problem.workload(candidate)) else None

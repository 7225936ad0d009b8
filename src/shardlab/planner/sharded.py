"""Ways to share a model: data-parallel ranks as replicas and shards, and over which axes who keeps what."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import replace

from shardlab.errors import UserError
from shardlab.planner.problem import Problem
from shardlab.program import Mesh
from shardlab.strategies.plan import Plan

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

"""The space of plans: what the search may choose, and what it leaves out.

Whether a plan is legal is for the code that runs plans to say: `Plan` itself, `cut_for`, the schedule's steps, and in
the end the trace. A value that the user fixes is taken as given. Otherwise, plans are left out that cannot be better
than others:

- Replicas of ranks that share nothing: `dp_replicate 2 x dp_shard 4` is `dp_shard 8` if nothing is sharded, or if
  everything is sharded over both. Sharding over `dp_replicate` alone is sharding over `dp_shard`, on ranks further
  apart.
- Sharding over `cp` of some of parameters, gradients and state: all that is sharded is sharded over `cp` too, or none.
- Gradients that are reduced at every microbatch but not sharded: more messages, and no less memory.
- Gradients that are reduced after the last microbatch (`reduce_at step`), unless the recipe does so: nothing hides it.
- Programs that passes rewrite, whose simulation takes too long to do it for every plan.
- Plans that the recipe's framework does not run (`capabilities.broken_limit`).
- On one pipeline rank, any schedule but 1f1b: all others hold more microbatches at a time.
- Selective recomputation without dropout: fused attention keeps no scores that it could save.
- Striped sequences: without stripes, ranks of `cp` have exactly as much work.
- Keys and values gathered over a part of `cp` (`all_gather` with a degree of Ulysses): a ring runs beside compute.
- Sequences cut so finely that a rank has less than 1,024 tokens of them.
- Uneven stages, unless the recipe deals them so.
- Recomputation of other blocks than each stage's first ones: blocks are identical. Shares of them are quarters and the
  outermost eighths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from typing import Any

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.models.architectures import MoE
from shardlab.planner.problem import SHARES, Candidate, Problem, plan_layers
from shardlab.simulate.predict.capabilities import broken_limit
from shardlab.simulate.predict.stages import stages_by_cost
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import ModelLayers
from shardlab.strategies.plan.resolve import named_blocks

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Axes along which ranks share the model or a sequence."""

LEAST_SEQUENCE = 1024
"""Tokens of a sequence on each context-parallel rank, at least: what is cut finer is all messages."""


def meshes(problem: Problem) -> Iterator[Mesh]:
    """Every mesh of all devices among whose data-parallel ranks the batch divides, with these all on `dp_shard`."""
    limits, model, devices = problem.limits, problem.model, problem.cluster.size
    mixes = isinstance(model, MoE) or "ep" in limits.fixed  # the code that runs plans refuses the latter
    data_fixed = {"dp_shard", "dp_replicate"} & set(limits.fixed)
    for pp in divisors(devices):
        for tp in divisors(devices // pp):
            for cp in divisors(devices // pp // tp):
                for ep in divisors(devices // pp // tp // cp) if mixes else (1,):
                    mesh = Mesh(pp=pp, dp_shard=devices // pp // tp // cp // ep, cp=cp, tp=tp, ep=ep)
                    sizes = {axis: size for axis, size in mesh.sizes().items() if not axis.startswith("dp_")}
                    if not all(limits.allows(axis, size) for axis, size in sizes.items()):
                        continue
                    if data_fixed and not any(splits(problem, mesh.dp_shard)):
                        continue
                    if problem.sequences % (mesh.dp_shard * ep) == 0 and cuts_sequences(problem, cp):
                        yield mesh


def cuts_sequences(problem: Problem, cp: int) -> bool:
    """Return whether plans may cut sequences over so many context-parallel ranks."""
    if cp == 1 or "cp" in problem.limits.fixed:
        return True
    return not problem.recipe.can_run.lacks("cp") and problem.model.seq_len >= cp * LEAST_SEQUENCE


def is_legal(problem: Problem, candidate: Candidate) -> bool:
    """Return whether the limits allow a candidate and the recipe's framework runs it."""
    return problem.limits.allow(candidate.plan) and not broken_limit(problem.workload(candidate))


Axes = tuple[str, ...]

SHARDED = ("shard_parameters", "shard_gradients", "shard_optimizer")
"""The fields of a plan that say over which axes its state is cut."""


def splits(problem: Problem, data: int) -> Iterator[tuple[int, int]]:
    """Replicas and shards that make up so many data-parallel ranks."""
    limits, lacks = problem.limits, problem.recipe.can_run.lacks("dp_replicate")
    any_size = not lacks or "dp_shard" in limits.fixed  # then a sentence says what the framework lacks
    usual = [each for each in divisors(data) if each == 1 or (each < data and any_size)]
    for replicas in limits.tried("dp_replicate", usual):
        shards, rest = divmod(data, replicas)
        if not rest and shards in limits.tried("dp_shard", (shards,)):
            yield replicas, shards


def divisors(number: int) -> list[int]:
    """Every number that divides another, ascending."""
    return [each for each in range(1, number + 1) if number % each == 0]


def layers_of_stages(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """The layers of each stage of a plan: as they are fixed, or as the recipe deals them (empty: evenly)."""
    if "layers_per_stage" in problem.limits.fixed:
        return problem.limits.fixed["layers_per_stage"]
    if plan.mesh.pp == 1 or problem.recipe.defaults.stages == "even":
        return ()
    return stages_by_cost(problem.model, plan.mesh.pp, halves=bool(plan_layers(problem.model, plan).blocks))


def stage_counts(layers: int, pp: int) -> tuple[int, ...]:
    """Numbers of stages of each rank: all that divide the layers, or, if the ranks do not, all up to 8."""
    found = range(2, layers // pp + 1)
    return tuple(each for each in found if layers % (pp * each) == 0 or (layers % pp and each <= 8))


def recomputed_blocks(
    recompute: str | tuple[int, ...], model: ModelLayers, bounds: list[int], *, by_number: bool = True
) -> Any:
    """Return the `recompute` of a plan that recomputes a share of the blocks: the first ones of each stage.

    Args:
        recompute: a share of `SHARES`, "selective", or blocks by number.
        model: the model's layers.
        bounds: pipeline units at which stages begin and end.
        by_number: whether blocks are named by number. Otherwise each stage recomputes as many of its first ones.

    Raises:
        UserError: for blocks that the model lacks, or a share of so few blocks that it is all of them.
    """
    if isinstance(recompute, tuple):
        named_blocks(recompute, model)
        return recompute
    if recompute not in SHARES or recompute in ("none", "full"):
        return recompute
    starts = [block.start for block in model.recomputable]
    cuts = [bisect_left(starts, model.pipeline_cuts[unit]) for unit in bounds]
    if not by_number:
        number, most = ceil(SHARES[recompute] * max(stop - start for start, stop in pairwise(cuts))), len(starts)
        if number * (len(cuts) - 1) >= most:
            raise UserError("so few blocks are all computed again, as full says")
        return f"first-{number}"
    chosen: list[int] = []
    for blocks in (range(*cut) for cut in pairwise(cuts)):
        chosen += blocks[: ceil(SHARES[recompute] * len(blocks))]
    if len(chosen) == len(model.recomputable):
        raise UserError("so few blocks are all computed again, as full says")
    return tuple(chosen)

"""The space of plans of a search, and the plans that it leaves out.

The code that runs plans decides whether a plan is legal: `Plan` itself, `cut_for`, the schedule's steps, and finally
the trace. A value that the user fixes is always used. Otherwise, the search leaves out the following plans:

- Replicas if nothing is sharded over them: `dp_replicate 2 x dp_shard 4` is `dp_shard 8` if nothing is sharded, or if
  everything is sharded over both. Sharding over `dp_replicate` alone is sharding over `dp_shard`, on ranks further
  apart.
- Sharding over `cp` of only some of parameters, gradients and state: all sharded ones are sharded over `cp` too, or
  none.
- Gradients that are reduced at every microbatch but not sharded: more messages, and no less memory.
- Gradients that are reduced after the last microbatch (`reduce_at step`), unless the recipe does so: no compute hides
  the reduction.
- Programs that passes rewrite: simulating them for every plan would take too long.
- Plans that the recipe's framework does not run (`limits.broken_limit`).
- On one pipeline rank, any schedule but 1f1b: all others keep more microbatches in memory.
- Selective recomputation without dropout: fused attention does not keep scores.
- Striped sequences: without stripes, ranks of `cp` have the same work.
- Keys and values gathered over a part of `cp` (`all_gather` with a degree of Ulysses): a ring overlaps with compute.
- Sequences of which a rank has less than 1,024 tokens.
- Uneven stages, unless the recipe has them.
- Recomputation of other blocks than each stage's first ones: blocks are identical. The shares are quarters, 1/8 and
  7/8.
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
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.stages import stages_by_cost
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import ModelLayers
from shardlab.strategies.plan.resolve import named_blocks

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Axes along which the model or sequences are split."""

LEAST_SEQUENCE = 1024
"""Smallest number of tokens of a sequence on a context-parallel rank. With fewer, messages take most of the time."""


def meshes(problem: Problem) -> Iterator[Mesh]:
    """Yield all meshes that use all devices and divide the batch among data-parallel ranks.

    `dp_replicate` is always 1.
    """
    limits, model, devices = problem.limits, problem.model, problem.cluster.size
    mixes = isinstance(model, MoE) or "ep" in limits.fixed  # without experts, the code that runs plans refuses ep
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
    """Return whether plans may split sequences over `cp` context-parallel ranks."""
    if cp == 1 or "cp" in problem.limits.fixed:
        return True
    return not problem.recipe.can_run.lacks("cp") and problem.model.seq_len >= cp * LEAST_SEQUENCE


def is_legal(problem: Problem, candidate: Candidate) -> bool:
    """Return whether the limits allow a candidate and the recipe's framework can run it."""
    return problem.limits.allow(candidate.plan) and not broken_limit(problem.workload(candidate))


Axes = tuple[str, ...]

SHARDED = ("shard_parameters", "shard_gradients", "shard_optimizer")
"""Fields of a plan with the axes over which its state is sharded."""


def splits(problem: Problem, data: int) -> Iterator[tuple[int, int]]:
    """Yield (replicas, shards) whose product is `data`, the number of data-parallel ranks."""
    limits, lacks = problem.limits, problem.recipe.can_run.lacks("dp_replicate")
    any_size = not lacks or "dp_shard" in limits.fixed  # a message then says what the framework lacks
    usual = [count for count in divisors(data) if count == 1 or (count < data and any_size)]
    for replicas in limits.values_to_try("dp_replicate", usual):
        shards, rest = divmod(data, replicas)
        if not rest and shards in limits.values_to_try("dp_shard", (shards,)):
            yield replicas, shards


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def layers_of_stages(problem: Problem, plan: Plan) -> tuple[int, ...]:
    """Return the `layers_per_stage` of a plan, as fixed by the user or divided by the recipe (empty: evenly)."""
    if "layers_per_stage" in problem.limits.fixed:
        return problem.limits.fixed["layers_per_stage"]
    if plan.mesh.pp == 1 or problem.recipe.defaults.stages == "even":
        return ()
    return stages_by_cost(problem.model, plan.mesh.pp, halves=bool(plan_layers(problem.model, plan).blocks))


def stage_counts(layers: int, pp: int) -> tuple[int, ...]:
    """Return the possible numbers of stages per rank, from 2.

    They are the numbers with which all stages have equally many layers, or, if `pp` does not divide `layers`, all
    numbers up to 8 with which each stage has a layer.
    """
    counts = range(2, layers // pp + 1)
    return tuple(count for count in counts if layers % (pp * count) == 0 or (layers % pp and count <= 8))


def recomputed_blocks(
    recompute: str | tuple[int, ...], model: ModelLayers, bounds: list[int], *, by_number: bool = True
) -> Any:
    """Return the `recompute` of a plan that recomputes a share of the blocks: the first ones of each stage.

    Args:
        recompute: a share of `SHARES`, "selective", or blocks by number.
        model: the model's layers.
        bounds: first pipeline unit of each stage, and the end of the last one.
        by_number: whether the result lists blocks by number. Otherwise each stage recomputes the same number of first
            blocks.

    Raises:
        UserError: if the model lacks a block, or the share, rounded up to whole blocks, is all blocks.
    """
    if isinstance(recompute, tuple):
        named_blocks(recompute, model)
        return recompute
    if recompute not in SHARES or recompute in ("none", "full"):
        return recompute
    starts = [block.start for block in model.recomputable]
    cuts = [bisect_left(starts, model.pipeline_cuts[unit]) for unit in bounds]
    stages = [range(*cut) for cut in pairwise(cuts)]
    numbers = [ceil(SHARES[recompute] * len(blocks)) for blocks in stages]
    if (sum(numbers) if by_number else max(numbers) * len(stages)) >= len(starts):
        raise UserError("so few blocks are all computed again, as full says")
    first_blocks = [block for blocks, number in zip(stages, numbers, strict=True) for block in blocks[:number]]
    return tuple(first_blocks) if by_number else f"first-{max(numbers)}"

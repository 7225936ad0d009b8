"""Lines: the sets of plans between which the search moves.

A line is a set of plans that differ only in the share of their blocks that is recomputed. It is represented by the
candidate that recomputes no whole block (at most attention's scores, or parts of every block). `with_share` returns the
other plans. The share is not a move of the search, because each line has one best share: the smallest that fits.

`seeds` lists the lines that an expert tries first. `neighbours` lists the lines one or two changes away. `change_line`
makes one such change, and adapts the fields that depend on it. All lines have the values that the user fixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil
from typing import Any

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.language.precision import Precision
from shardlab.language.recompute_names import PER_OP, POLICIES
from shardlab.models.architectures import MoE
from shardlab.planner.problem import SHARES, Candidate, Problem, plan_layers
from shardlab.planner.space import (
    MODEL_AXES,
    SHARDED,
    cuts_sequences,
    divisors,
    is_legal,
    layers_of_stages,
    meshes,
    recomputed_blocks,
    splits,
    stage_counts,
)
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import SCHEDULES

WHOLE_NODE_TP = (1, 2, 4, 8)
"""Numbers of tensor-parallel ranks of the seeds, up to the size of a node."""

SEED_TOKENS = 8192
"""Largest number of tokens of a microbatch on a rank of the seeds."""

SEED_SEQUENCE = 2048
"""Smallest number of tokens of a sequence on a context-parallel rank of the seeds."""


def shares_of(problem: Problem, line: Candidate) -> Sequence[str]:
    """Return the possible shares of recomputed blocks of a line, the smallest first."""
    can = problem.recipe.can_run
    if "recompute" in problem.limits.fixed or own_recompute(line.plan) != "none":
        return ("none",)
    if can.recomputes("blocks") or can.recomputes("first"):
        return tuple(SHARES)
    return ("none", "full") if can.recomputes("full") else ("none",)


def own_recompute(plan: Plan) -> str:
    """Return the recomputation that all plans of a line have: none, attention's scores, or parts of every block."""
    return "selective" if plan.recompute == "selective" else plan.recompute_inside or "none"


def recomputed_inside(problem: Problem) -> Iterator[str]:
    """Yield the values of `recompute` that recompute parts of every block, if model and framework have these parts."""
    can, model = problem.recipe.can_run.recompute, problem.model
    yield from (word for word in (PER_OP, *POLICIES) if word in can)
    mixture, latent = isinstance(model, MoE), getattr(model, "kv_rank", None) is not None
    cheap = ("layernorm",) * (mixture or latent) + ("mla_up_proj",) * latent
    cheap += ("moe_act",) * (mixture and not problem.recipe.kernels.expert_loop)  # Megatron needs --moe-grouped-gemm
    shared = ("shared_experts",) * bool(getattr(model, "shared_experts", 0))
    for modules in (cheap, shared, ("moe",) if mixture else ("mlp",)):
        if modules and set(modules) <= set(can):
            yield "+".join(modules)


def with_share(problem: Problem, line: Candidate, share: str) -> Candidate | None:
    """Return the candidate of a line that recomputes a share of the blocks.

    Returns None if a share below 1, rounded up to whole blocks, is all blocks.
    """
    if share == "none":
        return line
    model = plan_layers(problem.model, line.plan)
    try:
        by_number = problem.recipe.can_run.recomputes("blocks")
        blocks = recomputed_blocks(share, model, line.plan.bounds(model.pipeline_units), by_number=by_number)
        return replace(line, plan=replace(line.plan, recompute=blocks))
    except UserError:
        return None


def make_line(problem: Problem, mesh: Mesh, size: int, precision: Precision, **fields: Any) -> Candidate | None:
    """Return a line on a mesh, with fields adapted to the axes of the mesh (None: there is no such plan).

    Args:
        problem: the problem.
        mesh: the mesh. Replicas are merged into `dp_shard` if they do not matter for the sharding (below ZeRO-2 without
            `wide`, or with `dp_shard` 1), unless the user fixes the split.
        size: sequences of a microbatch.
        precision: precision of the step.
        fields: fields of the plan; also `zero` for the stage of ZeRO, `along` for sharding over cp too, and `wide` for
            sharding the optimizer state over replicas too.
    """
    limits, defaults, can = problem.limits, problem.recipe.defaults, problem.recipe.can_run
    zero, along, wide = (
        fields.pop(name, default) for name, default in (("zero", 1), ("along", False), ("wide", False))
    )
    if problem.sequences % (mesh.dp_replicate * mesh.dp_shard * mesh.ep * size):
        return None
    if not limits.allows("micro_batch_size", size) or not cuts_sequences(problem, mesh.cp):
        return None
    zero = can.conform_stage(zero, mesh.pp)
    along = (can.shards_over_cp == "always" if can.shards_over_cp else along) and mesh.cp > 1
    with_gradients = can.state_over_replicas == "with gradients"
    wide = wide and zero > (2 if with_gradients else 1) and can.state_over_replicas != "never"
    if not splits_given(problem):
        zero = zero if mesh.dp_shard > 1 or along else 0
        if (zero < 2 and not wide) or mesh.dp_shard == 1:
            mesh = replace(mesh, dp_replicate=1, dp_shard=mesh.dp_replicate * mesh.dp_shard)
    axes = (*(("dp_shard",) if mesh.dp_shard > 1 else ()), *(("cp",) if along else ()))
    zero = zero if axes else 0
    if mesh.tp == 1 or can.sequence_parallel:
        fields["sequence_parallel"] = mesh.tp > 1 and can.sequence_parallel == "always"
    if mesh.pp == 1:
        fields |= {"schedule": "1f1b", "stages_per_rank": None}
    if mesh.cp == 1:
        fields |= {"context": "ring", "ulysses_degree": None}
    if fields.get("context", "ring") != "ring" or not 1 < (fields.get("ulysses_degree") or 1) < mesh.cp:
        fields["ulysses_degree"] = None
    if zero < 3 or (mesh.pp == 1 and fields.get("reshard_after") == "stage"):
        fields["reshard_after"] = "layer"
    elif (values := can.reshards(mesh.pp)) and fields.get("reshard_after", "layer") not in values:
        fields["reshard_after"] = values[0]
    whole_gradients = can.gradients_with_pp == "whole" and mesh.pp > 1 and zero > 2
    state = (*axes, *(("dp_replicate",) if wide and mesh.dp_replicate > 1 else ())) if zero else ()
    fields |= {
        "shard_parameters": axes if zero > 2 else (),
        "shard_gradients": (state if with_gradients else axes) if zero > 1 and not whole_gradients else (),
        "shard_optimizer": state,
        "reduce_at": defaults.reduction(zero),
    }
    try:
        plan = Plan(mesh, **(fields | limits.fields))
        plan = replace(plan, **({"layers_per_stage": layers_of_stages(problem, plan)} | limits.fields))
        candidate = Candidate(plan, size, precision)
        plan.bounds(plan_layers(problem.model, plan).pipeline_units)  # requires that the model divides into stages
        cut = {*plan.shard_parameters, *plan.shard_gradients, *plan.shard_optimizer}
        if any(getattr(mesh, axis) == 1 for axis in cut):  # an axis that the user has named in a fixed field
            return None
        return candidate if is_legal(problem, candidate) else None
    except UserError:
        return None


def splits_given(problem: Problem) -> bool:
    """Return whether the user fixes how data-parallel ranks are split into replicas and shards, or what is sharded."""
    return bool({"dp_replicate", "dp_shard", *SHARDED} & set(problem.limits.fixed))


def change_line(problem: Problem, line: Candidate, **changes: Any) -> Candidate | None:
    """Return a line with some arguments of `make_line` changed (None: there is no such plan)."""
    plan, old_mesh = line.plan, line.plan.mesh
    arguments: dict[str, Any] = {
        "mesh": old_mesh,
        "size": line.micro_batch_size,
        "precision": line.precision,
        "zero": plan.zero_stage,
        "along": "cp" in plan.shard_optimizer,
        "wide": "dp_replicate" in plan.shard_optimizer,
        "reshard_after": plan.reshard_after,
        "sequence_parallel": plan.sequence_parallel,
        "schedule": plan.schedule,
        "stages_per_rank": plan.stages_per_rank,
        "context": plan.context,
        "ulysses_degree": plan.ulysses_degree,
        "recompute": own_recompute(plan),
        **changes,
    }
    mesh: Mesh = arguments["mesh"]
    if mesh.tp > 1 and old_mesh.tp == 1:
        arguments["sequence_parallel"] = True
    if mesh.dp_shard > 1 and old_mesh.dp_shard == 1:
        arguments["zero"] = arguments["zero"] or 1
    if arguments["stages_per_rank"] and "stages_per_rank" not in changes:
        arguments |= nearest_stages(problem, mesh.pp, arguments["stages_per_rank"] * old_mesh.pp)
    return make_line(problem, **arguments)


def nearest_stages(problem: Problem, pp: int, stages: int) -> dict[str, Any]:
    """Return the fields of a plan that has about `stages` stages in total on `pp` ranks (1f1b if none is possible)."""
    counts = stage_counts(problem.model.layers, pp)
    if not counts:
        return {"schedule": "1f1b", "stages_per_rank": None}
    return {"stages_per_rank": min(counts, key=lambda count: abs(count * pp - stages))}


# Seeds: lines that an expert tries first.


def seeds(problem: Problem) -> list[Candidate]:
    """Return the lines that an expert tries first: a grid of meshes, with the usual sharding and schedule of each."""
    usual = [line for mesh in meshes(problem) if _is_usual(problem, mesh) for line in _seeds_of(problem, mesh)]
    # If the limits exclude all usual meshes, take all others.
    return list(dict.fromkeys(usual or [line for mesh in meshes(problem) for line in _seeds_of(problem, mesh)]))


def has_plan(problem: Problem, mesh: Mesh) -> bool:
    """Return whether there is any plan on a mesh."""
    return next(_seeds_of(problem, mesh), None) is not None


def _is_usual(problem: Problem, mesh: Mesh) -> bool:
    limits, model, node = problem.limits, problem.model, problem.cluster.per_node
    usual = {
        "tp": mesh.tp in WHOLE_NODE_TP and mesh.tp <= node,
        "pp": mesh.pp <= max(16, _least_pp(problem)),
        "cp": mesh.cp == 1 or (mesh.cp <= 16 and model.seq_len // mesh.cp >= SEED_SEQUENCE),
        "ep": mesh.ep == 1 or not isinstance(model, MoE) or (mesh.ep <= 8 and model.experts % mesh.ep == 0),
    }
    return all(fits or axis in limits.fixed for axis, fits in usual.items())


def _least_pp(problem: Problem) -> int:
    """Return the smallest number of pipeline ranks, a power of two, that can hold weights and gradients in 16 bits.

    Each pipeline rank has the memory of a whole node.
    """
    needed = 4 * problem.model.parameter_count / (problem.cluster.device.memory * problem.cluster.per_node)
    return 1 << max(0, ceil(needed) - 1).bit_length()


def _seeds_of(problem: Problem, mesh: Mesh) -> Iterator[Candidate]:
    seq_len, rank_sequences = problem.model.seq_len, problem.sequences // (mesh.dp_shard * mesh.ep)
    allowed = [size for size in divisors(rank_sequences) if problem.limits.allows("micro_batch_size", size)]
    sizes = [size for size in allowed if size in (1, 2, 4) and size * seq_len <= SEED_TOKENS * mesh.tp * mesh.cp]
    if not (sizes := sizes or allowed[:1]):
        return
    fields: dict[str, Any] = {"sequence_parallel": mesh.tp > 1}
    can = problem.recipe.can_run
    if mesh.cp > 1:
        context = "all_gather" if not can.context or "all_gather" in can.context else can.context[0]
        fields |= {"context": context, "along": mesh.dp_shard == 1 and mesh.ep == 1}
    node = problem.cluster.per_node
    node_shards = max(1, node // (mesh.tp * mesh.cp * mesh.ep)) if node % (mesh.tp * mesh.cp * mesh.ep) == 0 else 1
    plans: list[tuple[Mesh, int, dict[str, Any]]] = [(mesh, sizes[-1], {"zero": 1})]
    if mesh.pp > 1:
        counts = stage_counts(problem.model.layers, mesh.pp)
        schedules: list[dict[str, Any]] = [{}, {"schedule": "zb-h1"}]
        if counts:
            schedules.append({"schedule": "interleaved-1f1b", "stages_per_rank": counts[min(1, len(counts) - 1)]})
        plans = [(mesh, sizes[-1], {"zero": zero, **schedule}) for zero, schedule in product((1, 3), schedules)]
    else:
        plans += [(mesh, size, {"zero": 3}) for size in dict.fromkeys((sizes[0], sizes[-1]))]
        if mesh.dp_shard > node_shards > 1 and mesh.dp_shard % node_shards == 0:
            plans.append(
                (replace(mesh, dp_replicate=mesh.dp_shard // node_shards, dp_shard=node_shards), sizes[-1], {"zero": 3})
            )
    if splits_given(problem):
        meshes = [replace(mesh, dp_replicate=r, dp_shard=s) for r, s in splits(problem, mesh.dp_shard)]
        plans = [(plan_mesh, size, options) for plan_mesh in meshes for _, size, options in plans]
    recomputations = ("none", PER_OP) if PER_OP in can.recompute else ("none",)
    for (plan_mesh, size, options), precision, recompute in product(plans, problem.precisions, recomputations):
        line = make_line(problem, plan_mesh, size, precision, **(fields | options | {"recompute": recompute}))
        if line is not None:
            yield line


# Neighbours: lines one or two changes away.


def neighbours(problem: Problem, line: Candidate) -> list[Candidate]:
    """Return the lines one or two changes away.

    A change affects mesh and microbatch, recomputation, sharding, schedule, context, or precision.
    """
    lines = dict.fromkeys(change_line(problem, line, **changes) for changes in _changes(problem, line))
    return [neighbour for neighbour in lines if neighbour not in (None, line)]


def every_line(problem: Problem) -> list[Candidate]:
    """Return all lines of a small problem that a search can reach."""
    lines = dict.fromkeys(seeds(problem))
    queue = list(lines)
    while queue:
        new_lines = [line for line in neighbours(problem, queue.pop()) if line not in lines]
        lines.update(dict.fromkeys(new_lines))
        queue += new_lines
    return list(lines)


def _changes(problem: Problem, line: Candidate) -> Iterator[dict[str, Any]]:
    plan, mesh, size, model = line.plan, line.plan.mesh, line.micro_batch_size, problem.model
    for other in _meshes_near(problem, mesh):
        sizes = (size, size * 2, size // 2)
        options: list[dict[str, Any]] = [{}]
        if other.pp > 1 and mesh.pp == 1 and (counts := stage_counts(model.layers, other.pp)):
            options.append({"schedule": "interleaved-1f1b", "stages_per_rank": counts[0]})
        for option, new_size in product(options, filter(None, sizes)):
            yield {"mesh": other, "size": new_size, **option}
    yield from ({"size": new_size} for new_size in (size * 2, size // 2, size * 3, size * 4) if new_size)
    for recompute in (*(("selective",) if model.dropout else ()), *recomputed_inside(problem)):
        yield {"recompute": "none" if plan.recompute == recompute else recompute}
    wide = "dp_replicate" in plan.shard_optimizer
    for zero in range(4):
        yield {"zero": zero}
        if mesh.dp_replicate > 1:
            yield {"zero": zero, "wide": not wide}
    yield from ({"reshard_after": reshard} for reshard in ("layer", "stage", "step"))
    yield {"sequence_parallel": not plan.sequence_parallel}
    yield {"along": "cp" not in plan.shard_optimizer, "zero": plan.zero_stage or 1}
    if mesh.pp > 1:
        for name, schedule in SCHEDULES.items():
            for count in stage_counts(model.layers, mesh.pp) if schedule.stages_per_rank is None else (None,):
                yield {"schedule": name, "stages_per_rank": count}
    if mesh.cp > 1:
        yield from ({"context": context, "ulysses_degree": None} for context in ("ring", "all_gather", "ulysses"))
        yield from ({"context": "ring", "ulysses_degree": degree} for degree in divisors(mesh.cp)[1:-1])
    for precision in problem.precisions:
        if precision != line.precision:
            yield {"precision": precision}


def _meshes_near(problem: Problem, mesh: Mesh) -> Iterator[Mesh]:
    """Yield meshes with one axis larger by a factor and another axis smaller by the same factor."""
    axes = (
        "dp_shard",
        "dp_replicate",
        *(axis for axis in MODEL_AXES if axis != "ep" or isinstance(problem.model, MoE)),
    )
    for up, down in product(axes, axes):
        size = getattr(mesh, down)
        smallest = next((factor for factor in (2, 3, 5, 7) if size % factor == 0), 0)
        for factor in {smallest, 4 if size % 4 == 0 else 0} - {0}:
            if up != down:
                yield replace(mesh, **{up: getattr(mesh, up) * factor, down: size // factor})

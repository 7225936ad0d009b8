"""Neighbours of a plan: candidates that differ in one choice, and in what must follow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from shardlab.errors import UserError
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.shape_pipelines import layers_of_stages
from shardlab.planner.sharded import SHARDED
from shardlab.program.field_types import as_flags
from shardlab.strategies.plan import Plan

ZERO = ("data parallelism", "ZeRO-1", "ZeRO-2", "ZeRO-3")
"""How much of the model data-parallel ranks share, least first."""

MODEL_AXES = ("tp", "pp", "cp", "ep")
"""Axes along which ranks share the model or a sequence."""

Topic = Literal["fit", "batch", "speed"]
"""The question that a choice answers: whether the model fits, what batch a rank takes, or how fast a step is."""


def neighbours(problem: Problem, chosen: Candidate) -> Iterator[tuple[Topic, str, Candidate]]:
    """Candidates that differ in one choice: what it is about, the choice in words, and the candidate."""
    plan = chosen.plan
    for topic, choice, words, follow in (*_meshes(problem, plan), *_sharing(problem, plan), *_words(plan)):
        try:
            other = replace(chosen, plan=replace(plan, **words, **follow))
        except UserError:
            continue
        if problem.sequences % (other.plan.data_ranks * chosen.micro_batch_size) == 0:
            told = {name: value for name, value in follow.items() if value not in (getattr(plan, name), None, ())}
            yield topic, f"{choice} ({as_flags(told)})" if told else choice, other
    each = problem.sequences // plan.data_ranks
    for size in (chosen.micro_batch_size * 2, chosen.micro_batch_size // 2):
        if size and each % size == 0 and problem.limits.allows("micro_batch_size", size):
            yield (
                "batch",
                f"microbatches of {size} instead of {chosen.micro_batch_size}",
                replace(chosen, micro_batch_size=size),
            )


Neighbour = tuple[Topic, str, dict[str, Any], dict[str, Any]]
"""What a choice is about, the choice in words, the fields of a plan that it names, and those that must follow."""


def _meshes(problem: Problem, plan: Plan) -> Iterator[Neighbour]:
    """Twice or half as many ranks along an axis, and half or twice as many that share the batch."""
    mesh = plan.mesh
    for axis in MODEL_AXES:
        size = getattr(mesh, axis)
        for other in (size * 2, size // 2):
            if not other or (mesh.dp_shard * size) % other:
                continue
            wider = replace(mesh, **{axis: other, "dp_shard": mesh.dp_shard * size // other})
            follow: dict[str, Any] = {}
            if axis == "tp":
                follow["sequence_parallel"] = other > 1 and (plan.sequence_parallel or size == 1)
            if axis == "pp" and 1 in (size, other):
                follow |= {"schedule": "1f1b", "stages_per_rank": None}
                follow["reshard_after"] = "layer" if plan.reshard_after == "stage" else plan.reshard_after
            if axis == "cp" and other == 1:
                follow |= {"context": "ring", "ulysses_degree": None, "stripes": None}
            follow["layers_per_stage"] = layers_of_stages(problem, replace(plan, mesh=wider, **follow))
            yield "speed", f"{axis} {other} instead of {size}", {"mesh": wider}, follow


def _sharing(problem: Problem, plan: Plan) -> Iterator[Neighbour]:
    """The next more and the next less of what data-parallel ranks share, and replicas."""
    mesh = plan.mesh
    axes = plan.shard_optimizer or (("dp_shard",) if mesh.dp_shard > 1 else ())
    if not axes:
        return
    fields, stage = SHARDED[::-1], plan.zero_stage
    for other in (stage - 1, stage + 1):
        if 0 <= other <= 3 and not (mesh.dp_replicate > 1 and other == 0):
            words: dict[str, Any] = {name: axes if place < other else () for place, name in enumerate(fields)}
            follow = {"reduce_at": problem.recipe.defaults.reduction(sharded=other > 0)} if 0 in (stage, other) else {}
            if other < 3:  # nothing is gathered
                words["reshard_after"] = "layer"
            yield "fit", f"{ZERO[other]} instead of {ZERO[stage]}", words, follow
    if stage and mesh.dp_shard > 2 and mesh.dp_shard % 2 == 0:
        wider = replace(mesh, dp_replicate=mesh.dp_replicate * 2, dp_shard=mesh.dp_shard // 2)
        yield "fit", f"{wider.dp_replicate} replicas of {wider.dp_shard} shards each", {"mesh": wider}, {}
    if mesh.dp_replicate > 1:
        merged = replace(mesh, dp_replicate=1, dp_shard=mesh.dp_shard * mesh.dp_replicate)
        yield (
            "fit",
            f"shards over all {merged.dp_shard} ranks, no replicas",
            {"mesh": merged},
            dict.fromkeys(fields, axes),
        )


def _words(plan: Plan) -> Iterator[Neighbour]:
    """The other words of a plan."""
    if plan.recompute != "none":
        yield "fit", "without recomputation", {"recompute": "none"}, {}
    if plan.recompute != "full":
        yield "fit", "every block computed again", {"recompute": "full"}, {}
    if plan.shard_parameters:
        other = "step" if plan.reshard_after != "step" else "layer"
        words = {"step": "weights gathered once a step", "layer": "weights gathered for each use"}
        yield "fit", words[other], {"reshard_after": other}, {}
    if plan.mesh.tp > 1:
        now = plan.sequence_parallel
        yield "speed", f"with{'out' * now} sequence parallelism", {"sequence_parallel": not now}, {}
    if plan.mesh.pp > 1:
        for schedule, stages in (("1f1b", None), ("interleaved-1f1b", 2), ("zb-h1", None), ("gpipe", None)):
            if schedule != plan.schedule:
                follow = {"stages_per_rank": stages}
                yield "speed", f"{schedule} instead of {plan.schedule}", {"schedule": schedule}, follow
    if plan.mesh.cp > 1:
        for context in ("ring", "all_gather", "ulysses"):
            if context != plan.context:
                follow = {"ulysses_degree": None}
                yield "speed", f"context {context} instead of {plan.context}", {"context": context}, follow

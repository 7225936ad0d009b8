"""Limits of a framework: plans that a model and a cluster allow, and that it does not run."""

from __future__ import annotations

import math

from shardlab.predict.staging import modules_of_stages
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import DATA_AXES, Plan

SHARED = ("nothing", "the optimizer's state alone", "gradients and the optimizer's state", "everything")
"""What data-parallel ranks share, by the stage of ZeRO."""


def broken_limit(workload: Workload) -> str:
    """Say in a sentence why the recipe's framework does not run a plan ("": it does, or a program is no plan)."""
    plan, recipe = workload.plan, workload.recipe
    if not isinstance(plan, Plan):
        return ""
    own, most = recipe.defaults, recipe.defaults.most_zero_stage
    if own.lacks("cp") and plan.mesh.cp > 1:
        return f"{recipe.name} has no context parallelism, and this plan has cp {plan.mesh.cp}; give --cp 1"
    if own.lacks("dp_replicate") and (replicas := _replicas_of_shards(plan)):
        return (
            f"{recipe.name} has no replicas of ranks that share something, and this plan has {replicas} of them; let "
            "all data-parallel ranks share it, or none"
        )
    ranks, each = plan.mesh.pp, workload.microbatches // plan.data_ranks
    if most is not None and plan.zero_stage > most:
        return (
            f"{recipe.name} has no ZeRO stage above {most}, and this plan is ZeRO-{plan.zero_stage}; let data-parallel "
            f"ranks share {SHARED[most]}"
        )
    schedule = plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name
    if ranks > 1 and own.schedules and schedule not in own.schedules:
        return f"{recipe.name} has no pipeline schedule {schedule}; give {' or '.join(own.schedules)}"
    short = own.microbatches_short_of_ranks if schedule == "1f1b" else None
    if short is not None and each < ranks - short:
        return (
            f"{recipe.name}'s {schedule} needs at least pp - {short} microbatches; with pp {ranks} give at "
            f"least {ranks - short} to each data-parallel rank, not {each}"
        )
    if own.stages == "cost" and modules_of_stages(workload.model, ranks) is None:
        return (
            f"{recipe.name} deals modules to stages by cost, and leaves nothing for the last of {ranks}; give fewer "
            "pipeline ranks"
        )
    return ""


def _replicas_of_shards(plan: Plan) -> int:
    """Data-parallel ranks that keep the same slice of the optimizer's state (0: all slices differ, or none is cut)."""
    sizes = plan.mesh.sizes()
    replicas = math.prod(sizes[axis] for axis in DATA_AXES if axis not in plan.shard_optimizer)
    return replicas if plan.shard_optimizer and replicas > 1 else 0

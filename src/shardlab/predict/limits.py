"""Limits of a framework: plans that a model and a cluster allow, and that it does not run."""

from __future__ import annotations

from shardlab.predict.staging import modules_of_stages
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import Plan

SHARED = ("nothing", "the optimizer's state alone", "gradients and the optimizer's state", "everything")
"""What data-parallel ranks share, by the stage of ZeRO."""


def broken_limit(workload: Workload) -> str:
    """Say in a sentence why the recipe's framework does not run a plan ("": it does)."""
    plan, recipe = workload.plan, workload.recipe
    assert isinstance(plan, Plan)
    own, most = recipe.defaults, recipe.defaults.most_zero_stage
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

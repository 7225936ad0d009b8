"""Limits of a framework: plans that a model and a cluster allow, and that it does not run."""

from __future__ import annotations

from shardlab.predict.staging import modules_of_stages
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import Plan


def broken_limit(workload: Workload) -> str:
    """Say in a sentence why the recipe's framework does not run a plan ("": it does)."""
    plan, recipe = workload.plan, workload.recipe
    assert isinstance(plan, Plan)
    ranks, each = plan.mesh.pp, workload.microbatches // plan.data_ranks
    short = recipe.defaults.microbatches_short_of_ranks
    if short is not None and each < ranks - short:
        return (
            f"{recipe.name}'s {plan.schedule} needs at least pp - {short} microbatches; with pp {ranks} give at "
            f"least {ranks - short} to each data-parallel rank, not {each}"
        )
    if recipe.defaults.stages == "cost" and modules_of_stages(workload.model, ranks) is None:
        return (
            f"{recipe.name} deals modules to stages by cost, and leaves nothing for the last of {ranks}; give fewer "
            "pipeline ranks"
        )
    return ""

"""`--recipe NAME|FILE`: how a framework runs a step, and what it does where the user does not say."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import tyro

from shardlab.cli.plan_options import PlanOptions
from shardlab.strategies.entry import StrategyEntry, planned_entry

if TYPE_CHECKING:
    from shardlab.hardware import Cluster
    from shardlab.predict.recipe import Recipe

RecipeName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME|FILE",
        help="Recipe, which describes how a framework runs a step, such as megatron-core or torchtitan (see shardlab "
        "recipes), or path/to/recipe.toml.",
        help_behavior_hint="(default: shardlab)",
    ),
]
"""A recipe by name; None: Shardlab's own."""


def recipe_called(name: str | None) -> Recipe:
    """The recipe of that name.

    Raises:
        UserError: there is none; the nearest is named.
    """
    from shardlab.predict.recipe import OWN, find_recipe

    return OWN if name is None else find_recipe(name)


def precision_of(recipe: Recipe, cluster: Cluster) -> str:
    """The precision in which a framework trains on such devices."""
    if "bfloat16" not in cluster.device.flops:
        return "fp32"
    wide = (recipe.defaults.bf16_gradient_bytes or recipe.defaults.gradient_bytes) == 4
    return "bf16-fp32-grads" if wide else "bf16"


def as_recipe_does(entry: StrategyEntry, ranks: int, layout: PlanOptions, recipe: Recipe) -> StrategyEntry:
    """The plan as the framework would run it, where neither the flags nor a file say."""
    given = layout.given()
    if entry.plan is None or "plan" in given:
        return entry
    plan, changed = entry.plan(ranks), dict[str, object]()
    sharded = bool(plan.shard_optimizer) or any(name.startswith("shard_") for name in given)
    if "reduce_at" not in given and plan.reduce_at == "layer":
        changed["reduce_at"] = recipe.defaults.reduction(sharded=sharded or recipe.defaults.zero_stage > 0)
    if recipe.defaults.zero_stage and plan.mesh.dp_shard > 1 and not sharded:
        changed["shard_optimizer"] = ("dp_shard",)
    return planned_entry(replace(plan, **changed), entry.name) if changed else entry

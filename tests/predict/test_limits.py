"""Limits of frameworks, each told in a sentence."""

from __future__ import annotations

import pytest

from shardlab.hardware import find_cluster
from shardlab.models import GPT
from shardlab.predict.limits import broken_limit
from shardlab.predict.recipe import find_recipe
from shardlab.predict.workload import Workload
from shardlab.program import Mesh
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan

DATA = Mesh(dp_shard=8)
SHARED = ("dp_shard",)


def told(plan: Plan, recipe: str = "nanotron", microbatches: int = 8) -> str:
    model = GPT(layers=8, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)
    return broken_limit(
        Workload(
            plan, model, find_cluster("h100x8"), microbatches, 1, find_precision("bf16"), recipe=find_recipe(recipe)
        )
    )


def test_zero_stages_that_a_framework_lacks_are_told() -> None:
    two = Plan(DATA, shard_gradients=SHARED, shard_optimizer=SHARED)
    assert told(two) == (
        "nanotron has no ZeRO stage above 1, and this plan is ZeRO-2; let data-parallel ranks share the optimizer's "
        "state alone"
    )
    assert told(two, "shardlab") == told(Plan(DATA, shard_optimizer=SHARED)) == told(Plan(DATA)) == ""


def test_axes_that_a_framework_lacks_are_told() -> None:
    assert told(Plan(Mesh(dp_shard=4, cp=2))) == (
        "nanotron has no context parallelism, and this plan has cp 2; give --cp 1"
    )
    hybrid = Plan(Mesh(dp_replicate=2, dp_shard=4), shard_optimizer=SHARED)
    assert told(hybrid) == (
        "nanotron has no replicas of ranks that share something, and this plan has 2 of them; let all data-parallel "
        "ranks share it, or none"
    )
    assert told(hybrid, "shardlab") == told(Plan(Mesh(dp_replicate=2, dp_shard=4))) == ""
    assert told(Plan(Mesh(dp_replicate=2, dp_shard=4), shard_optimizer=("dp_replicate", "dp_shard"))) == ""


def test_schedules_that_a_framework_lacks_are_told() -> None:
    assert told(Plan(Mesh(pp=8), schedule="zb-h1")) == "nanotron has no pipeline schedule zb-h1; give 1f1b or gpipe"
    assert told(Plan(DATA, schedule="zb-h1")) == "", "one pipeline rank has no schedule"


@pytest.mark.parametrize(("schedule", "runs"), [("1f1b", False), ("gpipe", True)])
def test_few_microbatches_are_a_limit_of_1f1b_alone(schedule: str, runs: bool) -> None:
    text = told(Plan(Mesh(pp=4, dp_shard=2), schedule=schedule), microbatches=4)
    assert text == "" if runs else text.startswith("nanotron's 1f1b needs at least pp - 1 microbatches; with pp 4 give")

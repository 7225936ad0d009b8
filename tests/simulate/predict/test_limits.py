"""Limits of frameworks, each told in a sentence, and what no framework's own runs break."""

from __future__ import annotations

from typing import Any

import pytest

from shardlab.language import Mesh, UserError
from shardlab.language.precision import find_precision
from shardlab.models import GPT
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.capabilities import CanRun
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.recipe import Recipe, find_recipe, recipes
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

DATA = Mesh(dp_shard=8)
SHARD = ("dp_shard",)
BOTH = ("dp_shard", "cp")


def limit_of(plan: Plan, recipe: str | Recipe = "nanotron", microbatches: int = 8, **changes: Any) -> str:
    """The limit that a plan breaks, of a model of 8 blocks on 8 devices."""
    model = GPT(layers=8, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)
    framework = find_recipe(recipe) if isinstance(recipe, str) else recipe
    options: dict[str, Any] = {"precision": find_precision("bf16")} | changes
    return broken_limit(Workload(plan, model, find_cluster("h100x8"), microbatches, 1, recipe=framework, **options))


def sharded(mesh: Mesh, stage: int, axes: tuple[str, ...] = SHARD, **fields: Any) -> Plan:
    """A plan with a stage of ZeRO."""
    names = ("shard_optimizer", "shard_gradients", "shard_parameters")[:stage]
    options: dict[str, Any] = {**dict.fromkeys(names, axes), **fields}
    return Plan(mesh, **options)


def test_zero_stages_that_a_framework_lacks_are_reported() -> None:
    assert limit_of(sharded(DATA, 2)) == (
        "nanotron has ZeRO 0 and 1, and this plan is ZeRO-2; let data-parallel ranks share nothing or the optimizer's "
        "state alone"
    )
    assert limit_of(sharded(DATA, 2), "shardlab") == limit_of(sharded(DATA, 1)) == limit_of(Plan(DATA)) == ""
    assert limit_of(Plan(Mesh(tp=8, pp=1)), "torchtitan") == "", "one data-parallel rank shares nothing"


@pytest.mark.parametrize("recipe", ["megatron-core", "deepspeed", "megatron-deepspeed-2022"])
def test_gradients_are_not_sharded_in_a_pipeline_of_megatron_or_deepspeed(recipe: str) -> None:
    piped = Mesh(pp=2, dp_shard=4)
    assert "has ZeRO 0 and 1 with a pipeline, and this plan is ZeRO-3" in limit_of(sharded(piped, 3), recipe)
    assert limit_of(sharded(piped, 1), recipe) == limit_of(sharded(DATA, 3), recipe) == ""


def test_axes_that_a_framework_lacks_are_reported() -> None:
    assert limit_of(Plan(Mesh(dp_shard=4, cp=2))) == (
        "nanotron has no context parallelism, and this plan has cp 2; give --cp 1"
    )
    hybrid = sharded(Mesh(dp_replicate=2, dp_shard=4), 1)
    assert limit_of(hybrid) == (
        "nanotron has no replicas of ranks that share something, and this plan has 2 of them; let all data-parallel "
        "ranks share it, or none"
    )
    assert limit_of(hybrid, "shardlab") == limit_of(Plan(Mesh(dp_replicate=2, dp_shard=4))) == ""
    assert limit_of(sharded(Mesh(dp_replicate=2, dp_shard=4), 1, ("dp_replicate", "dp_shard"))) == ""


def test_torchtitan_shards_everything_over_data_and_context_ranks_together() -> None:
    assert "torchtitan has ZeRO 0 and 3" in limit_of(sharded(DATA, 2), "torchtitan")
    mesh = Mesh(dp_shard=4, cp=2)
    assert "torchtitan cuts over cp what" in limit_of(sharded(mesh, 3, context="all_gather"), "torchtitan")
    assert limit_of(sharded(mesh, 3, BOTH, context="all_gather"), "torchtitan") == ""
    wide = Plan(
        Mesh(dp_replicate=2, dp_shard=4),
        shard_parameters=SHARD,
        shard_gradients=SHARD,
        shard_optimizer=("dp_shard", "dp_replicate"),
    )
    assert "--shard-optimizer dp_shard" in limit_of(wide, "torchtitan")


def test_deepspeed_cuts_gradients_with_the_state_over_replicas_or_neither() -> None:
    """ZeRO++'s hpZ, and MiCS."""
    mesh, all = Mesh(dp_replicate=2, dp_shard=4), ("dp_shard", "dp_replicate")
    hpz = Plan(mesh, shard_parameters=SHARD, shard_gradients=all, shard_optimizer=all)
    assert limit_of(hpz, "deepspeed") == limit_of(sharded(mesh, 3), "deepspeed") == ""
    half = Plan(mesh, shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=all)
    assert "give --shard-optimizer dp_shard, or --shard-gradients the same" in limit_of(half, "deepspeed")
    assert "--shard-optimizer dp_shard" in limit_of(hpz, "torchtitan")
    assert "--shard-optimizer dp_shard" in limit_of(half, "megatron-core")
    assert "no replicas of the shards of ZeRO-2" in limit_of(sharded(mesh, 2), "deepspeed")


def test_torchtitan_reduces_a_pipelines_gradients_once_a_step() -> None:
    piped = sharded(Mesh(pp=2, dp_shard=4), 3, reshard_after="step")
    assert "leave out --shard-gradients" in limit_of(piped, "torchtitan")
    whole = Plan(piped.mesh, shard_parameters=SHARD, shard_optimizer=SHARD, reshard_after="step")
    assert limit_of(whole, "torchtitan") == ""


def test_schedules_that_a_framework_lacks_are_reported() -> None:
    assert limit_of(Plan(Mesh(pp=8), schedule="zb-h1")) == "nanotron has no pipeline schedule zb-h1; give 1f1b or gpipe"
    assert limit_of(Plan(DATA, schedule="zb-h1")) == "", "one pipeline rank has no schedule"
    assert "megatron-core has no pipeline schedule dualpipe-v" in limit_of(
        Plan(Mesh(pp=4), "dualpipe-v"), "megatron-core"
    )


@pytest.mark.parametrize(("schedule", "runs"), [("1f1b", False), ("gpipe", True)])
def test_few_microbatches_are_a_limit_of_1f1b_alone(schedule: str, runs: bool) -> None:
    text = limit_of(Plan(Mesh(pp=4, dp_shard=2), schedule=schedule), microbatches=4)
    assert text == "" if runs else text.startswith("nanotron's 1f1b needs at least pp - 1 microbatches; with pp 4 give")


@pytest.mark.parametrize(
    ("recipe", "microbatches", "runs"),
    [("megatron-2022", 8, True), ("megatron-2022", 6, False), ("megatron-core", 6, True), ("megatron-core", 3, False)],
)
def test_interleaved_pipelines_of_megatron_want_whole_rounds_of_microbatches(
    recipe: str, microbatches: int, runs: bool
) -> None:
    plan = Plan(Mesh(pp=4), "interleaved-1f1b", stages_per_rank=2)
    assert (limit_of(plan, recipe, microbatches) == "") is runs


def test_old_interleaved_pipelines_have_three_ranks_and_equal_stages() -> None:
    plan = Plan(Mesh(pp=2), "interleaved-1f1b", stages_per_rank=2)
    assert "needs at least 3 pipeline ranks" in limit_of(plan, "megatron-2022")
    assert "8 blocks do not divide among 3 stages" in limit_of(Plan(Mesh(pp=3)), "megatron-2022", 9)
    assert limit_of(Plan(Mesh(pp=3)), "megatron-core", 9) == ""


@pytest.mark.parametrize(
    ("recipe", "recompute", "runs"),
    [
        ("nanotron", (0, 1, 2), False),
        ("nanotron", "full", True),
        ("torchtitan", "per-op", True),
        ("torchtitan", "every-2", True),
        ("torchtitan", (0, 1), False),
        ("megatron-core", "first-2", True),
        ("megatron-core", "uniform-2", True),
        ("megatron-core", "every-2", False),
        ("llm-foundry", (1, 3), True),
        ("megatron-core", "layernorm+moe_act", True),
        ("megatron-core", "minimal", False),
        ("torchtitan", "mlp", False),
        ("maxtext", "minimal", True),
        ("maxtext", "save_out_proj", True),
        ("maxtext", "first-2", False),
        ("colossalai", "first-2", True),
        ("colossalai", (0, 3), False),
        ("shardlab", (1, 3), True),
    ],
)
def test_recomputation_is_as_a_framework_has_it(recipe: str, recompute: Any, runs: bool) -> None:
    text = limit_of(Plan(Mesh(dp_shard=1), recompute=recompute), recipe)
    assert text == "" if runs else text.startswith(f"{recipe} has no")


def test_modules_that_a_model_lacks_are_reported() -> None:
    assert limit_of(Plan(recompute="mla_up_proj"), "megatron-core") == (
        "megatron-core recomputes mla_up_proj of latent attention alone, which this model lacks; leave it out"
    )


def test_colossalai_replicates_gemini_s_shards_alone_and_shards_over_context_ranks_too() -> None:
    mesh = Mesh(dp_replicate=2, dp_shard=4)
    assert limit_of(sharded(mesh, 3), "colossalai") == ""
    assert "no replicas of the shards of ZeRO-1" in limit_of(sharded(mesh, 1), "colossalai")
    context = sharded(Mesh(dp_shard=4, cp=2), 1, context="ulysses")
    assert "colossalai cuts over cp what" in limit_of(context, "colossalai")
    assert "needs at least pp microbatches" in limit_of(Plan(Mesh(pp=4)), "colossalai", microbatches=3)
    assert limit_of(Plan(Mesh(pp=4)), "colossalai", microbatches=4) == ""


def test_pipelines_of_maxtext_have_even_stages_and_whole_rounds_of_microbatches() -> None:
    assert "8 blocks do not divide among 3 stages" in limit_of(Plan(Mesh(pp=3), "gpipe"), "maxtext", 9)
    assert "needs multiple of pp microbatches" in limit_of(Plan(Mesh(pp=4), "gpipe"), "maxtext", 6)
    assert limit_of(Plan(Mesh(pp=4), "gpipe"), "maxtext", 8) == ""
    assert "maxtext cuts over cp what" in limit_of(sharded(Mesh(dp_shard=4, cp=2), 3), "maxtext")


def test_precisions_and_offloads_that_a_framework_lacks_are_reported() -> None:
    fp8 = find_precision("fp8-fp32-grads")
    assert limit_of(Plan(), "megatron-2022", precision=fp8) == (
        "megatron-2022 does not train in fp8; give --precision fp16 or bf16 or fp32"
    )
    assert limit_of(Plan(), "torchtitan", precision=fp8) == ""
    assert "torchtitan does not offload activations" in limit_of(
        Plan(), "torchtitan", passes="offload=activations:host"
    )
    assert limit_of(Plan(), "torchtitan", passes="offload=optimizer:host,copy-early") == ""


@pytest.mark.parametrize("name", recipes())
def test_every_capability_of_a_recipe_has_a_source(name: str) -> None:
    recipe = recipes()[name]
    empty = CanRun()
    set_fields = [field for field, value in vars(recipe.can_run).items() if value != getattr(empty, field)]
    assert all(recipe.figures[f"can_run.{field}"].source for field in set_fields)
    assert recipe.defaults.zero_stage in recipe.can_run.stages_of_zero(1)


def test_an_unknown_condition_on_microbatches_is_refused() -> None:
    recipe = Recipe(name="own", can_run=CanRun(microbatches={"1f1b": ("many",)}))
    with pytest.raises(UserError, match=r"can_run\.microbatches has 'many'; give one of at least pp - 1"):
        limit_of(Plan(Mesh(pp=2)), recipe)

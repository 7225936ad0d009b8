"""What a recipe does to a step: each of its choices, alone, in the direction that it stands for."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardlab.hardware import find_cluster
from shardlab.models import GPT, Llama
from shardlab.models.kept import SavedActivations
from shardlab.predict.estimate import Estimate
from shardlab.predict.held import held_memory
from shardlab.predict.recipe import OWN, Recipe, find_recipe, recipes
from shardlab.predict.workload import Workload
from shardlab.program import Mesh, UserError
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan

PLAN = Plan(Mesh(pp=2, dp_shard=4, tp=2), "1f1b", shard_optimizer=("dp_shard",))
"""With messages, and collectives inside a node and between nodes."""


def step(recipe: Recipe, model: GPT | Llama | None = None, plan: Plan = PLAN, cluster: str = "h100x16") -> Estimate:
    model = model or GPT(layers=4, hidden_size=1024, heads=16, seq_len=1024, vocab_size=50304)
    return Workload(plan, model, find_cluster(cluster), 16, 1, find_precision("bf16"), recipe=recipe).estimate()


LONGER: dict[str, Recipe] = {
    "attention": Recipe(attention="flash1"),
    "memory_traffic": Recipe(memory_traffic={"layer_norm": (3.0, 3.0)}),
    "blocking_p2p": Recipe(blocking_p2p=1.0),
    "allreduce_sharded_gradients": Recipe(allreduce_sharded_gradients=True),
    "single_nic": Recipe(single_nic=True),
    "contention": Recipe(contention=0.5),
    "update_bytes": Recipe(update_bytes=200.0),
}
SHORTER: dict[str, Recipe] = {
    "fused_accumulation": Recipe(fused_accumulation=True),
    "overlap": Recipe(overlap={"tp": 0.5}),
    "scatter_gather_p2p": Recipe(scatter_gather_p2p=True),
    "sends_residual_only": Recipe(sends_residual_only=True),
    "bucket_bytes": Recipe(bucket_bytes=400e6),
}
MEMORY: dict[str, Recipe] = {
    "saved": Recipe(saved=SavedActivations(branch=False)),
    "logit_bytes": Recipe(logit_bytes=14.0),
    "sliced_logit_bytes": Recipe(logit_bytes=4.0, sliced_logit_bytes=18.0),
    "half_gradients": Recipe(half_gradients=True),
}
ELSEWHERE = {"cp_imbalance"}
"""What needs another mesh to matter, and has a test of its own."""


@pytest.mark.parametrize("field", LONGER)
def test_what_costs_time_makes_the_step_longer_and_leaves_memory_alone(field: str) -> None:
    changed, own = step(LONGER[field]), step(OWN)
    assert changed.step > own.step
    assert changed.peak.bytes == own.peak.bytes


@pytest.mark.parametrize("field", SHORTER)
def test_what_saves_time_makes_the_step_shorter_and_leaves_memory_alone(field: str) -> None:
    changed, own = step(SHORTER[field]), step(OWN)
    assert changed.step < own.step
    assert changed.peak.bytes == own.peak.bytes


HELD = {
    "gradient_buffer": Recipe(gradient_buffer=True),
    "stream_memory": Recipe(stream_memory=True),
    "reserved": Recipe(reserved=1.2),
    "context_bytes": Recipe(context_bytes=2.0**30),
}
"""What a GPU holds beyond the peak of a replay."""

DEFAULTS = {
    *("vocab_size", "pads_vocab", "bias", "dropout", "gradient_bytes", "bf16_gradient_bytes", "reduce_at", "zero_stage")
}
"""What a published run is taken to use where it does not say (`tests/published/test_reading.py`)."""


def test_every_field_that_says_what_is_done_is_tried() -> None:
    tried = {field.name for field in fields(Recipe)} - {"name", "source", "fitted_to"}
    assert tried == {*LONGER, *SHORTER, *MEMORY, *ELSEWHERE, *HELD, *DEFAULTS}


@pytest.mark.parametrize("field", HELD)
def test_a_gpu_holds_more_than_the_replay_counts(field: str) -> None:
    axes = ("dp_shard",) if field == "stream_memory" else ()
    plan = Plan(Mesh(dp_shard=2), shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes)
    model = GPT(layers=4, hidden_size=256, heads=4, seq_len=1024, vocab_size=1024)
    workload = Workload(plan, model, find_cluster("h100x2"), 2, 1, find_precision("bf16"))
    peaks = workload.estimate().peaks
    own, more = held_memory(workload, peaks), held_memory(replace(workload, recipe=HELD[field]), peaks)
    assert own.allocated == own.reserved == own.total == max(peak.bytes for peak in peaks)
    assert more.total > own.total
    assert (more.allocated > own.allocated) == (field == "gradient_buffer")


def test_what_is_not_kept_lowers_the_peak_and_takes_no_time() -> None:
    changed, own = step(MEMORY["saved"]), step(OWN)
    assert changed.peak.bytes < own.peak.bytes
    assert changed.step == own.step


def test_a_loss_that_holds_more_for_each_logit_has_a_higher_peak() -> None:
    """Logits and their gradient of 2 bytes each make 4; of so small a model they are the peak."""
    model = GPT(layers=1, hidden_size=32, heads=2, seq_len=256, vocab_size=50304)
    peaks = [step(Recipe(logit_bytes=bytes), model, Plan(Mesh()), "h100x1").peak.bytes for bytes in (None, 4.0, 14.0)]
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[1] == (14 - 4) * 256 * 50304


def test_a_loss_of_sliced_logits_may_hold_more_of_each() -> None:
    model = GPT(layers=1, hidden_size=32, heads=2, seq_len=256, vocab_size=50304)
    tensor, single = Plan(Mesh(tp=2)), Plan(Mesh())
    whole, sliced = Recipe(logit_bytes=4.0), MEMORY["sliced_logit_bytes"]
    more = step(sliced, model, tensor, "h100x2").peak.bytes - step(whole, model, tensor, "h100x2").peak.bytes
    assert more == (18 - 4) * 256 * 50304 / 2
    assert step(sliced, model, single, "h100x1").peak.bytes == step(whole, model, single, "h100x1").peak.bytes


@pytest.mark.parametrize(("precision", "bytes"), [("bf16-fp32-grads", 2), ("bf16", 0)])
def test_half_gradients_stay_beside_their_float32_sum_and_nowhere_else(precision: str, bytes: int) -> None:
    model = GPT(layers=2, hidden_size=256, heads=4, seq_len=16, vocab_size=512)

    def gradients(recipe: Recipe) -> int:
        workload = Workload(Plan(Mesh()), model, find_cluster("h100x1"), 1, 1, find_precision(precision))
        return replace(workload, recipe=recipe).estimate().peak.by_category["gradients"]

    own = gradients(OWN)
    assert gradients(MEMORY["half_gradients"]) == own * (4 + bytes) // 4


def test_without_balance_the_busiest_context_parallel_rank_attends_longer() -> None:
    plan = Plan(Mesh(cp=2), context="all_gather")
    changed, own = step(Recipe(cp_imbalance=1.0), plan=plan), step(OWN, plan=plan)
    assert changed.step > own.step
    assert changed.peak.bytes == own.peak.bytes
    assert step(Recipe(cp_imbalance=1.0)).step == step(OWN).step, "nobody is context-parallel"


def test_a_message_is_scattered_only_among_ranks_that_have_the_same() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=8), "1f1b")
    assert step(SHORTER["scatter_gather_p2p"], plan=plan).step == step(OWN, plan=plan).step


def test_what_is_hidden_is_hidden_on_its_axis_alone() -> None:
    assert step(Recipe(overlap={"ep": 0.9})).step == step(OWN).step


def test_what_is_computed_again_every_second_product_takes_time_and_saves_memory() -> None:
    changed, own = step(Recipe(saved=SavedActivations(per_op=True)), LLAMA), step(OWN, LLAMA)
    assert changed.step > own.step
    assert changed.peak.bytes < own.peak.bytes


LLAMA = Llama(layers=4, hidden_size=1024, heads=16, kv_heads=8, ffn_hidden_size=2816, seq_len=1024, vocab_size=32000)


def test_every_recipe_says_where_it_is_from_and_what_it_was_fitted_to() -> None:
    names = {field.name for field in fields(Recipe)}
    for name, recipe in recipes().items():
        assert recipe.name == name
        assert len(recipe.source) > 20
        assert recipe.fitted_to.keys() <= names
        assert all(getattr(recipe, field) != getattr(OWN, field) for field in recipe.fitted_to)
        for field in ("overlap", "contention", "reserved", "context_bytes", "single_nic", "cp_imbalance"):
            assert getattr(recipe, field) == getattr(OWN, field) or field in recipe.fitted_to, (name, field)


def test_a_recipe_has_all_that_its_base_has_but_what_it_changes() -> None:
    base, changed = find_recipe("Megatron-2021"), find_recipe("megatron-2022")
    differing = {field.name for field in fields(Recipe) if getattr(base, field.name) != getattr(changed, field.name)}
    assert differing == {"name", "source", "fitted_to", "fused_accumulation", "overlap"}
    assert find_recipe("torchtitan").fitted_to == find_recipe("torchtitan-eager").fitted_to


def test_traffic_is_written_as_what_is_moved_over_what_one_kernel_moves() -> None:
    assert find_recipe("megatron-2021").memory_traffic["residual"] == (3.5 / 4, 2.5 / 6)
    eager, autocast = find_recipe("llm-foundry").memory_traffic, find_recipe("nanogpt").memory_traffic
    assert {name for name in autocast if autocast[name] != eager.get(name)} == {"layer_norm", "residual"}


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no recipe 'megatron-cor'; did you mean megatron-core\?"):
        find_recipe("megatron-cor")

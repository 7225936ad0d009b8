"""What a recipe does to a step: each of its choices, alone, in the direction that it stands for."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.language import Mesh, UserError
from shardlab.language.precision import find_precision
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.models.matrices import SavedActivations
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.estimate import Estimate
from shardlab.simulate.predict.memory import device_memory
from shardlab.simulate.predict.recipe import (
    GROUPS,
    Recipe,
    find_recipe,
    recipes,
    variants,
)
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

PLAIN = Recipe()
"""Fused kernels, and nothing held beyond tensors."""

SHARDED = ("shard_parameters", "shard_gradients", "shard_optimizer")

PLAN = Plan(Mesh(pp=2, dp_shard=4, tp=2), "1f1b", shard_optimizer=("dp_shard",))
"""With messages, and collectives inside a node and between nodes."""


def step(recipe: Recipe, model: Blocks | None = None, plan: Plan = PLAN, cluster: str = "h100x16") -> Estimate:
    model = model or GPT(layers=4, hidden_size=1024, heads=16, seq_len=1024, vocab_size=50304)
    return Workload(plan, model, find_cluster(cluster), 16, 1, find_precision("bf16"), recipe=recipe).estimate()


def with_(**fields: Any) -> Recipe:
    """Fused kernels and nothing else, but for these fields, each in its group."""
    groups = {name: getattr(PLAIN, name) for name in GROUPS}
    for name, value in fields.items():
        (group,) = (group for group in GROUPS if hasattr(groups[group], name))
        groups[group] = replace(groups[group], **{name: value})
    return Recipe(**groups)


LONGER: dict[str, Recipe] = {
    "attention": with_(attention="flash1"),
    "memory_traffic": with_(memory_traffic={"layer_norm": (3.0, 3.0)}),
    "blocking_p2p": with_(blocking_p2p=1.0),
    "allreduce_sharded_gradients": with_(allreduce_sharded_gradients=True),
    "single_nic": with_(single_nic=True),
    "contention": with_(contention=0.5),
    "update_bytes": with_(update_bytes=200.0),
    "host_seconds": with_(host_seconds=1e-3),
    "piped_host_seconds": with_(piped_host_seconds=1e-4),
    "gathered_copy_seconds": with_(gathered_copy_seconds=1e-5),
    "step_seconds": with_(step_seconds=0.1),
    "tp_seconds": with_(tp_seconds=1e-4),
    "tp_traffic": with_(tp_traffic=1.75),
}
SHORTER: dict[str, Recipe] = {
    "fused_accumulation": with_(fused_accumulation=True),
    "share": with_(share={"tp": 0.5}),
    "scatter_gather_p2p": with_(scatter_gather_p2p=True),
    "sends_residual_only": with_(sends_residual_only=True),
    "bucket_bytes": with_(bucket_bytes=400e6),
    "gathered_bytes": with_(gathered_bytes=4e9),
}
MEMORY: dict[str, Recipe] = {
    "saved": with_(saved=SavedActivations(branch=False)),
    "logit_bytes": with_(logit_bytes=14.0),
    "sliced_logit_bytes": with_(logit_bytes=4.0, sliced_logit_bytes=18.0),
    "half_gradients": with_(half_gradients=True),
}
ELSEWHERE = {
    "fused_dropout",
    "sharded_share",
    *("cp_imbalance", "kept_when_full", "gathers_held_back", "margin_bytes", "logs_first_rank", "shards_in_copy"),
    *("whole_embedding", "whole_piped_head", "router_graph_bytes"),
    *("gathers_logits", "tp_context_bytes", "expert_load", "expert_loop", "dropless_slots", "padded_slots"),
}
"""What needs another mesh or little room to matter, and has a test of its own."""


@pytest.mark.parametrize("field", LONGER)
def test_what_costs_time_makes_the_step_longer_and_leaves_memory_alone(field: str) -> None:
    changed, plain = step(LONGER[field]), step(PLAIN)
    assert changed.step > plain.step
    assert changed.peak.bytes == plain.peak.bytes


@pytest.mark.parametrize("field", SHORTER)
def test_what_saves_time_makes_the_step_shorter_and_leaves_memory_alone(field: str) -> None:
    changed, plain = step(SHORTER[field]), step(PLAIN)
    assert changed.step < plain.step
    assert changed.peak.bytes == plain.peak.bytes


HELD = {
    "gradient_buffer": with_(gradient_buffer=True),
    "stream_memory": with_(stream_memory=True),
    "reserved": with_(reserved=1.2),
    "context_bytes": with_(context_bytes=2.0**30),
}
"""What a GPU holds beyond the peak of a replay."""

DEFAULTS = {
    *(
        "vocab_size",
        "pads_vocab",
        "bias",
        "dropout",
        "gradient_bytes",
        "bf16_gradient_bytes",
        "reduce_at",
        "gradient_sync",
        "zero_stage",
    ),
    *("sharded_reduce_at", "stages", "recompute"),
}
"""What a published run is taken to use where it does not say (`tests/planner/published/test_reading.py`)."""


def test_every_field_that_says_what_is_done_is_tried() -> None:
    """What a framework can run changes no step (see `test_limits`), and the error is the prediction's."""
    groups = {name: group for name, group in GROUPS.items() if name != "can_run"}
    field_names = {field.name for group in groups.values() for field in fields(group)} - {"error"}
    assert field_names == {*LONGER, *SHORTER, *MEMORY, *ELSEWHERE, *HELD, *DEFAULTS}


@pytest.mark.parametrize("field", HELD)
def test_a_gpu_holds_more_than_the_replay_counts(field: str) -> None:
    axes = ("dp_shard",) if field == "stream_memory" else ()
    plan = Plan(Mesh(dp_shard=2), shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes)
    model = GPT(layers=4, hidden_size=256, heads=4, seq_len=1024, vocab_size=1024)
    workload = Workload(plan, model, find_cluster("h100x2"), 2, 1, find_precision("bf16"), recipe=PLAIN)
    peaks = workload.estimate().peaks
    plain, larger = device_memory(workload, peaks), device_memory(replace(workload, recipe=HELD[field]), peaks)
    assert plain.allocated == plain.reserved == plain.total == max(peak.bytes for peak in peaks)
    assert larger.total > plain.total
    assert (larger.allocated > plain.allocated) == (field == "gradient_buffer")


def test_what_is_not_kept_lowers_the_peak_and_takes_no_time() -> None:
    changed, plain = step(MEMORY["saved"]), step(PLAIN)
    assert changed.peak.bytes < plain.peak.bytes
    assert changed.step == plain.step


def test_what_is_copied_is_kept_twice_and_takes_no_time() -> None:
    changed, plain = step(with_(saved=SavedActivations(copied=True)), LLAMA), step(PLAIN, LLAMA)
    assert changed.peak.bytes > plain.peak.bytes
    assert changed.step == plain.step


def test_a_loss_that_holds_more_for_each_logit_has_a_higher_peak() -> None:
    """Logits and their gradient of 2 bytes each make 4; of so small a model they are the peak."""
    model = GPT(layers=1, hidden_size=32, heads=2, seq_len=256, vocab_size=50304)
    peaks = [step(with_(logit_bytes=bytes), model, Plan(Mesh()), "h100x1").peak.bytes for bytes in (None, 4.0, 14.0)]
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[1] == (14 - 4) * 256 * 50304


def test_a_loss_of_sliced_logits_may_hold_more_of_each() -> None:
    model = GPT(layers=1, hidden_size=32, heads=2, seq_len=256, vocab_size=50304)
    tensor, single = Plan(Mesh(tp=2)), Plan(Mesh())
    whole, sliced = with_(logit_bytes=4.0), MEMORY["sliced_logit_bytes"]
    extra_bytes = step(sliced, model, tensor, "h100x2").peak.bytes - step(whole, model, tensor, "h100x2").peak.bytes
    assert extra_bytes == (18 - 4) * 256 * 50304 / 2
    assert step(sliced, model, single, "h100x1").peak.bytes == step(whole, model, single, "h100x1").peak.bytes


@pytest.mark.parametrize(("precision", "bytes"), [("bf16-fp32-grads", 2), ("bf16", 0)])
def test_half_gradients_stay_beside_their_float32_sum_and_nowhere_else(precision: str, bytes: int) -> None:
    model = GPT(layers=2, hidden_size=256, heads=4, seq_len=16, vocab_size=512)

    def gradients(recipe: Recipe) -> int:
        workload = Workload(Plan(Mesh()), model, find_cluster("h100x1"), 1, 1, find_precision(precision))
        return replace(workload, recipe=recipe).estimate().peak.by_category["gradients"]

    plain = gradients(PLAIN)
    assert gradients(MEMORY["half_gradients"]) == plain * (4 + bytes) // 4


def test_without_balance_the_busiest_context_parallel_rank_attends_longer() -> None:
    plan = Plan(Mesh(cp=2), context="all_gather")
    changed, plain = step(with_(cp_imbalance=1.0), plan=plan), step(PLAIN, plan=plan)
    assert changed.step > plain.step
    assert changed.peak.bytes == plain.peak.bytes
    assert step(with_(cp_imbalance=1.0)).step == step(PLAIN).step, "nobody is context-parallel"


def test_a_message_is_scattered_only_among_ranks_that_have_the_same() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=8), "1f1b")
    assert step(SHORTER["scatter_gather_p2p"], plan=plan).step == step(PLAIN, plan=plan).step


def test_a_pipeline_on_one_node_or_without_tensor_parallelism_has_the_host_of_other_plans() -> None:
    piped = LONGER["piped_host_seconds"]
    for plan in (Plan(Mesh(pp=2, tp=4)), Plan(Mesh(pp=2, dp_shard=8)), Plan(Mesh(dp_shard=2, tp=8))):
        assert step(piped, plan=plan).step == step(PLAIN, plan=plan).step


def test_each_rank_s_slice_of_each_parameter_is_copied_once_it_is_gathered_after_the_update() -> None:
    copying, model = (
        with_(gathered_copy_seconds=1.0),
        GPT(layers=2, hidden_size=64, heads=2, seq_len=64, vocab_size=512),
    )

    def seconds(plan: Plan) -> float:
        workload = replace(Workload(plan, model, find_cluster("h100x8"), 8, 1, find_precision("bf16")), recipe=copying)
        assert workload.estimate().seconds_outside_ops == workload.seconds_outside_ops, (
            "so that forecasts and replays have the same"
        )
        return workload.seconds_outside_ops

    shard = ("dp_shard",)
    assert seconds(Plan(Mesh(dp_shard=8), shard_optimizer=shard)) == 8 * model.parameter_tensors
    assert seconds(Plan(Mesh(pp=2, dp_shard=4), shard_optimizer=shard)) == 4 * model.parameter_tensors / 2
    assert seconds(Plan(Mesh(dp_shard=8))) == 0
    assert seconds(Plan(Mesh(dp_shard=8), shard_parameters=shard, shard_optimizer=shard)) == 0


def test_what_is_hidden_is_hidden_on_its_axis_alone() -> None:
    assert step(with_(share={"ep": 0.9})).step == step(PLAIN).step


def test_communication_of_sharded_gradients_may_be_hidden_alone() -> None:
    hidden, axes = with_(sharded_share={"dp_shard": 0.9}), dict.fromkeys(SHARDED, ("dp_shard",))
    assert step(hidden).step == step(PLAIN).step, "which shards the optimizer's state alone"
    plan = replace(PLAN, **axes)
    assert step(hidden, plan=plan).step < step(PLAIN, plan=plan).step


def test_sharded_gradients_are_reduced_to_their_shards_in_every_framework() -> None:
    axes = dict.fromkeys(SHARDED[1:], ("dp_shard",))
    plan = replace(PLAN, **axes)
    assert step(LONGER["allreduce_sharded_gradients"], plan=plan).step == step(PLAIN, plan=plan).step


def test_what_is_computed_again_every_second_product_takes_time_and_saves_memory() -> None:
    changed, plain = step(with_(saved=SavedActivations(again="per-op")), LLAMA), step(PLAIN, LLAMA)
    assert changed.step > plain.step
    assert changed.peak.bytes < plain.peak.bytes


LLAMA = Llama(layers=4, hidden_size=1024, heads=16, kv_heads=8, ffn_hidden_size=2816, seq_len=1024, vocab_size=32000)


FITTED = (
    *("overlap.share", "overlap.sharded_share", "overlap.contention", "overlap.single_nic", "kernels.cp_imbalance"),
    *("memory.reserved", "memory.context_bytes", "memory.kept_when_full"),
    *("kernels.host_seconds", "kernels.piped_host_seconds", "kernels.gathered_copy_seconds", "kernels.step_seconds"),
    "overlap.tp_seconds",
    *("memory.gathers_held_back", "memory.margin_bytes"),
    *("kernels.expert_load", "kernels.padded_slots", "memory.tp_context_bytes"),
)
"""Figures that no framework's code or paper gives."""

TOLD = {("megatron-core-tuned", "kernels.expert_load"), ("megatron-core-tuned", "memory.tp_context_bytes")}
"""Such figures that one framework's code gives."""

FITTED_IN_ONE = {("nanotron", "memory.logit_bytes")}
"""Recipes and their figures that a framework's code tells of others, but does not settle here."""


def test_every_figure_has_a_source_and_says_what_it_was_fitted_to_or_that_it_is_assumed() -> None:
    for name, recipe in recipes().items():
        assert recipe.name == name
        assert len(recipe.source) > 20
        for key, figure in recipe.figures.items():
            group, _, field = key.partition(".")
            assert getattr(getattr(recipe, group), field) == figure.value, "what is told is what is used"
            assert figure.source, (name, key)
            open = (key in FITTED and (name, key) not in TOLD) or (name, key) in FITTED_IN_ONE
            assert bool(figure.fitted_to or figure.assumed) == open, (name, key)
            assert not (figure.fitted_to and figure.assumed), (name, key)


def test_every_framework_holds_cudas_context() -> None:
    """Room for which must be there wherever a step is said to fit."""
    assert {name for name, recipe in recipes().items() if recipe.memory.context_bytes < 2**30} == set()


def test_a_recipe_has_all_that_its_base_has_but_what_it_changes() -> None:
    base, changed = find_recipe("Megatron-2021"), find_recipe("megatron-2022")
    figures = {key: figure for key, figure in changed.figures.items() if not key.startswith("can_run.")}
    differing = {key for key in figures if figures[key] != base.figures.get(key)}
    assert differing == {"kernels.fused_accumulation", "overlap.share"}
    assert changed.figures["memory.logit_bytes"].source == base.source, "its base's figures keep their source"
    reserved = find_recipe("torchtitan").figures["memory.reserved"]
    assert reserved == find_recipe("fsdp2").figures["memory.reserved"]


def test_of_a_table_a_recipe_changes_what_it_names() -> None:
    """Of memory traffic its kernels, of what is kept its choices."""
    base, changed = find_recipe("fsdp2"), find_recipe("torchtitan")
    assert changed.kernels.memory_traffic["layer_norm"] == base.kernels.memory_traffic["layer_norm"]
    assert changed.kernels.memory_traffic["cross_entropy"] == (8, 2.5)
    assert changed.kernels.memory_traffic["swiglu"] == (1, 1)
    assert base.memory.saved.activated
    assert changed.memory.saved == SavedActivations(branch=False)


def test_traffic_is_written_as_what_is_moved_over_what_one_kernel_moves() -> None:
    assert find_recipe("megatron-2021").kernels.memory_traffic["residual"] == (3.5 / 4, 2.5 / 6)
    eager, autocast = (find_recipe(name).kernels.memory_traffic for name in ("llm-foundry", "nanogpt"))
    assert {name for name in autocast if autocast[name] != eager.get(name)} == {"layer_norm", "residual"}


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no recipe 'megatron-cor'; did you mean megatron-core\?"):
        find_recipe("megatron-cor")


def test_a_recipe_of_ones_own_is_a_file(tmp_path: Path) -> None:
    """It says what its base does not, with the runs that a figure was fitted to."""
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "megatron-core"\nsource = "our branch"\n[kernels]\nupdate_bytes = 40\n'
        '[memory.reserved]\nvalue = 1.1\nfitted_to = "our runs"\nruns = ["ours-*"]\n'
    )
    recipe, base = find_recipe(str(path)), find_recipe("megatron-core")
    assert recipe.name == "ours"
    assert recipe == replace(
        base,
        name="ours",
        source="our branch",
        kernels=replace(base.kernels, update_bytes=40),
        memory=replace(base.memory, reserved=1.1),
    )
    assert recipe.figures["memory.reserved"].runs == ("ours-*",)


def test_a_base_lies_beside_its_recipe_and_is_no_recipe_that_builds_on_it(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('base = "common.toml"\nsource = "our branch"\n')
    (tmp_path / "common.toml").write_text('source = "our code"\n[kernels]\nupdate_bytes = 40\n')
    assert find_recipe(str(tmp_path / "ours.toml")).kernels.update_bytes == 40
    (tmp_path / "common.toml").write_text('base = "ours.toml"\nsource = "our code"\n')
    with pytest.raises(UserError, match=r"ours.toml builds on .*common.toml builds on .*, which is being read"):
        find_recipe(str(tmp_path / "ours.toml"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('source = "s"\nswitches.a.default = "on"', "switches.a.default is 'on'; give one of its values"),
        ('source = "s"\nswitches.a.values.on = {}', "switches.a.values.on gives no source"),
        ("", "gives no source; say in quotes where the framework's behaviour is described"),
        ("memori = 1", "ours.toml has no 'memori'; did you mean memory?"),
        ('source = "s"\nmemory = 1', "memory is 1; give a table"),
        ('base = "megatron-cor"\nsource = "s"', "there is no recipe 'megatron-cor'; did you mean megatron-core?"),
        ('source = "s"\nmemory.reservd = 1.1', "memory has no 'reservd'; did you mean reserved?"),
        ('source = "s"\nmemory.reserved = "much"', "memory.reserved is 'much'; give a number, 0 or more"),
        (
            'source = "s"\nmemory.reserved = {value = 1.1, fited_to = ""}',
            "reserved has no 'fited_to'; did you mean",
        ),
        ('source = "s"\nmemory.reserved = {value = 1.1, runs = "a"}', "reserved.runs is 'a'; give a list"),
        ('source = "s"\nmemory.gradient_buffer = 1', "memory.gradient_buffer is 1; give true or false"),
        ('source = "s"\nmemory.saved = {brunch = true}', "memory.saved has no 'brunch'; did you mean branch?"),
        ('source = "s"\noverlap.share.tp = -1', "overlap.share.tp is -1; give a number, 0 or more"),
        ('source = "s"\nkernels.memory_traffic.bias = [1]', "memory_traffic.bias is [1]; give two numbers or ratios"),
        ('source = "s"\nkernels.memory_traffic.norm = "12"', "norm is '12'; give two numbers or ratios"),
        ('source = "s"\nkernels.memory_traffic.norm = [-3, 1]', "norm is [-3, 1]; give two numbers or ratios"),
        ('source = "s"\nkernels.memory_traffic.norm = [1, "nan"]', "norm is [1, 'nan']; give two numbers or ratios"),
        ('source = "s"\nkernels.attention = "falsh2"', "attention is 'falsh2'; give one of flash1, flash2, cudnn"),
        ('source = "s"\ndefaults.reduce_at = "never"', "defaults.reduce_at is 'never'; give one of layer, step"),
    ],
)
def test_what_a_recipe_cannot_say_is_refused_in_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_recipe(str(path))


# What needs tensor parallelism or a mixture to matter.

SLICED = Plan(Mesh(tp=4), sequence_parallel=True)


def test_a_whole_embedding_on_each_rank_is_held_and_updated_by_each() -> None:
    """Of 1/4 on each of four ranks, 3/4 more; with AdamW in bf16 a parameter, its gradient and state take 16 bytes."""
    whole, sliced = (step(with_(whole_embedding=is_whole), LLAMA, SLICED, "h100x4") for is_whole in (True, False))
    extra_parameters = LLAMA.vocab_size * LLAMA.hidden_size * 3 // 4
    assert [whole.peak.by_category[name] - sliced.peak.by_category[name] for name in ("parameters", "optimizer")] == [
        2 * extra_parameters,
        12 * extra_parameters,
    ]
    assert whole.step > sliced.step
    alone = Plan(Mesh(dp_shard=4))
    assert step(with_(whole_embedding=True), LLAMA, alone).step == step(PLAIN, LLAMA, alone).step


def test_a_whole_head_on_each_rank_of_a_pipeline_computes_all_logits() -> None:
    """On the last stage, and only with a pipeline; a rank of its mesh otherwise computes half of the logits."""
    pipeline, cluster = Plan(Mesh(pp=2, tp=2), "1f1b"), "h100x4"
    whole, sliced = (step(with_(whole_piped_head=is_whole), LLAMA, pipeline, cluster) for is_whole in (True, False))
    tokens = 16 * LLAMA.seq_len
    products = 3 * 2.0 * tokens * LLAMA.hidden_size * LLAMA.vocab_size / 2
    assert whole.step - sliced.step > products / find_cluster(cluster).device.peak("bfloat16")
    assert whole.peaks[0].bytes == sliced.peaks[0].bytes
    assert whole.peaks[1].bytes > sliced.peaks[1].bytes
    assert step(with_(whole_piped_head=True), LLAMA, SLICED, cluster).step == step(PLAIN, LLAMA, SLICED, cluster).step


def test_a_pipelines_last_stage_holds_all_logits_that_each_of_its_ranks_computes() -> None:
    """Of each microbatch, and once more where they are joined; a slice of them if they are cut."""
    shard = ("dp_shard",)
    plan = Plan(Mesh(pp=2, tp=2, dp_shard=2), "1f1b", shard_parameters=shard, shard_optimizer=shard)
    allocated_bytes = {
        field: device_memory(
            Workload(
                plan, LLAMA, find_cluster("h100x8"), 8, 1, find_precision("bf16"),
                recipe=with_(stream_memory=True, logit_bytes=4.0, **{field: True} if field else {}),
            )
        ).allocated
        for field in ("", "whole_piped_head", "gathers_logits")
    }  # fmt: skip
    logits = 2.0 * LLAMA.seq_len * LLAMA.vocab_size
    assert allocated_bytes["whole_piped_head"] - allocated_bytes[""] >= 2 * 4 * logits / 2
    assert allocated_bytes["gathers_logits"] - allocated_bytes[""] >= 2 * 4 * logits / 2


def test_the_graph_before_a_router_stays_if_a_block_was_recomputed() -> None:
    recipe, plan = with_(router_graph_bytes=30.0), Plan(Mesh(dp_shard=2), recompute="full")
    graph_bytes = 30 * 3 * MIXTURE.seq_len * MIXTURE.hidden_size  # of a block and a microbatch of three sequences
    dense = replace(LLAMA, layers=MIXTURE.layers)
    for model, model_plan, expected in (
        (MIXTURE, plan, (MIXTURE.layers - 1) * graph_bytes),
        (MIXTURE, replace(plan, recompute="none"), 0),
        (dense, plan, 0),
    ):
        work = Workload(model_plan, model, find_cluster("h100x2"), 2, 3, find_precision("bf16"), recipe=recipe)
        plain = device_memory(replace(work, recipe=PLAIN))
        assert device_memory(work).allocated - plain.allocated == expected


def test_all_logits_on_each_rank_take_as_much_more_memory_and_time() -> None:
    model = GPT(layers=2, hidden_size=256, heads=4, seq_len=1024, vocab_size=65536)
    sliced, whole = (
        step(with_(logit_bytes=8.0, gathers_logits=gathers), model, SLICED, "h100x4") for gathers in (False, True)
    )
    logits = 1024 * 65536 * 8
    assert whole.peak.bytes - sliced.peak.bytes == pytest.approx(logits * 3 / 4, rel=0.02)
    assert whole.step > sliced.step


def test_a_gpu_holds_more_with_tensor_parallelism_than_its_tensors_if_the_recipe_says_so() -> None:
    recipe, model = with_(tp_context_bytes=5e9, kept_when_full=0.5), GPT(layers=2, hidden_size=256, heads=4)
    for plan, extra_bytes in ((SLICED, 5e9), (Plan(Mesh(dp_shard=4)), 0.0)):
        work = Workload(plan, model, find_cluster("h100x4"), 4, 1, find_precision("bf16"), recipe=recipe)
        memory = device_memory(work)
        plain = device_memory(
            replace(work, recipe=replace(recipe, memory=replace(recipe.memory, tp_context_bytes=0.0)))
        )
        assert (memory.total - plain.total, memory.needed - plain.needed) == (extra_bytes, extra_bytes / 2)
        assert memory.allocated == plain.allocated


MIXTURE = Mixtral(
    layers=2, hidden_size=512, heads=4, ffn_hidden_size=1024, vocab_size=1024, seq_len=1024, experts=8, top_k=2,
    capacity_factor=None,
)  # fmt: skip


def test_a_framework_computes_on_the_slots_that_it_has() -> None:
    """Without a capacity factor on equal shares, or padded to the fullest expert whatever the factor is."""
    padded = find_recipe("fsdp2", {"experts": "padded"})
    slots = padded.kernels.padded_slots
    for recipe, factor, expected in (
        *((find_recipe("megatron-core"), None, 1.0), (find_recipe("megatron-core"), 1.25, 1.25)),
        *((padded, None, slots), (padded, 1.25, slots), (find_recipe("shardlab"), None, None)),
    ):
        model = recipe.model_as_run(replace(MIXTURE, capacity_factor=factor))
        assert isinstance(model, Mixtral)
        assert model.capacity_factor == expected


def test_ranks_wait_for_the_fullest_experts_only_with_expert_parallelism() -> None:
    model = replace(MIXTURE, capacity_factor=1.0)
    for plan, longer in ((Plan(Mesh(ep=4)), True), (Plan(Mesh(dp_shard=4)), False)):
        even, uneven = (step(with_(expert_load=load), model, plan, "h100x4").step for load in (1.0, 1.5))
        assert (uneven > even) == longer


def test_experts_one_after_the_other_take_longer_than_together() -> None:
    plan = Plan(Mesh(dp_shard=4))
    together, alone = (
        step(with_(expert_loop=loop), replace(MIXTURE, capacity_factor=1.0), plan, "h100x4").step
        for loop in (False, True)
    )
    assert alone > together


# Switches.

SWITCHED = """
source = "our code"
[kernels]
update_bytes = 40
[switches.attention]
default = "cudnn"
about = "the kernel of attention"
values.cudnn = { source = "ours", kernels = { attention = "cudnn" } }
values.flash2 = { source = "theirs", kernels = { attention = "flash2" }, memory = { logit_bytes = 6 } }
[switches.copies]
default = "off"
values.off = { source = "plain" }
values.on = { source = "more", memory = { context_bytes = 7 } }
"""


def test_a_switch_that_is_not_given_is_at_its_default(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(SWITCHED)
    recipe = find_recipe(str(path))
    assert recipe.kernels.attention == "cudnn"
    assert recipe.figures["kernels.attention"].source == "ours"
    assert (recipe.changed_switches, recipe.title) == ({}, "ours")


def test_a_switch_changes_what_its_value_says_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(SWITCHED)
    plain, changed = find_recipe(str(path)), find_recipe(str(path), {"attention": "flash2"})
    assert (changed.kernels.attention, changed.memory.logit_bytes) == ("flash2", 6)
    assert replace(changed.kernels, attention="cudnn") == plain.kernels
    assert changed.title == "ours with attention=flash2"
    assert {(name, value) for name, value, _ in variants(changed)} == {("attention", "cudnn"), ("copies", "on")}
    assert {variant.kernels.attention for name, _, variant in variants(changed) if name == "copies"} == {"flash2"}


def test_a_recipe_may_change_the_default_of_its_bases_switch_and_add_values(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(SWITCHED)
    path = tmp_path / "ours.toml"
    path.write_text(
        'base = "below.toml"\nsource = "a branch"\nswitches.attention.default = "flash1"\n'
        'switches.attention.values.flash1 = { source = "old", kernels = { attention = "flash1" } }'
    )
    assert find_recipe(str(path)).kernels.attention == "flash1"
    switched = find_recipe(str(path), {"attention": "flash2", "copies": "on"})
    assert (switched.kernels.attention, switched.memory.context_bytes) == ("flash2", 7)
    assert list(switched.switches["attention"].values) == ["cudnn", "flash2", "flash1"]


def test_figures_of_a_recipe_go_before_the_switches_of_its_base(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text(SWITCHED)
    path = tmp_path / "ours.toml"
    path.write_text('base = "below.toml"\nsource = "a branch"\nkernels.attention = "flash1"')
    assert find_recipe(str(path)).kernels.attention == "flash1"


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        ({"atention": "cudnn"}, "recipe ours has no switch 'atention'; did you mean attention?"),
        ({"attention": "flash3"}, "switch attention of recipe ours is 'flash3'; give one of cudnn, flash2"),
    ],
)
def test_an_unknown_switch_is_refused_in_a_sentence(switches: dict[str, str], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(SWITCHED)
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_recipe(str(path), switches)


def test_a_recipe_without_switches_says_so() -> None:
    with pytest.raises(UserError, match="recipe shardlab has no switches; leave out attention=cudnn"):
        find_recipe("shardlab", {"attention": "cudnn"})


def test_fused_attention_keeps_no_mask_of_its_dropout() -> None:
    model = GPT(layers=4, hidden_size=1024, heads=16, seq_len=1024, vocab_size=50304, dropout=0.1)
    fused, plain = with_(fused_dropout=True), PLAIN
    assert plain.model_as_run(model) == model
    steps = [step(recipe, recipe.model_as_run(model)) for recipe in (fused, plain)]
    assert steps[0].step < steps[1].step
    peak_bytes = [max(peak.bytes for peak in result.peaks) for result in steps]
    assert peak_bytes[0] < 0.8 * peak_bytes[1]
    assert fused.model_as_run(replace(model, dropout=0.0)).runs == replace(model, dropout=0.0).runs


@pytest.mark.parametrize(("name", "fused"), [("megatron-core", True), ("megatron-2021", False), ("shardlab", False)])
def test_frameworks_with_fused_attention_fuse_its_dropout(name: str, fused: bool) -> None:
    assert find_recipe(name).kernels.fused_dropout is fused

"""Published runs are read as they are written, and what they do not say is never made up."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.cli.step_request import StepRequest
from shardlab.language import Mesh, UserError
from shardlab.planner.published import reading
from shardlab.planner.published.reading import (
    BETWEEN,
    find_name,
    layers_per_stage,
    network_in,
    nics_in,
    read_run,
)
from shardlab.planner.published.records import GIB, Incomplete, RunRecord, read_figures, read_rows
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.recipe import Recipe, find_recipe

RUNS = Path(__file__).parent / "published_runs.json"
ROWS = {row["id"]: row for row in read_rows(RUNS)}


def changed(name: str, section: str, **fields: Any) -> dict[str, Any]:
    return ROWS[name] | {section: ROWS[name][section] | fields}


def test_every_run_of_the_table_names_its_source() -> None:
    assert all(row["source"] for row in ROWS.values())


def test_a_pipeline_is_read_with_its_stages_and_its_batch() -> None:
    run = read_run(ROWS["zb-t12-6.2B-p8-m8-1f1b"])
    assert run.plan.mesh == Mesh(pp=8)
    assert run.plan.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)
    assert (run.workload.micro_batch_size, run.rank_microbatches) == (3, 8)
    assert run.measured.memory == "allocated"


def test_a_schedule_that_a_search_found_is_taken_for_the_one_by_hand_that_holds_as_much() -> None:
    run = read_run(changed("zb-t12-6.2B-p8-m8-1f1b", "parallelism", schedule="zb-2p"))
    assert run.plan.schedule == "zb-h2"
    assert "schedule: zb-h2" in run.assumed


def test_sequence_parallel_selective_recomputation_is_read() -> None:
    run = read_run(ROWS["korthikanti-t5-22B-selective"])
    assert run.plan.sequence_parallel
    assert run.plan.recompute == "selective"
    assert run.workload.recipe.name == "megatron-2022"


def test_tokens_per_second_give_the_seconds_of_a_step() -> None:
    row: dict[str, Any] = ROWS["titan-t1-8B-8gpu-eager"] | {"derived": {}}
    assert read_figures(row).seconds == pytest.approx(16 * 8192 / (5762 * 8))
    assert read_figures(row).bytes == 82.4 * GIB


@pytest.mark.parametrize(
    ("section", "fields", "reason"),
    [
        ("batch", {"micro_batch": None}, "does not say micro_batch"),
        ("batch", {"global_sequences": 5}, "has 5 sequences, which 1 data-parallel ranks cannot take"),
        ("model", {"ffn_type": "tanh"}, "activation function that is unknown here, tanh"),
        ("hardware", {"device": "h1000"}, "there is no device 'h1000'; did you mean h100"),
        ("hardware", {"device": None, "gpu": "H1000"}, "an unknown GPU, H1000"),
        ("hardware", {"device": None}, "does not say device"),
        ("hardware", {"network": "infiniband-hd"}, "no link 'infiniband-hd'; did you mean infiniband-hdr"),
        ("parallelism", {"schedule": "1f2b"}, "schedule that is unknown here, 1f2b; did you mean 1f1b"),
        ("hardware", {"gpus": 16}, "a mesh of 8 ranks on 16 GPUs"),
        ("measured", {"iteration_s": -5}, "gives -5 as measured iteration_s; give a number above 0"),
        ("measured", {"iteration_s": None}, "neither the seconds of a step nor memory"),
    ],
)
def test_what_a_run_does_not_say_is_its_reason(section: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(Incomplete, match=reason):
        read_run(changed("korthikanti-t5-22B-full", section, **fields))


@pytest.mark.parametrize(
    ("word", "dtype"),
    [("fp16", "float16"), ("bf16", "bfloat16"), ("fp8", "float8"), ("fp32", "float32"), ("mxfp8", "mxfloat8")],
)
def test_a_precision_is_a_word(word: str, dtype: str) -> None:
    run = read_run(ROWS["korthikanti-t5-22B-full"] | {"precision": word})
    assert run.workload.precision.compute == dtype
    assert run.assumed == ()


@pytest.mark.parametrize("recipe", ["torchtitan", "megatron-core"])
def test_a_run_in_fp8_has_the_precision_of_simulate(recipe: str) -> None:
    """In both, the recipe decides in which dtype gradients are reduced."""
    run = read_run(ROWS["korthikanti-t5-22B-full"] | {"precision": "fp8"}, find_recipe(recipe))
    (precision,) = StepRequest(model="gpt2", cluster="h100x8", precision="fp8", recipe=recipe).precisions
    assert run.workload.precision == precision


@pytest.mark.parametrize(("dtype_name", "dtype"), [("fp32", "float32"), ("fp16", "float16")])
def test_gradients_are_reduced_in_the_dtype_that_a_run_says(dtype_name: str, dtype: str) -> None:
    assert read_run(ROWS["korthikanti-t5-22B-full"] | {"gradients": dtype_name}).workload.precision.gradients == dtype


def test_an_unknown_precision_is_a_reason() -> None:
    with pytest.raises(Incomplete, match="computes in int4, which is unknown here"):
        read_run(ROWS["korthikanti-t5-22B-full"] | {"precision": "int4"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 1000),
        ("pads_vocab", True),
        ("bias", True),
        ("dropout", 0.5),
        ("gradient_bytes", 8),
        ("bf16_gradient_bytes", 8),
        ("reduce_at", "step"),
        ("zero_stage", 1),
    ],
)
def test_what_a_run_does_not_say_is_as_in_its_recipe(field: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = changed("nanogpt-polaris-4xA100", "model", vocab=None) | {"precision": "bf16"}
    original = read_run(row).workload
    recipe = find_recipe("nanogpt")
    recipe = replace(recipe, defaults=replace(recipe.defaults, **{field: value}))

    def changed_recipe(_: RunRecord) -> Recipe:
        return recipe

    monkeypatch.setattr(reading, "recipe_of", changed_recipe)
    result = read_run(row).workload
    assert (result.model, result.precision, result.plan) != (original.model, original.precision, original.plan)


def test_an_unknown_framework_is_a_reason_with_the_nearest() -> None:
    with pytest.raises(Incomplete, match="no recipe 'megatron-cor'; did you mean megatron-core"):
        read_run(ROWS["korthikanti-t5-22B-full"] | {"framework": "megatron-cor"})


def test_an_unknown_recomputation_is_a_reason_with_the_nearest() -> None:
    with pytest.raises(Incomplete, match="recomputes selectiv, which is unknown here; did you mean selective"):
        read_run(ROWS["korthikanti-t5-22B-full"] | {"recompute": "selectiv"})


@pytest.mark.parametrize("recompute", ["layernorm+mlp", "save_out_proj"])
def test_parts_of_blocks_are_recomputed_as_a_plan_names_them(recompute: str) -> None:
    run = read_run(ROWS["korthikanti-t5-22B-full"] | {"recompute": recompute})
    assert run.plan.recompute == recompute
    assert not any("recompute" in assumption for assumption in run.assumed)


OLDER = {
    "source": "pytorch/torchtitan benchmarks",
    "hardware": {"gpu": "H100 SXM, 96 GB HBM2e", "gpus": 16, "gpus_per_node": 8, "interconnect": "8x NDR InfiniBand"},
    "precision": "bf16 (fp32 grad accumulation)",
    "recompute": "selective (per-op policy)",
}
"""How older files write what has fields of its own now."""


def test_names_that_stand_in_texts_are_assumed_and_every_one_is_reported() -> None:
    base: dict[str, Any] = ROWS["titan-t1-8B-8gpu-eager"]
    row = base | {"framework": None} | OLDER
    run = read_run(
        row | {"parallelism": base["parallelism"] | {"dp": 16}, "batch": {"global_sequences": 32, "micro_batch": 2}}
    )
    assert run.workload.recipe.name == "torchtitan"
    assert {
        "framework: torchtitan",
        "device: h100-96gb",
        "network: 8 x infiniband-ndr a node",
        "precision: bf16",
        "recompute: selective-per-op",
    } <= set(run.assumed)


@pytest.mark.parametrize(
    ("device", "zero_stage", "framework"),
    [
        ("a100-80gb", 0, "megatron-2021"),
        ("h100", 1, "megatron-core-tuned"),
        ("a100-80gb", 3, "deepspeed"),
        ("h100", 3, "fsdp2"),
    ],
)
def test_a_framework_that_nobody_names_is_the_usual_one_and_said(device: str, zero_stage: int, framework: str) -> None:
    row = changed("korthikanti-t5-22B-full", "hardware", device=device)
    row |= {"framework": None, "source": "a friend", "parallelism": row["parallelism"] | {"zero_stage": zero_stage}}
    assert f"framework: {framework}" in read_run(row).assumed
    assert not any("framework:" in phrase for phrase in read_run(row, find_recipe("megatron-2022")).assumed)


def test_a_network_that_is_called_by_its_family_is_that_of_its_cloud() -> None:
    """Not InfiniBand: 32 interfaces of EFA on a node of eight."""
    hardware = {"network": None, "nics": None, "interconnect": "NVLink intra-node; EFA inter-node", "gpus": 16}
    row = changed("korthikanti-t5-22B-full", "hardware", **hardware)
    batch = {"global_sequences": 8, "micro_batch": 4}
    run = read_run(row | {"parallelism": row["parallelism"] | {"dp": 2}, "batch": batch})
    assert "network: 32 x efa-100 a node" in run.assumed


def test_a_text_with_both_links_gives_the_network_and_its_nics() -> None:
    hardware = {"network": None, "nics": None, "interconnect": "NVLink3 intra-node; 4x HDR InfiniBand", "gpus": 16}
    row = changed("korthikanti-t5-22B-full", "hardware", **hardware)
    batch = {"global_sequences": 8, "micro_batch": 4}
    cluster = read_run(row | {"parallelism": row["parallelism"] | {"dp": 2}, "batch": batch}).workload.cluster
    assert (cluster.inter_node.name, cluster.nics) == ("infiniband-hdr", 4)


INSIDE = [
    "NVLink3 intra-node",
    "NVLink4",
    "PCIe5 inside a node",
    "NVSwitch, NVLink5",
    "Infinity Fabric 3",
    "8x NVLink3",
]


@given(st.sampled_from(BETWEEN), st.lists(st.sampled_from(INSIDE), max_size=2), st.integers(1, 16), st.booleans())
def test_a_network_between_nodes_is_never_a_link_inside_them(
    name: str, links: list[str], count: int, first: bool
) -> None:
    network_words = f"{count}x {' '.join(name.split('-')).upper()}"
    text = "; ".join([network_words, *links] if first else [*links, network_words])
    network = network_in(text)
    assert network is not None
    assert network[0] == name or network[0].startswith("efa")
    assert nics_in(text) == count


@pytest.mark.parametrize("text", [*INSIDE, "; ".join(INSIDE)])
def test_a_link_inside_nodes_names_no_network_unless_the_text_says_so(text: str) -> None:
    assert network_in(text) is None
    assert network_in("NVLink5 between nodes") == ("nvlink5", 1)


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("A100_40GB", ["a100", "a100-40gb"], "a100-40gb"),
        ("A100 (80 GB)", ["a100", "a100-40gb", "a100-80gb"], "a100-80gb"),
        ("GB200", ["b200", "gb200"], "gb200"),
        ("H1000", ["h100"], None),
        ("Megatron-DeepSpeed", ["deepspeed"], None),
        ("Interleaved-1F1B (flexible)", ["1f1b", "interleaved-1f1b"], "interleaved-1f1b"),
        (None, ["h100"], None),
    ],
)
def test_a_name_counts_where_it_stands_whole_in_any_case(
    text: str | None, names: list[str], expected: str | None
) -> None:
    assert find_name(text, names) == expected


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "is not JSON"),
        ("{}", "has no list of runs"),
        ("[1]", "run 0 is no object with an id"),
        (json.dumps([{"id": "a"}, {"id": "a"}]), "two runs are called 'a'"),
    ],
)
def test_a_file_that_holds_no_runs_is_refused(tmp_path: Path, content: str, sentence: str) -> None:
    path = tmp_path / "runs.json"
    path.write_text(content)
    with pytest.raises(UserError, match=sentence):
        read_rows(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_rows(tmp_path / "none.json")


def test_stages_that_share_blocks_with_embedding_and_head() -> None:
    assert layers_per_stage(126, 16, fewer_at_ends=False, halves=False) == (7, *[8] * 14, 7)
    assert layers_per_stage(12, 4, fewer_at_ends=False, halves=True) == (6, 6, 6, 7)
    assert layers_per_stage(12, 12, fewer_at_ends=False, halves=True) == (*[2] * 11, 3)
    counts = layers_per_stage(22, 24, fewer_at_ends=True, halves=True)
    assert len(counts) == 24
    assert sum(counts) == 2 * 22 + 1
    assert sum(layers_per_stage(13, 5, fewer_at_ends=False, halves=False)) == 13


# What a prediction takes for granted is said, and nothing else.


NAME = "zb-t12-6.2B-p8-m8-1f1b"


def test_a_run_that_says_all_is_taken_at_its_word() -> None:
    assert read_run(ROWS["korthikanti-t5-22B-full"]).assumed == ()


@pytest.mark.parametrize(
    ("section", "fields", "assumption"),
    [
        ("model", {"kv_heads": None}, "key and value heads: as many as heads"),
        ("model", {"ffn_hidden": None}, "feed-forward width: 16384, four times the model's"),
        ("model", {"ffn_type": None}, "activation function: GELU"),
        ("parallelism", {"schedule": None}, "schedule: 1f1b"),
        ("parallelism", {"cp": None}, "context parallelism: none"),
        ("parallelism", {"dp": None}, "data-parallel ranks: 1, what the other axes leave of the GPUs"),
        ("parallelism", {"zero_stage": None}, "ZeRO stage: 0"),
        ("hardware", {"gpus_per_node": None}, "GPUs of a node: 8"),
        (
            "hardware",
            {"network": None, "nics": None, "interconnect": "a network of our own", "gpus_per_node": 4},
            "network: 4 x infiniband-hdr a node, since a network of our own is unknown",
        ),
    ],
)
def test_what_a_run_leaves_open_is_said(section: str, fields: dict[str, Any], assumption: str) -> None:
    complete, incomplete = read_run(ROWS[NAME]).assumed, read_run(changed(NAME, section, **fields)).assumed
    assert set(incomplete) - set(complete) == {assumption}


def test_a_vocabulary_that_is_not_said_is_the_recipes() -> None:
    assert "vocabulary: 32000, the framework's usual one, padded" in read_run(ROWS[NAME]).assumed


def test_recomputation_and_precision_have_defaults() -> None:
    silent = ROWS[NAME] | {"recompute": None, "precision": None}
    assert {"recompute: none", "precision: fp16"} <= set(read_run(silent).assumed)
    titan = read_run(silent, find_recipe("torchtitan"))
    assert "recompute: selective-per-op" in titan.assumed, "as torchtitan does by default"


def test_published_runs_break_no_limit_of_their_own_framework() -> None:
    """What a framework can run is as its source says, and these runs were run."""
    limits: dict[str, str] = {}
    for name, row in ROWS.items():
        with suppress(Incomplete):
            limits[name] = broken_limit(read_run(row).workload) if row.get("framework") else ""
    assert len(limits) > 10
    assert {name: limit for name, limit in limits.items() if limit} == {}

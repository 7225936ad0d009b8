"""DeepSpeed's JSON and accelerate's YAML, with the Trainer's arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.common.errors import UserError
from shardlab.frameworks.find import read_config, read_run
from shardlab.frameworks.run import FrameworkRun
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import forecast

JSON = """{
  "bf16": {"enabled": "auto"},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "reduce_bucket_size": 5e8},
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_accumulation_steps": "auto",
  "gradient_clipping": "auto",
  "mystery": 1
}"""

YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_activation_checkpointing: true
mixed_precision: bf16
num_machines: 2
num_processes: 16
"""

MODEL = ["--model_name_or_path", "llama3-8b", "--max_seq_length", "4096"]


def step_of(text: str, name: str, arguments: list[str], folder: Path) -> FrameworkRun:
    path = folder / name
    path.write_text(text)
    return read_run(read_config(str(path), arguments), find_cluster("h100x16"))


def test_auto_is_the_trainers_argument(tmp_path: Path) -> None:
    arguments = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps=4", "--bf16"]
    step = step_of(JSON, "ds.json", [*MODEL, *arguments, "--gradient_checkpointing"], tmp_path)
    assert (step.micro_batch_size, step.microbatches, step.precision.name) == (2, 64, "bf16")
    assert (step.plan.zero_stage, step.plan.recompute, step.recipe.name) == (3, "full", "deepspeed")
    assert [setting.key for setting in step.config.unknown] == ["mystery"]
    assert step.config.notes == ()


def test_auto_without_an_argument_is_the_trainers_default_and_is_named(tmp_path: Path) -> None:
    step = step_of(JSON, "ds.json", MODEL, tmp_path)
    assert step.micro_batch_size == 8
    assert "train_micro_batch_size_per_gpu" in step.config.notes[0]


GROUPS = {"mics_shard_size": ("dp_shard",), "zero_hpz_partition_size": ("dp_shard", "dp_replicate")}


@pytest.mark.parametrize("key", GROUPS)
def test_groups_of_parameters_are_replicas_that_share_all_or_none_of_the_state(key: str, tmp_path: Path) -> None:
    plan = step_of(JSON.replace('"stage": 3', f'"stage": 3, "{key}": 8'), "ds.json", MODEL, tmp_path).plan
    assert (plan.mesh.dp_replicate, plan.mesh.dp_shard) == (2, 8)
    assert (plan.shard_parameters, plan.shard_gradients, plan.shard_optimizer) == (("dp_shard",), *[GROUPS[key]] * 2)
    lower = step_of(JSON.replace('"stage": 3', f'"stage": 2, "{key}": 8'), "ds.json", MODEL, tmp_path)
    assert lower.plan.mesh.dp_replicate == 1
    assert any(note.endswith(f"{key} is 8, but DeepSpeed reads it with stage 3 alone") for note in lower.notes)
    with pytest.raises(UserError, match=f"{key} is 3, which does not divide 16 devices"):
        step_of(JSON.replace('"stage": 3', f'"stage": 3, "{key}": 3'), "ds.json", MODEL, tmp_path)


@pytest.mark.parametrize(("stage", "words", "reduce_at"), [(3, "", "layer"), (2, "", "step"), (1, "true", "layer")])
def test_stage_3_alone_communicates_beside_compute_by_default(
    stage: int, words: str, reduce_at: str, tmp_path: Path
) -> None:
    overlap = f'"overlap_comm": {words},' if words else ""
    text = JSON.replace('"stage": 3, "overlap_comm": true,', f'"stage": {stage}, {overlap}')
    assert step_of(text, "ds.json", MODEL, tmp_path).plan.reduce_at == reduce_at


def checkpointing(**keys: bool) -> str:
    return JSON.replace('"mystery": 1', f'"activation_checkpointing": {json.dumps(keys)}')


def of_gpt2(text: str, arguments: list[str], folder: Path, cluster: str = "h100x16") -> FrameworkRun:
    path = folder / "ds.json"
    path.write_text(text)
    return read_run(replace(read_config(str(path), arguments), model="gpt2"), find_cluster(cluster))


BATCH = ["--per_device_train_batch_size", "8", "--bf16"]


def test_checkpoints_on_the_host_are_kept_there_and_blocks_are_computed_again(tmp_path: Path) -> None:
    none, device, host = (
        of_gpt2(text, [*BATCH, *arguments], tmp_path)
        for text, arguments in (
            (JSON, []),
            (JSON, ["--gradient_checkpointing"]),
            (checkpointing(cpu_checkpointing=True), []),
        )
    )
    assert (host.plan.recompute, host.plan.passes) == ("none", "offload=activations:host,copy-early")
    assert any("blocks are assumed to call deepspeed.checkpointing.checkpoint" in note for note in host.notes)
    forecasts = [forecast(step.workload) for step in (none, device, host)]
    bytes = [prediction.memory.unlimited for prediction in forecasts]
    assert bytes[0] > bytes[1] > bytes[2]
    assert forecasts[2].seconds > forecasts[1].seconds > forecasts[0].seconds
    large = of_gpt2(
        checkpointing(cpu_checkpointing=True), [*BATCH, "--gradient_accumulation_steps", "64"], tmp_path, "h100x1024"
    )
    assert (large.plan.recompute, large.plan.passes) == ("full", None)
    assert any("too long to simulate" in note for note in large.notes)


def test_partitioned_checkpoints_are_named(tmp_path: Path) -> None:
    step = of_gpt2(checkpointing(partition_activations=True), BATCH, tmp_path)
    assert (step.plan.recompute, step.plan.passes) == ("full", None)
    assert any("over tensor-parallel ranks, which the file does not say" in note for note in step.notes)


def test_the_section_of_checkpoints_has_no_effect_on_models_of_transformers(tmp_path: Path) -> None:
    section = checkpointing(partition_activations=True, cpu_checkpointing=True)
    for arguments, recompute in ((["--gradient_checkpointing"], "full"), (MODEL, "none")):
        step = of_gpt2(section, [*BATCH, *arguments], tmp_path)
        assert (step.plan.recompute, step.plan.passes) == (recompute, None)
        assert any("no effect on models of transformers" in note for note in step.notes)


def test_a_missing_model_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give --model"):
        step_of(JSON, "ds.json", [], tmp_path)


def test_accelerate_says_strategy_precision_and_devices(tmp_path: Path) -> None:
    step = step_of(YAML, "fsdp.yaml", [*MODEL, "--per_device_train_batch_size", "1"], tmp_path)
    assert step.config.devices == 16
    assert (step.plan.zero_stage, step.plan.recompute, step.precision.name) == (2, "full", "bf16")
    hybrid = YAML.replace("SHARD_GRAD_OP", "HYBRID_SHARD")
    assert step_of(hybrid, "fsdp.yaml", MODEL, tmp_path).plan.mesh.dp_replicate == 2


def test_the_model_may_be_a_folder_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 512, "hidden_act": "silu", **sizes}
    (folder / "config.json").write_text(json.dumps(config))
    model = step_of(JSON, "ds.json", ["--model_name_or_path", str(folder)], tmp_path).model
    assert (model.layers, model.hidden_size, model.vocab_size) == (2, 64, 256)

"""Written files, parsed by the framework's own configuration code as its package registry has it (their_code.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardlab.frameworks.writers.write import write_step
from shardlab.language import Mesh
from shardlab.strategies.plan.plan import Plan
from tests.frameworks.their_code import parse
from tests.frameworks.writers.test_write import COMPILED, sharded, step_of, write
from tests.support.warm import WarmStarts

KEEPS: dict[str, Any] = {"shard_parameters": ("dp_shard",), "shard_optimizer": ("dp_shard",), "reshard_after": "step"}

TITANS: dict[str, tuple[Plan, str, str, dict[str, str]]] = {
    "fsdp": (Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8), recompute="full"), "llama3-8b", "bf16-fp32-grads", {}),
    "default": (Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8), recompute="per-op"), "llama3-70b", "fp32", {}),
    "hsdp": (
        Plan(Mesh(dp_shard=4, dp_replicate=2, tp=2), **sharded(3, dp_shard=4), sequence_parallel=True),
        *("llama3-8b", "bf16-params", COMPILED | {"async_tp": "on"}),
    ),
    "stages": (
        Plan(Mesh(dp_shard=4, pp=2), layers_per_stage=(20, 12), **KEEPS),
        *("llama3-8b", "bf16-fp32-grads", {"loss": "float32"}),
    ),
    "interleaved": (
        Plan(Mesh(dp_shard=2, pp=4), "interleaved-1f1b", stages_per_rank=2, **KEEPS),
        *("qwen3-32b", "bf16-fp32-grads", {}),
    ),
    "contexts": (
        Plan(Mesh(dp_shard=4, cp=2), **sharded(3, dp_shard=4, cp=2), context="all_gather"),
        *("llama3-405b", "bf16-fp32-grads", {"compile": "off", "loss": "float32"}),
    ),
    "experts": (
        Plan(Mesh(dp_shard=2, ep=4), **sharded(3, dp_shard=2)),
        *("qwen3-30b-a3b", "bf16-fp32-grads", {}),
    ),
}
"""Plans, models, precisions and switches of the recipe torchtitan."""


def titans(folder: Path) -> dict[str, Path]:
    """Folders with the files of each of these steps."""
    folders: dict[str, Path] = {}
    for name, (plan, model, precision, switches) in TITANS.items():
        folders[name] = folder / name
        folders[name].mkdir()
        step = step_of(plan, "torchtitan", model, precision, **{"attention": "flash2", **switches})
        write(folders[name], write_step(step, model))
    return folders


def part(configs: dict[str, Any], section: str, **fields: Any) -> None:
    """Require fields of a section."""
    assert {name: configs[section][name] for name in fields} == fields


def test_torchtitans_python_configurations_are_what_the_plans_say(tmp_path: Path, warm: WarmStarts) -> None:
    folders = titans(tmp_path)
    (tmp_path / "wrong.py").write_text(
        "from torchtitan.config import ParallelismConfig\nfrom torchtitan.trainer import Trainer\n\n"
        "def train():\n    return Trainer.Config(parallelism=ParallelismConfig(tp=2))\n"
    )
    files = [folder / "train_config.py" for folder in folders.values()]
    *results, wrong = parse(warm, "torchtitan-0.3", [*files, tmp_path / "wrong.py"])
    assert "unexpected keyword argument 'tp'" in wrong["error"], "what it takes is known to it"
    assert not [config["error"] for config in results if "error" in config]
    configs = dict(zip(folders, results, strict=True))
    part(configs["fsdp"], "training", seq_len=8192, local_batch_size=1, global_batch_size=16, dtype="float32")
    part(configs["fsdp"], "compile", enable=True, components=["model", "loss"])
    assert (configs["fsdp"]["model"], configs["fsdp"]["layers"]) == (["llama3", "8B"], 32)
    assert (configs["fsdp"]["activation_checkpoint"], configs["fsdp"]["loss"]) == (
        "FullAC.Config",
        "ChunkedLossWrapper.Config",
    )
    assert configs["default"]["activation_checkpoint"] == "SelectiveAC.Config"
    part(configs["default"], "training", mixed_precision_param="float32")
    part(configs["hsdp"], "parallelism", data_parallel_replicate_degree=2, data_parallel_shard_degree=4)
    part(configs["hsdp"], "parallelism", tensor_parallel_degree=2, enable_sequence_parallel=True)
    part(configs["hsdp"], "compile", enable=True, enable_async_tensor_parallel=True)
    part(configs["hsdp"], "training", dtype="bfloat16")
    assert (configs["hsdp"]["activation_checkpoint"], configs["hsdp"]["loss"]) == (
        "NoneType",
        "CrossEntropyLoss.Config",
    )
    part(configs["stages"], "parallelism", pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B")
    parts = configs["stages"]["parallelism"]["module_fqns_per_model_part"]
    assert [len(modules) for modules in parts] == [21, 14]
    assert (parts[0][0], parts[1][-1]) == ("tok_embeddings", "lm_head")
    part(configs["stages"], "training", local_batch_size=4, disable_cuda_graphs=True)
    part(configs["stages"], "compile", components=["model"])
    part(
        configs["interleaved"], "parallelism", pipeline_parallel_degree=4, pipeline_parallel_schedule="Interleaved1F1B"
    )
    assert (configs["interleaved"]["model"], configs["interleaved"]["layers"]) == (["qwen3", "32B"], 64)
    part(configs["contexts"], "parallelism", context_parallel_degree=2)
    part(configs["contexts"], "compile", enable=False)
    part(configs["experts"], "parallelism", expert_parallel_degree=4, data_parallel_shard_degree=8)
    assert configs["experts"]["model"] == ["qwen3", "30B-A3B"]


def test_torchtitans_toml_files_are_what_the_plans_say(tmp_path: Path, warm: WarmStarts) -> None:
    folders = titans(tmp_path)
    (tmp_path / "wrong.toml").write_text("[parallelism]\npipeline_parallel_split_points = []\n")
    files = [folder / "train.toml" for folder in folders.values()]
    *results, wrong = parse(warm, "torchtitan-0.2", [*files, tmp_path / "wrong.toml"])
    assert "pipeline_parallel_split_points" in wrong["error"], "what it takes is known to it"
    assert not [config["error"] for config in results if "error" in config]
    configs = dict(zip(folders, results, strict=True))
    part(configs["fsdp"], "model", name="llama3", flavor="8B")
    part(configs["fsdp"], "activation_checkpoint", mode="full")
    part(configs["default"], "activation_checkpoint", mode="selective", selective_ac_option="op")
    part(configs["hsdp"], "parallelism", data_parallel_replicate_degree=2, enable_async_tensor_parallel=True)
    parts = configs["stages"]["parallelism"]["module_fqns_per_model_part"]
    assert ([len(modules) for modules in parts], parts[1][-1]) == ([21, 14], "output")
    part(configs["interleaved"], "model", name="qwen3", flavor="32B")
    part(configs["contexts"], "parallelism", context_parallel_degree=2, context_parallel_rotate_method="allgather")
    part(configs["experts"], "parallelism", expert_parallel_degree=4, data_parallel_shard_degree=8)


def test_deepspeed_the_trainer_and_accelerate_take_the_files(tmp_path: Path, warm: WarmStarts) -> None:
    """One process parses all files, since it imports DeepSpeed and transformers for seconds."""
    files: list[Path] = []
    for stage in range(4):
        plan = Plan(Mesh(dp_shard=8), recompute="full", **sharded(stage, dp_shard=8))
        (folder := tmp_path / str(stage)).mkdir()
        files.append(write(folder, write_step(step_of(plan, "deepspeed", precision="bf16"), "llama3-8b")))
    document = json.loads(files[0].read_text())
    document["zero_optimization"]["level"] = 2
    (tmp_path / "wrong.json").write_text(json.dumps(document))
    arguments = words(tmp_path / "0" / "train.sh")
    configured = accelerate_files(tmp_path)
    *plain, wrong, other, full, grad_op, hybrid, wrong_yaml = parse(
        warm,
        "deepspeed",
        [*files, tmp_path / "wrong.json", files[0], *configured.values()],
        [*[arguments] * 5, ["--per_device_train_batch_size", "4", "--bf16"], *[()] * len(configured)],
    )
    assert "level" in wrong["error"], "what it takes is known to it"
    assert plain == [
        {
            **{"stage": stage, "bf16": True, "micro_batch": 1, "accumulation": 2, "sequences": 16, "mismatches": []},
            **{"checkpointing": True, "rest": ["--max_seq_length", "8192"]},
        }
        for stage in range(4)
    ]
    assert any("train_micro_batch_size_per_gpu" in mismatch for mismatch in other["mismatches"]), "mismatches are seen"
    for strategy, config in zip(configured, (full, grad_op, hybrid), strict=False):
        assert (config["num_processes"], config["num_machines"], config["mixed_precision"]) == (8, 1, "bf16")
        assert config["distributed_type"] == "FSDP"
        assert config["fsdp_config"]["fsdp_sharding_strategy"] == strategy
    assert "processes" in wrong_yaml["error"]


def words(script: Path) -> list[str]:
    """The Trainer's arguments in a script."""
    lines = [line.strip().removesuffix("\\").split() for line in script.read_text().splitlines()]
    return [word for line in lines for word in line if line and line[0].startswith("--")]


def accelerate_files(folder: Path) -> dict[str, Path]:
    """Write accelerate's file for each strategy of FSDP, and a wrong one."""
    plans = {
        "FULL_SHARD": Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8)),
        "SHARD_GRAD_OP": Plan(Mesh(dp_shard=8), **sharded(2, dp_shard=8)),
        "HYBRID_SHARD": Plan(Mesh(dp_shard=4, dp_replicate=2), **sharded(3, dp_shard=4)),
    }
    files: dict[str, Path] = {}
    for name, plan in plans.items():
        (folder / name).mkdir()
        files[name] = write(folder / name, write_step(step_of(plan, "fsdp1", precision="bf16"), "llama3-8b"))
    files["wrong"] = folder / "wrong.yaml"
    files["wrong"].write_text(files["FULL_SHARD"].read_text() + "processes: 8\n")
    return files

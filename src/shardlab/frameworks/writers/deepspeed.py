"""Write a step as DeepSpeed's JSON or accelerate's YAML, with a script that gives the Trainer's arguments.

Neither file contains the model or the sequence length, which are arguments of the training program. JSON has no
comments, so the script lists the properties that the files cannot express.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardlab.frameworks import deepspeed
from shardlab.frameworks.settings import key_table
from shardlab.frameworks.writers.translation import OF_PYTORCH, Translation, as_yaml, commented, nested, plan_of
from shardlab.simulate.predict.workload import Workload

FILES = ("ds_config.json", "train.sh")
ACCELERATE_FILES = ("accelerate.yaml", "train.sh")

KEYS = {
    "micro_batch_size": "--per_device_train_batch_size",
    "accumulation": "--gradient_accumulation_steps",
    "seq_len": "--max_seq_length",
}
"""Arguments of the Trainer by meaning, for settings that accelerate's file does not have."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True},
    "bf16-fp32-grads": {"bf16": True, "gradient_dtype": "fp32"},
    "fp16": {"fp16": True},
}
"""Values by meaning, for each precision."""

SHARED = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP", 0: "NO_SHARD"}
"""Sharding strategies of FSDP by stage of ZeRO."""


def translate(step: Workload) -> Translation:
    """Return the values of DeepSpeed's keys for a step."""
    plan, unsaid = plan_of(step), list[str]()
    values: dict[str, Any] = {"zero": plan.zero_stage, "overlap": plan.reduce_at == "layer"}
    if plan.mesh.dp_replicate > 1 and plan.shard_parameters:
        shared = "dp_replicate" in plan.shard_optimizer
        values["parameter_group" if shared else "shard_group"] = plan.mesh.dp_shard
    if step.pass_names == deepspeed.INPUTS_ON_HOST:
        values["on_host"] = True
    values |= _batch(step) | PRECISIONS.get(step.precision.name, {})
    values |= {"global_batch": step.microbatches * step.micro_batch_size}
    return Translation(values | _program(step, unsaid), tuple(unsaid), says_model=False, uncompared=OF_PYTORCH)


def _batch(step: Workload) -> dict[str, Any]:
    accumulation = step.microbatches // plan_of(step).data_ranks
    return {"micro_batch_size": step.micro_batch_size, "accumulation": accumulation}


def _program(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    """Return the values that are arguments of the training program."""
    recompute = plan_of(step).recompute
    if recompute not in ("none", "full"):
        unsaid.append("recomputation of some blocks; --gradient_checkpointing recomputes all")
    if step.optimizer != "adamw":
        unsaid.append(f"the optimizer {step.optimizer}; give it to the training program")
    return {"seq_len": step.model.seq_len, **({"recompute": True} if recompute == "full" else {})}


def render(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str, str]:
    """Return the texts of DeepSpeed's JSON and of the script."""
    keys, flags = _divide(translation, deepspeed.NAME, {})
    cluster = step.cluster
    start = f"deepspeed --num_nodes {cluster.nodes} --num_gpus {cluster.per_node} train.py --deepspeed {FILES[0]}"
    batch = [f"{KEYS[meaning]} {translation.values[meaning]}" for meaning in ("micro_batch_size", "accumulation")]
    if "on_host" in translation.values:
        remarks = [*remarks, "the model must call deepspeed.checkpointing.checkpoint for each of its blocks"]
    # The Trainer checks that they agree.
    half = [f"--{name}" for name in ("bf16", "fp16") if translation.values.get(name)]
    return json.dumps(nested(keys), indent=2) + "\n", _script(remarks, start, [*batch, *half, *flags])


def translate_accelerate(step: Workload) -> Translation:
    """Return the values of accelerate's keys for a step."""
    plan, unsaid = plan_of(step), list[str]()
    mesh, zero = plan.mesh, plan.zero_stage
    shared = mesh.dp_shard * mesh.dp_replicate > 1
    values: dict[str, Any] = {"kind": "FSDP" if zero > 1 else "MULTI_GPU" if shared else "NO"}
    if zero > 1:
        strategy = SHARED[zero]
        if mesh.dp_replicate > 1:
            strategy = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}[strategy]
        values["strategy"] = strategy
    values |= {"precision": {"bf16": "bf16", "bf16-fp32-grads": "bf16", "fp16": "fp16"}.get(step.precision.name, "no")}
    values |= {axis: size for axis in ("tp", "cp") if (size := getattr(mesh, axis)) > 1}
    values |= _batch(step) | _program(step, unsaid)
    return Translation(values, tuple(unsaid), says_model=False, uncompared=OF_PYTORCH)


def render_accelerate(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str, str]:
    """Return the texts of accelerate's YAML and of the script."""
    keys, flags = _divide(translation, deepspeed.ACCELERATE, KEYS)
    cluster = step.cluster
    document = {"compute_environment": "LOCAL_MACHINE", **keys, "num_machines": cluster.nodes}
    document |= {"num_processes": cluster.size, "machine_rank": 0, "main_training_function": "main", "use_cpu": False}
    if translation.values["kind"] == "FSDP":
        document["fsdp_config.fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    start = f"accelerate launch --config_file {ACCELERATE_FILES[0]} train.py"
    return commented(remarks) + as_yaml(nested(document)), _script(remarks, start, flags)


def arguments(translation: Translation, framework: str) -> tuple[str, ...]:
    """Return the arguments of the training program that belong to the file, as words."""
    _, flags = _divide(translation, framework, KEYS if framework == deepspeed.ACCELERATE else {})
    return tuple(word for flag in flags for word in flag.split())


def _divide(translation: Translation, framework: str, names: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the file with their values, and the arguments of the training program."""
    table = key_table(framework)
    keys: dict[str, Any] = {}
    flags: list[str] = []
    for meaning, value in translation.values.items():
        key = names.get(meaning, table.write(meaning, value).key)
        if key.startswith("--"):
            flags.append(key if value is True else f"{key} {value}")
        else:
            keys[key] = value
    return keys, flags


def _script(remarks: Sequence[str], start: str, flags: Sequence[str]) -> str:
    hint = (
        "add --model_name_or_path, the data and the learning rate; train.py is your program with transformers.Trainer"
    )
    lines = [start, *flags, '"$@"']
    return "#!/bin/bash\n" + commented([*remarks, hint]) + " \\\n    ".join(lines) + "\n"

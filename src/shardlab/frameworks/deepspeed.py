"""DeepSpeed's JSON with the arguments of Hugging Face's Trainer, and accelerate's YAML for FSDP and DeepSpeed.

Neither file has the model, and the batch may be missing too. Then they come from the training program's arguments,
which the user gives after `--`, or from --model. A value "auto" stands for the Trainer's argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlab.common.errors import UserError
from shardlab.frameworks.run import (
    FrameworkRun,
    Layout,
    cut_batch,
    data_ranks,
    known_optimizer,
    make_plan,
    other_micro_batches,
)
from shardlab.frameworks.settings import Config, Setting, key_table
from shardlab.frameworks.yaml_file import read_json, read_yaml
from shardlab.language import Mesh
from shardlab.language.pass_names import with_offload
from shardlab.language.precision import Precision, find_precision
from shardlab.models import Blocks
from shardlab.models.named import find_model, with_written
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.recipe import find_recipe

NAME, ACCELERATE = "deepspeed", "accelerate"

AUTO = "auto"

FACTS = {"num_processes": "devices", "num_machines": "nodes"}
"""Keys of accelerate with the numbers of devices and nodes, and their names in `Config.facts`."""

INPUTS_ON_HOST = with_offload(None, ["activations=host"])
"""Passes of a plan with `cpu_checkpointing`. Copies overlap compute, as in DeepSpeed's `_ActivationOffloadEngine`."""

USUAL_BATCH = 8
"""Default of the Trainer's `per_device_train_batch_size` (`src/transformers/training_args.py`)."""

STRATEGIES = {"1": 3, "2": 2, "3": 0, "4": 3, "5": 2} | {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""Stages of ZeRO by value of `fsdp_sharding_strategy` (`src/accelerate/utils/constants.py`)."""


def config_of(text: str, file: str, overrides: Sequence[Setting] = ()) -> Config:
    """Return the configuration of DeepSpeed's JSON with arguments of the command line.

    Raises:
        UserError: if it is no JSON.
    """
    _, settings = read_json(text, file)
    table = key_table(NAME)
    explicit = [setting for setting in settings if setting.value != AUTO]
    automatic = [setting.key for setting in settings if setting.value == AUTO and table.find(setting.key) is not None]
    config = Config(table, file, (*explicit, *overrides))
    defaults = [
        key for key in automatic if (entry := table.find(key)) is not None and entry.meaning not in config.by_meaning
    ]
    notes = (f"{', '.join(defaults)}: auto, taken as the Trainer's defaults",) if defaults else ()
    return replace(config, notes=notes)


def accelerate_config_of(text: str, file: str, overrides: Sequence[Setting] = ()) -> Config:
    """Return the configuration of accelerate's YAML with arguments of the training program.

    Raises:
        UserError: if it is no YAML.
    """
    _, settings = read_yaml(text, file)
    facts = {FACTS[setting.key]: setting for setting in settings if setting.key in FACTS}
    explicit = [setting for setting in settings if setting.value is not None and setting.value != AUTO]
    return Config(key_table(ACCELERATE), file, (*explicit, *overrides), facts)


def _on(value: Any) -> bool:
    return str(value).lower() in ("true", "1", "yes")


def run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of DeepSpeed's configuration.

    Raises:
        UserError: if the model is not given, or numbers do not fit together.
    """
    values, notes = config.values, list[str]()
    ranks = cluster.size
    hosts = {values["offload_optimizer"], values["offload_parameters"]} - {"none", "None", ""}
    if hosts:
        notes.append("offloading to the host or to disks is not predicted: steps are longer, and memory smaller")
    zero = values["zero"]
    inner = _shard_group(config, values, ranks, notes)
    mesh = Mesh(dp_replicate=ranks // inner, dp_shard=inner)
    wide = values["gradient_dtype"] in ("fp32", "float32")
    half = "bf16-fp32-grads" if wide else "bf16"
    precision = half if _on(values["bf16"]) else "fp16" if _on(values["fp16"]) else "fp32"
    layout = Layout(
        mesh,
        zero=zero,
        recompute=_recompute(values, notes),
        reduce_at="layer" if (_on(values["overlap"]) if values["overlap"] else zero == 3) else "step",
        state_over_replicas=values["shard_group"] < 2,
    )
    step = _step(config, values, cluster, layout, find_precision(precision), "deepspeed", notes)
    return _with_inputs_on_host(step) if values["on_host"] and not _of_transformers(values) else step


def _of_transformers(values: Mapping[str, Any]) -> bool:
    """Return whether the model is one of transformers, as the Trainer's arguments say."""
    return bool(values["recompute"] or values["model"])


def _recompute(values: Mapping[str, Any], notes: list[str]) -> str:
    """Return what is recomputed: all blocks, if the Trainer's arguments or the section activation_checkpointing say so.

    The section only affects models that call `deepspeed.checkpointing.checkpoint`
    (`runtime/activation_checkpointing/checkpointing.py` at edaa7221), as those of Megatron-DeepSpeed do. Models of
    transformers call PyTorch's function instead (`src/transformers/modeling_utils.py`,
    `gradient_checkpointing_enable`).
    """
    section = values["partitioned"] or values["on_host"]
    if section and _of_transformers(values):
        notes.append(
            "activation_checkpointing has no effect on models of transformers, which call torch.utils.checkpoint"
        )
        section = False
    if section:
        notes.append("blocks are assumed to call deepspeed.checkpointing.checkpoint, as activation_checkpointing needs")
    if section and values["partitioned"]:
        notes.append("partition_activations shards kept inputs over tensor-parallel ranks, which the file does not say")
    return "full" if values["recompute"] or section else "none"


def _with_inputs_on_host(step: FrameworkRun) -> FrameworkRun:
    """Return the step with the inputs of recomputed blocks kept on the host.

    The pass `offload` replaces the plan's recomputation: it also recomputes the blocks.
    """
    plan = replace(step.plan, recompute="none", passes=INPUTS_ON_HOST)
    try:
        plan.require_ops(step.model.layers, step.microbatches)
    except UserError:
        note = "kept inputs are predicted on the device, since a step with copies to the host is too long to simulate"
        return replace(step, notes=(*step.notes, note))
    return replace(step, plan=plan)


def _shard_group(config: Config, values: Mapping[str, Any], ranks: int, notes: list[str]) -> int:
    """Return the number of ranks over which parameters are sharded.

    With `mics_shard_size`, gradients and optimizer state are sharded over the same group of ranks, and the groups are
    replicas (`runtime/zero/mics.py`). With `zero_hpz_partition_size`, gradients and optimizer state are sharded over
    all ranks. In each step, parameters are gathered once over all ranks, and then kept sharded over the group
    (`runtime/zero/partition_parameters.py`, `_partition_param_sec`, and `stage3.py`, `invalidate_secondary_tensor`).
    Both keys have an effect at stage 3 only (`runtime/engine.py`).

    Raises:
        UserError: if the number does not divide the number of all ranks.
    """
    meaning = "shard_group" if values["shard_group"] > 1 else "parameter_group"
    inner, key = values[meaning], config.table.keys[meaning].name
    if inner < 2 or inner >= ranks:
        return ranks
    if values["zero"] < 3:
        notes.append(f"{key} is {inner}, but DeepSpeed reads it with stage 3 alone")
        return ranks
    if ranks % inner:
        raise UserError(f"{config.file}: {key} is {inner}, which does not divide {ranks:,} devices")
    return inner


def run_accelerate(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of accelerate's configuration.

    Raises:
        UserError: if the model is not given, or numbers do not fit together.
    """
    values, notes = config.values, list[str]()
    kind = str(values["kind"]).upper()
    hybrid = "HYBRID" in str(values["strategy"]).upper() or str(values["strategy"]) in ("4", "5")
    zero, recipe = 0, "pytorch-eager"
    if kind == "FSDP":
        zero, recipe = STRATEGIES.get(str(values["strategy"]).upper(), 3), "fsdp2"
        if values["version"] == 2 or values["reshard"] is not None:
            zero = 3 if str(values["reshard"]).lower() in ("true", "none", "full_shard") else 2
    elif kind == "DEEPSPEED":
        zero, recipe = values["zero"], "deepspeed"
        if values["json"]:
            notes.append(f"{values['json']} is another file: explain it to see its keys")
    elif kind not in ("MULTI_GPU", "NO", "MULTI-GPU"):
        notes.append(f"distributed_type {values['kind']} is predicted as data parallelism")
    hosts = {str(values["offload_optimizer"]), str(values["offload_parameters"])} - {"none"}
    if hosts or _on(values["cpu_offload"]):
        notes.append("offloading to the host is not predicted: steps are longer, and memory smaller")
    if values["tp"] * values["cp"] > 1:
        notes.append("parallelism_config: tensor and context parallelism are predicted without sequence parallelism")
    ranks = data_ranks(cluster.size, values["tp"] * values["cp"], config.file, "tensor and context parallelism")
    nodes = cluster.nodes if hybrid and ranks % cluster.nodes == 0 else 1
    mesh = Mesh(dp_replicate=nodes, dp_shard=ranks // nodes, tp=values["tp"], cp=values["cp"])
    names = {"bf16": "bf16", "fp16": "fp16", "no": "fp32", "fp8": "fp8"}
    name = names.get(str(values["precision"]).lower().replace("false", "no"), "fp32")
    recompute = values["recompute"] or values["fsdp_recompute"]
    early = kind != "DEEPSPEED" or zero == 3  # overlap_comm, which accelerate leaves to DeepSpeed
    layout = Layout(mesh, zero, recompute="full" if recompute else "none", reduce_at="layer" if early else "step")
    return _step(config, values, cluster, layout, find_precision(name), recipe, notes)


def _step(
    config: Config,
    values: Mapping[str, Any],
    cluster: Cluster,
    layout: Layout,
    precision: Precision,
    recipe_name: str,
    notes: list[str],
) -> FrameworkRun:
    name, model = _model(config, values)
    plan, recipe = make_plan(layout, model), find_recipe(recipe_name)
    if values["micro_batch_size"] is None:
        size = USUAL_BATCH
        notes.append(f"per_device_train_batch_size is not given; the Trainer's {USUAL_BATCH} is taken")
    else:
        size = values["micro_batch_size"]
    sequences = values.get("global_batch") or size * values["accumulation"] * plan.data_ranks
    optimizer = known_optimizer(values["optimizer"], notes)
    microbatches = cut_batch(config.file, sequences, size, plan.data_ranks)
    return FrameworkRun(
        config, name, model, plan, cluster, size, microbatches, precision, recipe, optimizer, tuple(notes)
    )


def _model(config: Config, values: Mapping[str, Any]) -> tuple[str, Blocks]:
    name = config.model or str(values["model"])
    length = {} if values["seq_len"] is None else {"seq_len": values["seq_len"]}
    if not name:
        raise UserError(f"{config.file} does not say which model it trains; give --model, such as llama3-8b")
    short = Path(name).name.lower()
    try:
        model = find_model(name)
    except UserError as error:
        alias = short.replace("meta-", "").replace("-hf", "").replace("llama-", "llama").replace("llama3.1", "llama3")
        try:
            model = find_model(alias)
        except UserError:
            raise UserError(f"{config.file}: model {name} is not known here ({error}); give --model") from None
        name = alias
    return name, with_written(model, length, name)


def changes(config: Config, step: FrameworkRun) -> Iterator[dict[str, Any]]:
    """Yield changes to DeepSpeed's configuration that may save time or memory, as values by meaning."""
    values = config.values
    yield {"recompute": True if not values["recompute"] else None}
    for zero in range(4):
        yield {"zero": zero}
    yield from other_micro_batches(step)


def changes_accelerate(config: Config, step: FrameworkRun) -> Iterator[dict[str, Any]]:
    """Yield changes to accelerate's configuration that may save time or memory, as values by meaning."""
    kind = str(config.values["kind"]).upper()
    if kind == "DEEPSPEED":
        yield from changes(config, step)
        return
    yield {"fsdp_recompute" if kind == "FSDP" else "recompute": True}
    if kind == "FSDP":
        yield from ({"strategy": name} for name in ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"))
    yield from other_micro_batches(step)

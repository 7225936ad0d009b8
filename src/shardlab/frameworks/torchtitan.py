"""torchtitan: TOML files of 2024 to 2026 and command lines `--section.key=value`.

Since April 2026, torchtitan has no such files: a command names a function of its registry
(`--module llama3 --config llama3_8b`) or of a Python module (`python_config`), and further flags may change the
settings that the function returns. `torchtitan.toml` lists the keys, with their commits.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

from shardlab.common.errors import UserError, suggest_name
from shardlab.frameworks.run import FrameworkRun, Layout, cut_batch, data_ranks, known_optimizer, make_plan
from shardlab.frameworks.settings import Config, Setting, key_table
from shardlab.frameworks.yaml_file import flat
from shardlab.language import Mesh
from shardlab.language.precision import Precision, find_precision
from shardlab.models import Blocks
from shardlab.models.named import find_model, with_written
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.recipe import Recipe, find_recipe

NAME = "torchtitan"

SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved-1f1b",
    "LoopedBFS": "breadth-first",
    "ZBVZeroBubble": "zb-v",
    "InterleavedZeroBubble": "interleaved-1f1b",
    "DualPipeV": "dualpipe-v",
}
"""Shardlab's schedules by class of torch.distributed.pipelining."""

CHUNKED_LOSS = "ChunkedLossWrapper"
"""Class of the loss that holds the logits of only a part of the tokens at a time (components/loss.py)."""

SECTIONS = (
    *("job", "profiling", "profiler", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism"),
    *("checkpoint", "activation_checkpoint", "compile", "float8", "mx", "quantize", "comm", "memory_estimation"),
    *("fault_tolerance", "experimental", "validation", "validator", "debug", "dataloader"),
)


def read_toml(text: str, file: str) -> list[Setting]:
    """Return the settings of a TOML file, each with its line.

    Raises:
        UserError: if it is no TOML.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file} is no TOML: {error}") from None
    lines = _lines(text)
    return [Setting(key, value, lines.get(key, 0)) for key, value in flat(document) if value != {}]


def _lines(text: str) -> dict[str, int]:
    """Return the line of each key of a TOML file."""
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = head[1].strip() + "."
        elif key := re.match(r"\s*([\w.\"-]+)\s*=", line):
            lines[section + key[1].strip('"')] = number
    return lines


def read_arguments(arguments: Sequence[Setting]) -> tuple[list[Setting], dict[str, str]]:
    """Return the settings of flags such as --training.seq_len=8192, and the flags that select a file or a function."""
    settings: list[Setting] = []
    selected: dict[str, str] = {}
    for name, value, line in arguments:
        key = name.removeprefix("--")
        if key in ("module", "config", "job.config_file"):
            selected[key] = str(value)
        else:
            match = re.fullmatch(r"(\w+\.)no[-_](\w+)", key) if value is True else None
            settings.append(Setting(match[1] + match[2], False, line) if match else Setting(key, value, line))
    return settings, selected


def registry_settings(module: str, config: str) -> list[Setting]:
    """Return the settings of a function of torchtitan's registry.

    Raises:
        UserError: if the function is not known.
    """
    registry = cast(dict[str, dict[str, Any]], key_table(NAME).data["registry"])
    if config not in registry:
        raise UserError(
            f"--config {config} is a function of torchtitan's registry that is not known here; "
            f"{suggest_name(config, registry)}"
        )
    return [Setting("model.name", module or "llama3"), *(Setting(key, item) for key, item in registry[config].items())]


def run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration.

    Raises:
        UserError: if the model is not known, or numbers do not fit together.
    """
    values, notes = config.values, list[str]()
    name, model = _model(config, values)
    mesh = _mesh(config, values, cluster.size)
    stages, blocks = _stages(config, values, model, mesh)
    layout = Layout(
        mesh,
        zero=3 if mesh.dp_shard * mesh.cp > 1 else 0,
        schedule=_schedule(values, notes),
        stages=stages,
        blocks_of_stages=blocks,
        sequence_parallel=values["sequence_parallel"],
        recompute=_recompute(config, values, model.layers, notes),
        keeps_weights=values["reshard"] == "never",
        context="all_gather" if values["rotate"] == "allgather" else "ring",
    )
    plan = make_plan(layout, model)
    size, microbatches = _batch(config, values, mesh, plan.data_ranks)
    if mesh.ep > 1:
        notes.append("weights of non-experts are predicted as whole on each rank along ep; torchtitan shards them")
    if values["cpu_offload"]:
        notes.append("training.enable_cpu_offload is not predicted: its step is longer, and memory smaller")
    recipe, optimizer = _recipe(config, values), known_optimizer(values["optimizer"], notes)
    return FrameworkRun(
        config, name, model, plan, cluster, size, microbatches, _precision(values), recipe, optimizer, tuple(notes)
    )


def _model(config: Config, values: Mapping[str, Any]) -> tuple[str, Blocks]:
    family, flavor = values["model_name"], values["model_flavor"]
    models = cast(dict[str, dict[str, Any]], config.table.data["models"])
    family = "llama3" if family in ("llama", "llama3_ft", "llama3_simple_fsdp") else family
    if config.model:
        return config.model, with_written(find_model(config.model), {"seq_len": values["seq_len"]}, config.model)
    plain = re.sub(r"_(flex|varlen)(_attn)?$", "", flavor)
    row = models.get(f"{family}/{plain}")
    unsaid = cast(dict[str, str], config.table.data["unsaid"])
    if row is None and family in unsaid:
        raise UserError(
            f"{config.file}: model {family} has {unsaid[family]}, which no model here can express; give --model "
            "with a similar one"
        )
    if row is None:
        raise UserError(
            f"{config.file}: the sizes of model {family}, flavor {flavor}, are not known here; give --model, or "
            f"one of {', '.join(sorted(models))}"
        )
    sizes = {key: value for key, value in row.items() if key != "model"}
    model = with_written(find_model(row["model"]), sizes | {"seq_len": values["seq_len"]}, f"{family}/{flavor}")
    return f"{family} {flavor}", model


def _mesh(config: Config, values: Mapping[str, Any], devices: int) -> Mesh:
    tp, pp, cp, ep, replicas, shards = (values[axis] for axis in ("tp", "pp", "cp", "ep", "dp_replicate", "dp_shard"))
    words = f"tp {tp}, pp {pp}, cp {cp} and {replicas} replicas"
    ranks = data_ranks(devices, tp * pp * cp * replicas, config.file, words)
    if shards not in (-1, ranks):
        raise UserError(
            f"{config.file}: data_parallel_shard_degree is {shards}, but the cluster's {devices:,} devices leave "
            f"{ranks} beside {words}; give a --cluster of {shards * tp * pp * cp * replicas} devices, or -1"
        )
    if ep > 1 and ranks % ep:
        raise UserError(
            f"{config.file}: expert_parallel_degree is {ep}, which does not divide the {ranks} sharding ranks; others "
            "are not predicted"
        )
    return Mesh(pp=pp, dp_replicate=replicas, dp_shard=ranks // ep, cp=cp, tp=tp, ep=ep)


def _schedule(values: Mapping[str, Any], notes: list[str]) -> str:
    if values["pp"] == 1:
        return "1f1b"
    names = {name.lower(): name for name in SCHEDULES}
    if (name := names.get(values["schedule"].lower())) is None:
        raise UserError(f"schedule {values['schedule']} is not known; {suggest_name(values['schedule'], SCHEDULES)}")
    if name == "InterleavedZeroBubble":
        notes.append("InterleavedZeroBubble is predicted as Interleaved1F1B, with the bubble that it would save")
    return SCHEDULES[name]


def _stages(config: Config, values: Mapping[str, Any], model: Blocks, mesh: Mesh) -> tuple[int, tuple[int, ...]]:
    """Return the number of stages on each rank, and the blocks of each stage (empty: as even as possible).

    Source: `generate_llm_fqn_per_model_part`.
    """
    if mesh.pp == 1:
        return 1, ()
    one = values["schedule"].lower() in ("1f1b", "gpipe")
    stages = mesh.pp * (1 if one else 2)
    first, last = values["first_stage_less"], values["last_stage_less"]
    if values["split_points"]:
        cuts = [int(match[1]) for point in values["split_points"] if (match := re.search(r"(\d+)$", point))]
        bounds = [0, *cuts, model.layers]
        return max(1, (len(cuts) + 1) // mesh.pp), tuple(end - begin for begin, end in pairwise(bounds))
    if values["module_fqns"]:
        counts = [sum(str(name).startswith("layers.") for name in part) for part in values["module_fqns"]]
        if sum(counts) != model.layers or len(counts) % mesh.pp:
            raise UserError(
                f"{config.file}: module_fqns_per_model_part has {sum(counts)} layers in {len(counts)} parts, but the "
                f"model has {model.layers} layers and the pipeline {mesh.pp} ranks; give parts that divide among ranks"
            )
        return len(counts) // mesh.pp, tuple(counts)
    if values["layers_per_stage"] is not None:
        stages = math.ceil((model.layers + first + last) / values["layers_per_stage"])
        if stages % mesh.pp:
            raise UserError(
                f"{config.file}: pipeline_parallel_layers_per_stage {values['layers_per_stage']} makes {stages} "
                f"stages, which do not divide among {mesh.pp} pipeline ranks"
            )
    size, extra = divmod(model.layers + first + last, stages)
    blocks = [size + (stage < extra) for stage in range(stages)]
    blocks[0] -= first
    blocks[-1] -= last
    return stages // mesh.pp, tuple(blocks) if min(blocks) > 0 else ()


def _recompute(config: Config, values: Mapping[str, Any], layers: int, notes: list[str]) -> Any:
    """Return a plan's `recompute`: "none", "full", "per-op", or the numbers of the recomputed blocks, every n-th one.

    The source is torchtitan/distributed/activation_checkpoint.py.
    """
    mode, option = values["recompute"], str(values["recompute_option"])
    if mode in ("none", "full"):
        return mode
    if mode == "memory_budget":
        notes.append("activation_checkpoint.mode memory_budget is predicted as selective with option op")
        return "per-op"
    if mode != "selective":
        raise UserError(f"{config.file}: activation_checkpoint.mode is {mode!r}; give none, selective or full")
    if option == "op" or values["microbatch_tokens"] is not None:
        return "per-op"
    if not option.isdecimal():
        raise UserError(f"{config.file}: selective_ac_option is {option!r}; give op or a whole number")
    interval = int(option)
    return "full" if interval < 2 else tuple(range(interval - 1, layers, interval))


def _recipe(config: Config, values: Mapping[str, Any]) -> Recipe:
    switches = {"attention": "flash2", "loss": "float32"}
    if not values["compile"] or "model" not in values["compiled_parts"]:
        switches["compile"] = "off"
    elif "loss" in values["compiled_parts"] and not config.version.startswith("2024"):
        switches["loss"] = "compiled"
    if values["loss_class"] == CHUNKED_LOSS:
        switches["loss"] = "chunked"
    if values["compile"] and values["async_tp"] and values["tp"] > 1:
        switches["async_tp"] = "on"
    return find_recipe("torchtitan", switches)


def _precision(values: Mapping[str, Any]) -> Precision:
    half = values["reduce_precision"] == "bfloat16"
    if any("float8" in converter for converter in values["converters"]) or values["float8_2024"]:
        return find_precision("fp8" if half else "fp8-fp32-grads")
    if any("mx" in converter for converter in values["converters"]):
        return find_precision("mxfp8" if half else "mxfp8-fp32-grads")
    if values["dtype"] == "bfloat16":
        return find_precision("bf16-params")
    if values["precision"] == "float32":
        return find_precision("fp32")
    return find_precision("bf16" if half else "bf16-fp32-grads")


def _batch(config: Config, values: Mapping[str, Any], mesh: Mesh, ranks: int) -> tuple[int, int]:
    """Return the number of sequences of a microbatch, and the number of microbatches of a step."""
    local = values["local_batch"]
    if values["microbatch_tokens"] is not None:  # tokens of one forward pass on a rank
        size = max(1, values["microbatch_tokens"] // values["seq_len"])
        microbatches = (values["pp_microbatches"] or 1) if mesh.pp > 1 else 1
        tokens = values["step_tokens"] or -1
        sequences = size * microbatches * ranks if tokens < 0 else tokens // values["seq_len"]
        return size, cut_batch(config.file, sequences, size, ranks)
    sequences = local * ranks if values["global_batch"] < 0 else values["global_batch"]
    if mesh.pp == 1:
        return local, cut_batch(config.file, sequences, local, ranks)
    if values["pp_microbatches"] is not None or config.version.startswith("2024"):
        microbatches = values["pp_microbatches"] or mesh.pp
        size = max(1, local // microbatches)
    else:
        size = values["micro_batch_size"]
    return size, cut_batch(config.file, sequences, size, ranks)


def changes(config: Config, step: FrameworkRun) -> Iterator[dict[str, Any]]:
    """Yield changes that may save time or memory, as values by meaning: a key with those that it needs."""
    values, mesh = config.values, step.plan.mesh
    free = {"dp_shard": -1} if values["dp_shard"] != -1 else {}
    yield {"recompute": "none"}
    yield from ({"recompute": "selective", "recompute_option": option} for option in ("op", "2"))
    yield {"recompute": "full"}
    if not values["compile"]:
        yield {"compile": True}
    local = values["local_batch"]
    for size in {local // 2, local * 2, 1} - {0, local}:
        keep = {"global_batch": step.sequences} if step.sequences % (size * step.plan.data_ranks) == 0 else {}
        yield {"local_batch": size, **keep}
    for tp in (1, 2, 4, 8):
        if tp != mesh.tp and tp <= step.cluster.per_node:
            yield {"tp": tp, **free}
    if mesh.tp > 1 and not values["async_tp"]:
        yield {"async_tp": True}
    yield from ({"reshard": reshard} for reshard in ("always", "never") if reshard != values["reshard"])
    if step.cluster.nodes > 1 and mesh.dp_replicate == 1 and mesh.dp_shard > step.cluster.per_node:
        yield {"dp_replicate": step.cluster.nodes, **free}
    if mesh.dp_replicate > 1:
        yield {"dp_replicate": 1, **free}
    for cp in (2, 4):
        if mesh.cp == 1 and values["seq_len"] >= 16384:
            yield {"cp": cp}
    if mesh.pp > 1:
        yield from ({"schedule": name} for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"))

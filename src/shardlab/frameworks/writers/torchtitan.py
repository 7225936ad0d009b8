"""Write a step as a configuration of torchtitan: a function in Python, and a TOML file.

The function is for release 0.3.0, and the file for 0.2.2, the last release that takes TOML files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, cast

from shardlab.common.files import toml_value
from shardlab.frameworks import torchtitan
from shardlab.frameworks.settings import Setting, key_table
from shardlab.frameworks.writers.translation import (
    OF_PYTORCH,
    Translation,
    blocks_of_stages,
    commented,
    model_properties,
    plan_of,
    switch_of,
)
from shardlab.models.named import find_model, with_written
from shardlab.simulate.predict.workload import Workload

PYTHON_FILE, TOML_FILE = "train_config.py", "train.toml"

FUNCTION = "train"
"""Name of the function in Python."""

ONE_STAGE = ("1f1b", "gpipe")
"""Schedules with one stage on each rank."""

HEAD, OLD_HEAD = "lm_head", "output"
"""Names of a model's output layer: today's, and that of release 0.2.2."""

CLASSES = {schedule: name for name, schedule in reversed(torchtitan.SCHEDULES.items())}
"""Classes of torch.distributed.pipelining by schedule."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-fp32-grads": {},
    "bf16-params": {"dtype": "bfloat16"},
    "fp32": {"precision": "float32"},
    "fp8": {"converters": ["float8"]},
    "mxfp8": {"converters": ["mx"]},
}
"""Values by meaning, for each precision."""


def translate_python(step: Workload) -> Translation:
    """Return the translation of a step for a configuration in Python."""
    translation = _translate(step)
    values, unsaid = dict(translation.values), list(translation.unsaid)
    option = str(values.pop("recompute_option", "op"))
    if values.get("recompute") == "selective" and option != "op":
        values["recompute"] = "none"
        unsaid.append(f"recomputation of every {option}th block, which torchtitan had until March 2026")
    elif "recompute" in values:
        values["recompute_option"] = "op"
    if values.pop("rotate", "") == "alltoall":
        unsaid.append("context parallelism as a ring, which torchtitan had in its TOML files")
    if switch_of(step, "loss") == "chunked":
        values["loss_class"] = torchtitan.CHUNKED_LOSS
    return replace(translation, values=values, unsaid=tuple(unsaid), uncompared=OF_PYTORCH)


def translate_toml(step: Workload) -> Translation:
    """Return the translation of a step for a TOML file."""
    translation, chunked = _translate(step), switch_of(step, "loss") == "chunked"
    unsaid = "the loss in chunks of tokens, which torchtitan has since April 2026, after its last TOML files"
    return replace(
        translation,
        unsaid=(*translation.unsaid, *([unsaid] if chunked else [])),
        uncompared=OF_PYTORCH | ({"loss"} if chunked else set()),
    )


def _translate(step: Workload) -> Translation:
    plan, unsaid = plan_of(step), list[str]()
    mesh = plan.mesh
    microbatches, size = step.microbatches // plan.data_ranks, step.micro_batch_size
    values: dict[str, Any] = {}
    family, flavor = flavor_of(step)
    if flavor:
        values |= {"model_name": family, "model_flavor": flavor}
    else:
        unsaid.append("the model, which is none of torchtitan's flavors; add one of its sizes to the model's args")
    values |= {"seq_len": step.model.seq_len, "local_batch": size * (microbatches if mesh.pp > 1 else 1)}
    if mesh.pp == 1 and microbatches > 1:
        values["global_batch"] = step.microbatches * size
    values |= {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard * mesh.ep, "tp": mesh.tp, "cp": mesh.cp}
    if mesh.ep > 1:
        values["ep"] = mesh.ep
    if mesh.cp > 1:
        values["rotate"] = "allgather" if plan.context == "all_gather" else "alltoall"
    if mesh.tp > 1 and not plan.sequence_parallel:
        values["sequence_parallel"] = False
    if mesh.pp == 1 and plan.shard_parameters and plan.reshard_after == "step":
        values["reshard"] = "never"
    if mesh.pp > 1:
        values |= {"pp": mesh.pp, "micro_batch_size": size, **_stages(step, unsaid)}
    values |= _recompute(step, unsaid) | _recipe(step)
    if step.precision.name in PRECISIONS:
        values |= PRECISIONS[step.precision.name]
    if step.optimizer != "adamw":
        unsaid.append(f"the optimizer {step.optimizer}, which is left to you")
    return Translation(values, tuple(unsaid), says_model=bool(flavor))


def flavor_of(step: Workload) -> tuple[str, str]:
    """Return name and flavor of the torchtitan model with the sizes of a step's model; empty texts if there is none."""
    models = cast(dict[str, dict[str, Any]], key_table(torchtitan.NAME).data["models"])
    properties = model_properties(step.model)
    for name, row in models.items():
        sizes = {key: value for key, value in row.items() if key != "model"} | {"seq_len": step.model.seq_len}
        model = with_written(find_model(row["model"]), sizes, name)
        if type(model) is type(step.model) and model_properties(model) == properties:
            family, _, flavor = name.partition("/")
            return family, flavor
    return "", ""


def _stages(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    """Return the schedule, and the keys that give each stage its blocks."""
    plan = plan_of(step)
    schedule = plan.schedule_name
    if schedule not in CLASSES:
        unsaid.append(f"the schedule {schedule}, which torchtitan lacks")
        return {}
    values: dict[str, Any] = {"schedule": CLASSES[schedule]}
    blocks = blocks_of_stages(step)
    if blocks is None:
        unsaid.append("stages that end within a block")
        return values
    usual = plan.mesh.pp * (1 if schedule in ONE_STAGE else 2)
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        total = step.model.layers + first + last
        largest = ceil(total / len(blocks))
        if ceil(total / largest) != len(blocks):
            continue
        counts = [total // len(blocks) + (stage < total % len(blocks)) for stage in range(len(blocks))]
        counts[0] -= first
        counts[-1] -= last
        if counts == blocks:
            ends = {"first_stage_less": first, "last_stage_less": last} if (first, last) != (1, 1) else {}
            return values | ends | ({"layers_per_stage": largest} if len(blocks) != usual else {})
    return values | {"module_fqns": _modules(blocks)}


def _modules(blocks: Sequence[int]) -> list[list[str]]:
    """Return the names of the modules of each stage."""
    bounds = [0, *accumulate(blocks)]
    parts = [[f"layers.{block}" for block in range(*pair)] for pair in pairwise(bounds)]
    parts[0].insert(0, "tok_embeddings")
    parts[-1] += ["norm", HEAD]
    return parts


def _recompute(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    recompute = plan_of(step).recompute
    if recompute == "per-op":
        return {"recompute": "selective", "recompute_option": "op"}
    if isinstance(recompute, str):
        if recompute in ("none", "full"):
            return {"recompute": recompute}
        unsaid.append(f"recompute {recompute}; torchtitan has per-op and every n-th block")
        return {"recompute": "none"}
    interval = min(recompute) + 1
    if tuple(sorted(recompute)) != tuple(range(interval - 1, step.model.layers, interval)):
        unsaid.append(
            f"recomputation of {len(recompute)} of {step.model.layers} blocks; every {interval}th is the nearest"
        )
    return {"recompute": "selective", "recompute_option": str(interval)} if interval > 1 else {"recompute": "full"}


def _recipe(step: Workload) -> dict[str, Any]:
    """Return the values of keys that follow from the recipe's switches: what is compiled, and async TP."""
    if switch_of(step, "compile") != "on":
        return {"compile": False}
    values: dict[str, Any] = {"compile": True}
    if switch_of(step, "loss") not in ("chunked", "compiled"):
        values["compiled_parts"] = ["model"]
    if switch_of(step, "async_tp") == "on":
        values["async_tp"] = True
    return values


def render_python(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str]:
    """Return the text of the Python file of a translation."""
    cluster = step.cluster
    launch = f"--nnodes {cluster.nodes} --nproc_per_node {cluster.per_node}"
    module = PYTHON_FILE.removesuffix(".py")
    start = f"start it on each node: torchrun {launch} ... -m torchtitan.train --module {module} --config {FUNCTION}"
    hint = "for torchtitan 0.3; add what is yours: hf_assets_path, dataloader, training.steps, the optimizer's numbers"
    values = dict(translation.values)
    if {"pp", "ep"} & values.keys():
        values["no_graphs"] = True  # trainer.py: CUDA graphs support neither
    code = _code(values, translation.values.get("model_name", "llama3"))
    return (commented([*remarks, hint, start]) + code,)


FIELDS: dict[str, tuple[str, ...]] = {
    "TrainingConfig": ("seq_len", "local_batch", "global_batch", "dtype", "precision", "no_graphs"),
    "ParallelismConfig": (
        *("dp_replicate", "dp_shard", "tp", "sequence_parallel", "cp", "ep", "reshard", "pp", "micro_batch_size"),
        *("schedule", "first_stage_less", "last_stage_less", "layers_per_stage", "module_fqns"),
    ),
    "CompileConfig": ("compile", "compiled_parts", "async_tp"),
}
"""Meanings by the class that has them: torchtitan/config/configs.py of release 0.3.0."""

RENAMED = {"async_tp": "enable_async_tensor_parallel", "no_graphs": "disable_cuda_graphs"}
"""Names of fields that the table of keys lacks, or has in another section."""

CONVERTERS = {"float8": "Float8LinearConverter", "mx": "MXFP8LinearConverter"}

RECOMPUTATIONS = {"none": "None", "full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}


def _code(values: Mapping[str, Any], family: str) -> str:
    """Return the imports and the function that makes the configuration."""
    recompute = RECOMPUTATIONS[values["recompute"]]
    imports = {f"torchtitan.models.{family}": ["model_registry"], "torchtitan.trainer": ["Trainer"]}
    imports["torchtitan.components.optimizer"] = ["default_adamw"]
    imports["torchtitan.models.common.config_utils"] = ["decoder_vocab_size"]
    entropy = "CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec))"
    chunked = "loss_class" in values
    loss = f"{torchtitan.CHUNKED_LOSS}.Config(loss_fn={entropy})" if chunked else entropy
    imports["torchtitan.components.loss"] = [*([torchtitan.CHUNKED_LOSS] if chunked else []), "CrossEntropyLoss"]
    lines = ["model_spec=model_spec", f"loss={loss}", "optimizer=default_adamw(lr=3e-4)"]
    for name, meanings in FIELDS.items():
        fields = [
            (RENAMED.get(meaning) or _field(meaning), values[meaning]) for meaning in meanings if meaning in values
        ]
        if fields:
            imports.setdefault("torchtitan.config", []).append(name)
            arguments = "".join(f"            {field}={_literal(value)},\n" for field, value in fields)
            lines.append(f"{name.removesuffix('Config').lower()}={name}(\n{arguments}        )")
    lines.append(f"activation_checkpoint={recompute}")
    if recompute != "None":
        imports["torchtitan.distributed.activation_checkpoint"] = [recompute.partition(".")[0]]
    model = _literal(values.get("model_flavor", "8B"))
    if kinds := [CONVERTERS[converter] for converter in values.get("converters", ())]:
        imports["torchtitan.components.quantization"] = kinds
        compiled = _literal(bool(values.get("compile")))
        converters = ", ".join(f"{kind}.Config(model_compile_enabled={compiled})" for kind in kinds)
        model += f", converters=[{converters}]"
    head = "".join(f"from {module} import {', '.join(sorted(names))}\n" for module, names in sorted(imports.items()))
    body = "".join(f"        {line},\n" for line in lines)
    return (
        f"{head}\n\ndef {FUNCTION}() -> Trainer.Config:\n    model_spec = model_registry({model})\n"
        f"    return Trainer.Config(\n{body}    )\n"
    )


def _field(meaning: str) -> str:
    return key_table(torchtitan.NAME).keys[meaning].name.partition(".")[2]


def _literal(value: Any) -> str:
    """Return a value as Python writes it, with double quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(_literal, cast(list[Any], value)))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def render_toml(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str]:
    """Return the text of the TOML file of a translation."""
    cluster = step.cluster
    launch = f"--nnodes {cluster.nodes} --nproc_per_node {cluster.per_node}"
    start = f"start it on each node: torchrun {launch} ... -m torchtitan.train --job.config_file {TOML_FILE}"
    hint = (
        "for torchtitan 0.2; add what is yours: model.hf_assets_path, training.dataset, training.steps, the optimizer"
    )
    values = dict(translation.values)
    if parts := values.get("module_fqns"):
        values["module_fqns"] = [[OLD_HEAD if name == HEAD else name for name in part] for part in parts]
    settings = [key_table(torchtitan.NAME).write(meaning, value) for meaning, value in values.items()]
    return (commented([*remarks, hint, start]) + "".join(_sections(settings)),)


def _sections(settings: Sequence[Setting]) -> Iterator[str]:
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        sections.setdefault(setting.key.partition(".")[0], []).append(setting)
    for section, entries in sections.items():
        lines = [f"{entry.key.partition('.')[2]} = {toml_value(entry.value)}\n" for entry in entries]
        yield f"\n[{section}]\n{''.join(lines)}"

"""Write a step as a TOML file of torchtitan.

Keys are those of the last version that takes TOML files (`torchtitan.toml`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil
from typing import Any, cast

from shardlab.common.files import toml_value
from shardlab.frameworks import torchtitan
from shardlab.frameworks.settings import Setting
from shardlab.frameworks.writers.translation import (
    Translation,
    blocks_of_stages,
    commented,
    model_properties,
    plan_of,
    switch_of,
)
from shardlab.models.named import find_model, with_written
from shardlab.simulate.predict.workload import Workload

FILE = "train.toml"

ONE_STAGE = ("1f1b", "gpipe")
"""Schedules with one stage on each rank."""

CLASSES = {schedule: name for name, schedule in reversed(torchtitan.SCHEDULES.items())}
"""Classes of torch.distributed.pipelining by schedule."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-fp32-grads": {},
    "bf16": {"reduce_precision": "bfloat16"},
    "bf16-params": {"dtype": "bfloat16"},
    "fp32": {"precision": "float32"},
    "fp8": {"converters": ["float8"]},
    "mxfp8": {"converters": ["mx"]},
}
"""Values of meanings by precision."""


def translate(step: Workload) -> Translation:
    """Return the values of torchtitan's keys for a step."""
    plan, unsaid = plan_of(step), list[str]()
    mesh = plan.mesh
    each, size = step.microbatches // plan.data_ranks, step.micro_batch_size
    values: dict[str, Any] = {}
    family, flavor = flavor_of(step)
    if flavor:
        values |= {"model_name": family, "model_flavor": flavor}
    else:
        unsaid.append("the model, which is none of torchtitan's flavors; add one of its sizes to the model's args")
    values |= {"seq_len": step.model.seq_len, "local_batch": size * (each if mesh.pp > 1 else 1)}
    if mesh.pp == 1 and each > 1:
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
    values |= _recompute(step, unsaid) | _recipe(step, unsaid)
    if step.precision.name in PRECISIONS:
        values |= PRECISIONS[step.precision.name]
    if step.optimizer != "adamw":
        values["optimizer"] = {"sgd": "SGD", "lion": "Lion", "muon": "Muon"}[step.optimizer]
    said = {"attention", *(["loss"] if switch_of(step, "loss") == "chunked" else [])}  # a kernel of PyTorch's version
    return Translation(values, tuple(unsaid), says_model=bool(flavor), uncompared=frozenset(said))


def flavor_of(step: Workload) -> tuple[str, str]:
    """Return the name and the flavor of torchtitan's model with the sizes of a step's (empty: it has none)."""
    known = cast(dict[str, dict[str, Any]], torchtitan.table().data["models"])
    mine = model_properties(step.model)
    for name, row in known.items():
        written = {key: value for key, value in row.items() if key != "model"} | {"seq_len": step.model.seq_len}
        model = with_written(find_model(row["model"]), written, name)
        if type(model) is type(step.model) and model_properties(model) == mine:
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
        most = ceil(total / len(blocks))
        if ceil(total / most) != len(blocks):
            continue
        counts = [total // len(blocks) + (stage < total % len(blocks)) for stage in range(len(blocks))]
        counts[0] -= first
        counts[-1] -= last
        if counts == blocks:
            more = {"first_stage_less": first, "last_stage_less": last} if (first, last) != (1, 1) else {}
            return values | more | ({"layers_per_stage": most} if len(blocks) != usual else {})
    return values | {"split_points": [f"layers.{cut}" for cut in accumulate(blocks[:-1])]}


def _recompute(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    recompute = plan_of(step).recompute
    if recompute == "per-op":
        return {"recompute": "selective", "recompute_option": "op"}
    if isinstance(recompute, str):
        if recompute in ("none", "full"):
            return {"recompute": recompute}
        unsaid.append(f"recompute {recompute}; torchtitan has per-op and every n-th block")
        return {"recompute": "none"}
    every = min(recompute) + 1
    if tuple(sorted(recompute)) != tuple(range(every - 1, step.model.layers, every)):
        unsaid.append(
            f"recomputation of {len(recompute)} of {step.model.layers} blocks; every {every}th is the nearest"
        )
    return {"recompute": "selective", "recompute_option": str(every)} if every > 1 else {"recompute": "full"}


def _recipe(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    """Return what is compiled, as the recipe's switches say."""
    if switch_of(step, "compile") != "on":
        return {"compile": False}
    found: dict[str, Any] = {"compile": True}
    loss = switch_of(step, "loss")
    if loss == "chunked":
        unsaid.append("the loss in chunks of tokens, which torchtitan has since April 2026, after its last TOML files")
    elif loss != "compiled":
        found["compiled_parts"] = ["model"]
    if switch_of(step, "async_tp") == "on":
        found["async_tp"] = True
    return found


def render(found: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str]:
    """Return the text of the TOML file of a translation."""
    cluster = step.cluster
    launch = f"--nnodes {cluster.nodes} --nproc_per_node {cluster.per_node}"
    start = f"start it on each node: torchrun {launch} ... -m torchtitan.train --job.config_file {FILE}"
    more = "add what is yours: model.hf_assets_path, training.dataset, training.steps, the optimizer's numbers"
    settings = [torchtitan.table().write(meaning, value) for meaning, value in found.values.items()]
    return (commented([*remarks, more, start]) + "".join(_sections(settings)),)


def _sections(settings: Sequence[Setting]) -> Iterator[str]:
    sections: dict[str, list[Setting]] = {}
    for setting in settings:
        sections.setdefault(setting.key.partition(".")[0], []).append(setting)
    for section, inside in sections.items():
        lines = [f"{each.key.partition('.')[2]} = {toml_value(each.value)}\n" for each in inside]
        yield f"\n[{section}]\n{''.join(lines)}"

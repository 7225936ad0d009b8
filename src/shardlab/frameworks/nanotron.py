"""nanotron: YAML files of `run_train.py`.

The defaults are those of `src/nanotron/config` (see `nanotron.toml`). A file gives every axis, so it says on how many
devices it runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardlab.common.errors import UserError
from shardlab.frameworks.run import FrameworkRun, Layout, known_optimizer, make_plan, model_words, other_micro_batches
from shardlab.frameworks.settings import Config, Setting, key_table
from shardlab.frameworks.yaml_file import read_yaml
from shardlab.language import Mesh
from shardlab.language.precision import Precision, find_precision
from shardlab.models import GPT, Blocks, Llama
from shardlab.models.architectures import Mixtral
from shardlab.models.layout import aligned
from shardlab.models.named import find_model, with_written
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.simulate.predict.stages import stages_by_cost

NAME = "nanotron"

AXES = ("dp", "pp", "tp", "cp", "ep")


def config_of(text: str, file: str, overrides: Sequence[Setting] = ()) -> Config:
    """Return the configuration of a YAML file with changes of the command line.

    Raises:
        UserError: if it is no YAML.
    """
    table = key_table(NAME)
    _, settings = read_yaml(text, file)
    settings = [setting for setting in settings if setting.value is not None or table.find(setting.key) is None]
    config = Config(
        table, file, (*settings, *(setting._replace(key=setting.key.removeprefix("--")) for setting in overrides))
    )
    sizes = [config.values[axis] for axis in AXES]
    return replace(config, facts={"devices": Setting("parallelism", math.prod(sizes))})


def run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration.

    Raises:
        UserError: if sizes are missing, or do not fit together.
    """
    values, notes = config.values, list[str]()
    mesh = Mesh(pp=values["pp"], dp_shard=values["dp"], cp=values["cp"], tp=values["tp"], ep=values["ep"])
    if cluster.size < mesh.world:
        raise UserError(
            f"{config.file}: dp {values['dp']}, pp {mesh.pp}, tp {mesh.tp} and the others need {mesh.world:,} devices, "
            f"but the cluster has {cluster.size:,}; give --cluster with {mesh.world:,}"
        )
    for meaning in ("seq_len", "micro_batch_size"):
        if values[meaning] is None:
            raise UserError(f"{config.file} gives no {config.table.keys[meaning].name}; give it after --")
    model = _model(config, values, mesh.tp, notes)
    recipe = find_recipe("nanotron")
    zero = values["zero"]
    plain = make_plan(Layout(mesh, zero=zero), model)
    halves = mesh.tp > 1 or mesh.cp > 1 or bool(model.borrowed(model.layers - 1))
    layout = Layout(
        mesh,
        zero=zero,
        schedule="1f1b" if str(values["schedule"]).lower() == "1f1b" else "gpipe",
        sequence_parallel=str(values["tp_mode"]).lower() == "reduce_scatter",
        recompute="full" if values["recompute"] else "none",
        reduce_at=recipe.defaults.reduction(plain.zero_stage),
        units_of_stages=stages_by_cost(model, mesh.pp, halves=halves) if mesh.pp > 1 else (),
        context="ring",
    )
    plan = make_plan(layout, model)
    if mesh.tp > 1 and not values["tp_async"]:
        notes.append("tp_linear_async_communication is false, but is predicted as true")
    name, optimizer = config.model or model_words(model), known_optimizer(values["optimizer"], notes)
    size, microbatches = values["micro_batch_size"], values["accumulation"] * plan.data_ranks
    return FrameworkRun(
        config, name, model, plan, cluster, size, microbatches, _precision(values), recipe, optimizer, tuple(notes)
    )


def _model(config: Config, values: Mapping[str, Any], tp: int, notes: list[str]) -> Blocks:
    seq_len = values["seq_len"]
    if config.model:
        return with_written(find_model(config.model), {"seq_len": seq_len}, config.model)
    if values["mamba"] is not None:
        raise UserError(f"{config.file} describes Mamba layers, which are not predicted; give --model")
    if not {"hidden_size", "layers"} & config.by_meaning.keys():
        raise UserError(
            f"{config.file} gives no sizes of a model ({config.table.keys['hidden_size'].name}); give --model"
        )
    hidden, heads = values["hidden_size"], values["heads"]
    gated = values["activation"] in ("silu", "swiglu")
    common: dict[str, Any] = {
        "layers": values["layers"],
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": 1 if values["one_kv_head"] else values["kv_heads"] or heads,
        "ffn_hidden_size": values["ffn_hidden_size"] or (11008 if gated else 4 * hidden),
        "vocab_size": aligned(values["vocab_size"], values["vocab_multiple"] * tp),
        "seq_len": seq_len,
        "tied": values["tied"],
        "rope_theta": 10000.0,
    }
    if values["head_dim"] is not None and values["head_dim"] * heads != hidden:
        common["head_dim"] = values["head_dim"]
    if values["experts"] is None:
        return Llama(**common) if gated and not values["starcoder"] else GPT(**common)
    expert = values["expert_ffn"] or common["ffn_hidden_size"]
    shared = round(values["shared_ffn"] / expert) if values["shared_expert"] else 0
    mixture: dict[str, Any] = {
        **common,
        "ffn_hidden_size": expert,
        "experts": values["experts"],
        "top_k": values["top_k"],
        "shared_experts": shared,
        "capacity_factor": 1.0,
    }
    return Mixtral(**mixture)


def _precision(values: Mapping[str, Any]) -> Precision:
    dtype = str(values["dtype"] or "float32").removeprefix("torch.")
    if dtype == "float16":
        return find_precision("fp16")
    if dtype != "bfloat16":
        return find_precision("fp32")
    return find_precision("bf16-fp32-grads" if values["fp32_gradients"] else "bf16")


def changes(config: Config, step: FrameworkRun) -> Iterator[dict[str, Any]]:
    """Yield changes, as values by meaning. A change of several keys keeps the number of devices and the batch."""
    values, mesh = config.values, step.plan.mesh
    yield {"recompute": not values["recompute"]}
    yield {"zero": 1 - min(1, values["zero"])}
    if mesh.tp > 1:
        yield {"tp_mode": "REDUCE_SCATTER", "tp_async": True}
    yield from other_micro_batches(step)
    dp, tp, pp, accumulation = values["dp"], values["tp"], values["pp"], values["accumulation"]
    if dp % 2 == 0:
        if 2 * tp <= step.cluster.per_node:
            yield {"dp": dp // 2, "tp": tp * 2, "accumulation": accumulation * 2}
        yield {"dp": dp // 2, "pp": pp * 2, "accumulation": accumulation * 2}
    if accumulation % 2 == 0:
        if tp % 2 == 0:
            yield {"dp": dp * 2, "tp": tp // 2, "accumulation": accumulation // 2}
        if pp % 2 == 0:
            yield {"dp": dp * 2, "pp": pp // 2, "accumulation": accumulation // 2}
    if pp > 1:
        yield {"schedule": "1f1b"}

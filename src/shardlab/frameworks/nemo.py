"""NeMo's YAML files of GPT and Llama training, and overrides of Megatron-Bridge.

Their keys are those of Megatron-LM, grouped in sections. Some values differ: `values_of` translates them, and
`megatron.step_of` returns the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardlab.frameworks import megatron
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import Config, Setting, key_table
from shardlab.frameworks.yaml_file import read_yaml, resolve
from shardlab.simulate.hardware import Cluster

NAME = "nemo"

FACTS = {"trainer.devices": "per_node", "trainer.num_nodes": "nodes"}
"""Keys that say on how many devices a file runs, and their names in `Config.facts`."""


def config_of(text: str, file: str, overrides: Sequence[Setting] = ()) -> Config:
    """Return the configuration of a YAML file with changes of the command line, which are Hydra's overrides or flags.

    Raises:
        UserError: if it is no YAML.
    """
    table = key_table(NAME)
    _, settings = read_yaml(text, file)
    edits = [setting._replace(key=setting.key.lstrip("-+")) for setting in overrides]
    settings = resolve([*settings, *edits])
    settings = [setting for setting in settings if setting.value is not None or table.find(setting.key) is None]
    return Config(
        table, file, tuple(settings), {FACTS[setting.key]: setting for setting in settings if setting.key in FACTS}
    )


def values_of(config: Config) -> dict[str, Any]:
    """Return the values of a configuration by Megatron-LM's meanings."""
    values = dict(config.values)
    activation, norm = str(values["activation"]).lower(), str(values["nemo_norm"]).lower()
    precision, optimizer = str(values["precision"]).lower(), str(values["optimizer_name"]).lower()
    groups = values["kv_groups"]
    sharding = {"full": "optim_grads_params", "grad": "optim_grads"}
    return values | {
        "swiglu": "swiglu" in activation or ("silu" in activation and values["gated"]),
        "squared_relu": activation in ("squared-relu", "squared_relu"),
        "geglu": "geglu" in activation,
        "norm": "RMSNorm" if norm == "rmsnorm" else "LayerNorm",
        "bias": values["biases"],
        "untied": not values["shared_embeddings"],
        "grouped": groups is not None,
        "kv_heads": int(groups or 1),
        "bf16": "bf16" in precision,
        "fp16": precision in ("16", "16-mixed", "fp16", "16-true"),
        "fp8": "hybrid" if values["fp8_on"] not in ("", "False", "None") or "fp8" in precision else None,
        "bf16_gradients": "bf16" in str(values["gradient_dtype"]).lower(),
        "distributed_optimizer": values["distributed_optimizer"] or "distributed" in optimizer,
        "megatron_fsdp": values["fsdp"],
        "sharding": sharding.get(str(values["fsdp_sharding"]), "optim_grads_params"),
        "optimizer": "sgd" if "sgd" in optimizer else "adam",
    }


def run(config: Config, cluster: Cluster) -> FrameworkRun:
    """Return the step of a configuration.

    Raises:
        UserError: if sizes are missing, or do not fit together.
    """
    return megatron.step_of(config, values_of(config), cluster)


def changes(config: Config, step: FrameworkRun) -> Iterator[dict[str, Any]]:
    """Yield changes that may save time or memory, as values by NeMo's meanings."""
    translations = {"distributed_optimizer": {"optimizer_name": "distributed_fused_adam"}}
    for change in megatron.changes(config, step, values_of(config)):
        renamed: dict[str, Any] = {}
        for meaning, value in change.items():
            if meaning == "virtual_layers":
                stages = step.model.layers // step.plan.mesh.pp // int(value or 1)
                renamed["virtual_stages"] = stages
            elif meaning != "virtual_stages":
                renamed |= translations.get(meaning, {meaning: value})
        if all(config.table.keys[meaning].name for meaning in renamed):
            yield renamed

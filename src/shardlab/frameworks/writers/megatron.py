"""Write a step as a script with the arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

from shardlab.frameworks import megatron
from shardlab.frameworks.settings import Setting, key_table
from shardlab.frameworks.writers.translation import Translation, blocks_of_stages, commented, plan_of, switch_of
from shardlab.language.recompute_names import modules_of
from shardlab.models.architectures import GPT, MoE
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

FILE = "train.sh"

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-fp32-grads": {"bf16": True, "fp32_gradients": True},
    "bf16": {"bf16": True, "bf16_gradients": True},
    "fp16": {"fp16": True},
    "fp32": {},
    "fp8": {"bf16": True, "fp8": "hybrid"},
    "mxfp8": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
}
"""Values by meaning, for each precision."""

CONTEXTS = {form: name for name, form in megatron.CONTEXTS.items()}
"""Values of --cp-comm-type by form of context parallelism."""

EXPERTS = {"grouped": ["--moe-grouped-gemm"], "fused": ["--moe-grouped-gemm", "--moe-permute-fusion"]}
"""Flags by the value of the recipe's switch `experts`."""

SHARDING = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""Values of --data-parallel-sharding-strategy by stage of ZeRO."""


def translate(step: Workload) -> Translation:
    """Return the values of Megatron-LM's arguments for a step."""
    plan, unsaid = plan_of(step), list[str]()
    mesh = plan.mesh
    values = _model(step, unsaid)
    values |= {"micro_batch_size": step.micro_batch_size, "global_batch": step.microbatches * step.micro_batch_size}
    values |= {"tp": mesh.tp, "pp": mesh.pp}
    values |= {axis: size for axis in ("cp", "ep") if (size := getattr(mesh, axis)) > 1}
    if plan.sequence_parallel and mesh.tp > 1:
        values["sequence_parallel"] = True
    if mesh.cp > 1:
        values["context"] = [CONTEXTS.get(plan.context, "p2p")]
    if mesh.pp > 1:
        values |= _stages(step, plan, unsaid)
    if plan.data_ranks > 1 or mesh.cp > 1:
        values |= _sharing(step, plan)
    values |= _recompute(step, plan, unsaid)
    if mesh.tp > 1 and switch_of(step, "tp_overlap") == "on":
        values["tp_overlap"] = True
    if switch_of(step, "attention") == "flash2" and not step.model.dropout:
        values["flash_attention"] = True
    flags = ["--cross-entropy-loss-fusion"] if switch_of(step, "loss_fusion") == "on" else []
    flags += EXPERTS.get(switch_of(step, "experts"), []) if "experts" in values else []
    values |= PRECISIONS.get(step.precision.name, {})
    if step.optimizer != "adamw":
        values["optimizer"] = step.optimizer
    uncompared = {"loss_fusion", "experts", *(["tp_overlap"] if mesh.tp == 1 else [])}
    # Megatron-FSDP has its own overlap.
    uncompared |= {"dp_overlap"} if plan.data_ranks * mesh.cp == 1 or plan.zero_stage > 1 else set()
    return Translation(values, tuple(unsaid), extra_flags=tuple(flags), uncompared=frozenset(uncompared))


def _model(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    model = cast(GPT, step.model)
    heads, hidden = model.heads, model.hidden_size
    values: dict[str, Any] = {"layers": model.layers, "hidden_size": hidden, "ffn_hidden_size": model.hidden}
    values["heads"] = heads
    if (head := getattr(model, "head_dim", None)) is not None and head * heads != hidden:
        values["head_dim"] = head
    if (model.kv_heads or heads) != heads:
        values |= {"grouped": True, "kv_heads": model.kv_heads}
    values["seq_len"] = model.seq_len
    if model.rope_theta is not None:
        values["positions"] = "rope"
    if model.activation in ("swiglu", "squared_relu"):
        values[model.activation] = True
    elif model.activation != "gelu":
        unsaid.append(f"the activation function {model.activation}")
    if model.norm == "rms":
        values["norm"] = "RMSNorm"
    if not model.bias:
        values["bias"] = False
    if not model.tied:
        values["untied"] = True
    multiple = 128
    while multiple > 1 and model.vocab_size % (multiple * step.mesh.tp):
        multiple //= 2
    values |= {"vocab_size": model.vocab_size, "vocab_multiple": multiple}
    values |= {"attention_dropout": float(model.dropout), "hidden_dropout": float(model.dropout)}
    if isinstance(model, MoE):
        values |= {"experts": model.experts, "top_k": model.top_k, "expert_ffn": model.hidden}
        if model.capacity_factor not in (None, 1.0):  # 1.0 stands for evenly spread tokens
            values["capacity"] = float(model.capacity_factor)
        if model.shared_experts:
            values["shared_ffn"] = model.shared_experts * model.hidden
    return values


def _stages(step: Workload, plan: Plan, unsaid: list[str]) -> dict[str, Any]:
    """Return the values for the number of stages on each rank, and for the blocks of the first and the last stage."""
    if plan.schedule_name not in ("1f1b", "interleaved-1f1b"):
        unsaid.append(f"the schedule {plan.schedule_name}; Megatron-LM has 1F1B and interleaved 1F1B")
        return {}
    blocks = blocks_of_stages(step)
    if blocks is None:
        unsaid.append("stages that end within a block")
        return {}
    virtual = len(blocks) // plan.mesh.pp
    values: dict[str, Any] = {"virtual_stages": virtual} if virtual > 1 else {}
    if len(set(blocks)) == 1:
        return values
    first, *middle, last = blocks
    ends = {"embedding_in_split": True} if first < max(blocks) else {}
    ends |= {"loss_in_split": True} if last < max(blocks) else {}
    if {first + ("embedding_in_split" in ends), last + ("loss_in_split" in ends), *middle} == {max(blocks)}:
        return values | ends
    if virtual == 1 and not middle:
        return values | {"first_stage_layers": first}
    if virtual == 1 and len(set(middle)) == 1:
        return values | {"first_stage_layers": first, "last_stage_layers": last}
    unsaid.append(f"stages of {', '.join(map(str, blocks))} blocks; give --pipeline-model-parallel-layout")
    return values


def _sharing(step: Workload, plan: Plan) -> dict[str, Any]:
    """Return how data-parallel ranks share the model's state, and when they reduce gradients."""
    instances = {"optimizer_instances": plan.mesh.dp_replicate} if plan.mesh.dp_replicate > 1 else {}
    if plan.zero_stage >= 2:
        return {"megatron_fsdp": True, "sharding": SHARDING[plan.zero_stage], **instances}
    early = plan.reduce_at == "layer" or switch_of(step, "dp_overlap") == "on"
    overlap = {"overlap_grad_reduce": True} if early else {}
    if plan.zero_stage == 0:
        return overlap
    gather = {"overlap_param_gather": True} if overlap else {}
    return {"distributed_optimizer": True, **instances, **overlap, **gather}


def _recompute(step: Workload, plan: Plan, unsaid: list[str]) -> dict[str, Any]:
    recompute, stages = plan.recompute, max(1, plan.mesh.pp)
    if recompute == "full":
        return {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    unfused = recompute == "selective" and not step.recipe.kernels.fused_dropout
    if modules := modules_of(recompute) or ("core_attn",) * unfused:
        if "moe_act" in modules and switch_of(step, "experts") == "loop":
            unsaid.append("moe_act, which needs --moe-grouped-gemm; give --switch experts=grouped")
        return {"recompute": "selective", **({"recompute_modules": list(modules)} if modules != ("core_attn",) else {})}
    if not isinstance(recompute, tuple):
        word, _, number = recompute.partition("-")
        if word == "uniform":
            return {"recompute": "full", "recompute_method": "uniform", "recompute_layers": int(number)}
        if recompute != "none":
            unsaid.append(f"recompute {recompute}, which Megatron-LM lacks")
        return {}
    blocks = blocks_of_stages(step) if plan.mesh.pp > 1 else [step.model.layers]
    bounds = [0]
    for count in blocks or [step.model.layers // stages] * stages:
        bounds.append(bounds[-1] + count)
    counts = {sum(begin <= block < end for block in recompute) for begin, end in pairwise(bounds)}
    if len(counts) > 1:
        unsaid.append(
            f"recomputation of {len(recompute)} blocks, of which stages have between {min(counts)} and {max(counts)}"
        )
    return {"recompute": "full", "recompute_method": "block", "recompute_layers": max(1, min(counts))}


GROUPS: dict[str, tuple[str, ...]] = {
    "MODEL": (
        *("layers", "hidden_size", "ffn_hidden_size", "heads", "head_dim", "grouped", "kv_heads", "seq_len"),
        *("swiglu", "squared_relu", "norm", "bias", "untied", "vocab_size", "vocab_multiple", "attention_dropout"),
        *("positions", "hidden_dropout", "experts", "top_k", "expert_ffn", "capacity", "shared_ffn"),
    ),
    "PARALLEL": (
        *("tp", "sequence_parallel", "tp_overlap", "pp", "virtual_stages", "embedding_in_split", "loss_in_split"),
        *("first_stage_layers", "last_stage_layers", "cp", "context", "ep", "distributed_optimizer", "megatron_fsdp"),
        *("sharding", "optimizer_instances", "overlap_grad_reduce", "overlap_param_gather"),
    ),
    "BATCH": ("micro_batch_size", "global_batch"),
}
"""Meanings of the arguments in each array of the script. All other arguments are in the array TRAINING."""


def render(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str]:
    """Return the text of the script of a translation."""
    cluster = step.cluster
    hint = (
        "arguments of the data, the tokenizer, the learning rate and checkpoints follow the script: bash train.sh ..."
    )
    lines = [commented([*remarks, hint]), f"GPUS_PER_NODE={cluster.per_node}\nNNODES={cluster.nodes}\n"]
    group_of = {meaning: group for group, meanings in GROUPS.items() for meaning in meanings}
    arrays, table = [*GROUPS, "TRAINING"], key_table(megatron.NAME)
    for array in arrays:
        meanings = [meaning for meaning in translation.values if group_of.get(meaning, "TRAINING") == array]
        settings = [table.write(meaning, translation.values[meaning]) for meaning in meanings]
        extra = _numbers(cast(GPT, step.model)) if array == "MODEL" else []
        flags = [*_flags(settings), *extra, *(translation.extra_flags if array == "TRAINING" else ())]
        if flags:
            lines.append(f"\n{array}=(\n" + "".join(f"    {flag}\n" for flag in flags) + ")\n")
    words = " ".join(f'"${{{array}[@]}}"' for array in arrays if any(line.startswith(f"\n{array}=") for line in lines))
    start = 'torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py "$@"'
    return ("#!/bin/bash\n" + "".join(lines) + f"\n{start} \\\n    {words}\n",)


def _numbers(model: GPT) -> list[str]:
    """Return arguments of the model that change neither the time nor the memory of a step."""
    flags = [f"--max-position-embeddings {model.seq_len}", f"--norm-epsilon {model.norm_eps:g}"]
    if model.rope_theta is not None:
        flags += [f"--rotary-base {model.rope_theta:.0f}", *(["--use-rope-scaling"] if model.rope_scaling else [])]
    return flags


def _flags(settings: Sequence[Setting]) -> Iterator[str]:
    for key, value, _ in settings:
        if value is True:
            yield key
        elif isinstance(value, list):
            yield f"{key} {' '.join(map(str, cast(list[Any], value)))}"
        elif value is not False:
            yield f"{key} {value}"

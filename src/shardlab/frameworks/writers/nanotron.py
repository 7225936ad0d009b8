"""Write a step as a YAML file of nanotron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from shardlab.frameworks import nanotron
from shardlab.frameworks.settings import key_table
from shardlab.frameworks.writers.translation import Translation, as_yaml, commented, nested, plan_of
from shardlab.models.architectures import GPT, MoE
from shardlab.simulate.predict.workload import Workload

FILE = "train.yaml"

PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16-fp32-grads": {"dtype": "bfloat16", "fp32_gradients": True},
    "bf16": {"dtype": "bfloat16", "fp32_gradients": False},
    "fp16": {"dtype": "float16", "fp32_gradients": False},
    "fp32": {"dtype": "float32", "fp32_gradients": False},
}
"""Values by meaning, for each precision."""

ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
"""Pipeline engines by schedule."""

YOURS: dict[str, Any] = {
    "general.project": "shardlab",
    "general.run": "%date_%jobid",
    "general.seed": 42,
    "checkpoints.checkpoints_path": "checkpoints",
    "checkpoints.checkpoint_interval": 1000,
    "tokens.train_steps": 100,
    "optimizer.weight_decay": 0.1,
    "optimizer.clip_grad": 1.0,
    "optimizer.learning_rate_scheduler.learning_rate": 0.0003,
    "optimizer.learning_rate_scheduler.lr_warmup_steps": 10,
    "optimizer.learning_rate_scheduler.lr_warmup_style": "linear",
    "optimizer.learning_rate_scheduler.lr_decay_style": "cosine",
    "optimizer.learning_rate_scheduler.min_decay_lr": 0.00003,
}
"""Placeholders for required keys that a plan does not determine: src/nanotron/config/config.py at 00708b80."""

ADAMW = {"adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8, "torch_adam_is_fused": True}
"""Fields of AdamWOptimizerArgs, which have no defaults."""


def translate(step: Workload) -> Translation:
    """Return the values of nanotron's keys for a step."""
    plan, unsaid = plan_of(step), list[str]()
    mesh = plan.mesh
    values: dict[str, Any] = {"dp": mesh.dp_shard * mesh.dp_replicate, "pp": mesh.pp, "tp": mesh.tp}
    values |= {axis: size for axis in ("cp", "ep") if (size := getattr(mesh, axis)) > 1}
    if plan.schedule_name in ENGINES:
        values["schedule"] = ENGINES[plan.schedule_name]
    elif mesh.pp > 1:
        unsaid.append(f"the schedule {plan.schedule_name}; nanotron has 1f1b and afab")
    values |= {"tp_mode": "REDUCE_SCATTER" if plan.sequence_parallel else "ALL_REDUCE"}
    values |= {"tp_async": plan.sequence_parallel and mesh.tp > 1, "recompute": plan.recompute == "full"}
    if plan.recompute not in ("none", "full"):
        unsaid.append("recomputation of some blocks; nanotron recomputes all or none")
    values |= _model(step, unsaid) | PRECISIONS.get(step.precision.name, {})
    if plan.zero_stage > 1:
        unsaid.append(f"ZeRO-{plan.zero_stage}; nanotron has ZeRO-1")
    values |= {"zero": min(1, plan.zero_stage)}
    values |= {"optimizer": {"adamw": "adamW"}.get(step.optimizer, step.optimizer)}
    accumulation = step.microbatches // plan.data_ranks
    values |= {"seq_len": step.model.seq_len, "micro_batch_size": step.micro_batch_size, "accumulation": accumulation}
    return Translation(values, tuple(unsaid))


def _model(step: Workload, unsaid: list[str]) -> dict[str, Any]:
    model = cast(GPT, step.model)
    if model.norm != "rms" or model.activation != "swiglu":
        unsaid.append("a model that is no Llama, Qwen2 or mixture of their experts")
    values: dict[str, Any] = {
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.hidden,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "vocab_size": model.vocab_size,
        "tied": model.tied,
        "activation": "silu",
    }
    if model.head_dim is not None and model.head_dim * model.heads != model.hidden_size:
        unsaid.append(f"heads of {model.head_dim} features")
    if isinstance(model, MoE):
        values |= {"experts": model.experts, "top_k": model.top_k}
        if model.shared_experts:
            values |= {"shared_expert": True, "shared_ffn": model.shared_experts * model.hidden}
            values |= {"expert_ffn": model.hidden}
    return values


def render(translation: Translation, step: Workload, remarks: Sequence[str]) -> tuple[str]:
    """Return the text of the YAML file of a translation."""
    model = cast(GPT, step.model)
    document, keys = dict(YOURS), key_table(nanotron.NAME).keys
    document |= {keys[meaning].name: value for meaning, value in translation.values.items()}
    prefix = "model.model_config."
    kind = "is_qwen2_config" if isinstance(model, MoE) else "is_llama_config"
    document |= {f"{prefix}{kind}": True, f"{prefix}max_position_embeddings": model.seq_len}
    document |= {f"{prefix}rms_norm_eps": model.norm_eps, f"{prefix}rope_theta": model.rope_theta or 10000.0}
    document |= {f"{prefix}rope_interleaved": False, "model.init_method.std": 0.02}
    if translation.values["optimizer"] == "adamW":
        document |= {f"optimizer.optimizer_factory.{name}": value for name, value in ADAMW.items()}
    cluster = step.cluster
    launch = f"--nproc_per_node {cluster.per_node} --nnodes {cluster.nodes}"
    hint = (
        "the lengths, rates and names are placeholders; add tokenizer and data_stages (without them, data are random)"
    )
    start = f"start it on each node: torchrun {launch} ... run_train.py --config-file {FILE}"
    return (commented([*remarks, hint, start]) + as_yaml(nested(document)),)

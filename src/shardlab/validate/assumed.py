"""What a prediction takes for granted because a run does not say it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardlab.hardware import Cluster
from shardlab.models import Blocks
from shardlab.models.parts import Head
from shardlab.strategies.plan import Plan
from shardlab.validate.fields import section
from shardlab.validate.frameworks import Stack


def assumptions(row: dict[str, Any], stack: Stack, model: Blocks, cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """Short phrases, one for each thing that the row leaves open and that its prediction rests on."""
    return (*_of_model(row, model), *_of_hardware(row, cluster), *_of_plan(row, stack, plan))


def _of_model(row: dict[str, Any], model: Blocks) -> Iterator[str]:
    said, tied = section(row, "model"), isinstance(model.head, Head) and model.head.tied
    if "vocab" not in said:
        yield f"vocabulary: {model.vocabulary}, GPT-2's, padded"
    elif said["vocab"] != model.vocabulary:
        yield f"vocabulary: padded to {model.vocabulary}"
    if "kv_heads" not in said:
        yield "key and value heads: as many as heads"
    if "ffn_hidden" not in said:
        yield f"feed-forward width: {4 * said['hidden']}, four times the model's"
    if "ffn_type" not in said:
        yield "activation function: GELU"
    if "tied_embeddings" not in said:
        yield f"embedding and head: {'one matrix' if tied else 'two matrices'}"
    elif said["tied_embeddings"] and not tied:
        yield "embedding and head: two matrices, though tied"


def _of_hardware(row: dict[str, Any], cluster: Cluster) -> Iterator[str]:
    said = section(row, "hardware")
    if "gpus_per_node" not in said:
        yield f"GPUs of a node: {cluster.per_node}"
    if cluster.nodes > 1 and not said.get("interconnect"):
        yield f"network: {cluster.nics} x {cluster.inter_node.name} a node"


def _of_plan(row: dict[str, Any], stack: Stack, plan: Plan) -> Iterator[str]:
    said = section(row, "parallelism")
    if "dp" not in said:
        yield f"data-parallel ranks: {plan.mesh.dp_shard}, what the other axes leave of the GPUs"
    if "cp" not in said:
        yield "context parallelism: none"
    if "sequence_parallel" not in said and plan.mesh.tp > 1:
        yield "sequence parallelism: none"
    if stack.shards_optimizer and not said.get("zero_stage"):
        yield "ZeRO stage: 1, the framework's way"
    elif "zero_stage" not in said:
        yield "ZeRO stage: 0"
    if plan.mesh.pp > 1:
        if not said.get("schedule"):
            yield f"schedule: {plan.schedule}"
        if plan.schedule == "interleaved-1f1b" and said.get("interleave_v", 1) < 2:
            yield f"stages of a rank: {plan.stages_per_rank}"
    if not row.get("recompute"):
        yield "recompute: none"
    if not row.get("precision"):
        yield "precision: fp16"

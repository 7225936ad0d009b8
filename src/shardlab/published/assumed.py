"""Assumptions of a prediction: what it takes for granted because a run does not say it."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.hardware import Cluster
from shardlab.models import Blocks
from shardlab.predict.workload import Workload
from shardlab.published.names import network_in
from shardlab.published.records import HardwareRecord, ModelRecord, ParallelismRecord, RunRecord
from shardlab.strategies.plan import Plan


def assumptions(record: RunRecord, workload: Workload, *, told: bool = False) -> tuple[str, ...]:
    """Short phrases, one for each thing that the record leaves open and that its prediction rests on.

    Args:
        told: the user has said which framework ran it.
    """
    assert isinstance(workload.plan, Plan)
    computes = workload.precision.name
    recompute = "selective-per-op" if workload.recipe.memory.saved.per_op else workload.plan.recompute
    return (
        *(() if record.framework or told else (f"framework: {workload.recipe.name}",)),
        *_of_model(record.model, workload.model),
        *_of_hardware(record.hardware, workload.cluster),
        *_of_plan(record.parallelism, workload.recipe.defaults.zero_stage, workload.plan),
        *(() if record.recompute == recompute else (f"recompute: {recompute}",)),
        *(() if record.precision == computes else (f"precision: {computes}",)),
    )


def _of_model(written: ModelRecord, model: Blocks) -> Iterator[str]:
    tied = model.has_tied_head
    if written.vocab is None:
        yield f"vocabulary: {model.vocab_size}, the framework's usual one, padded"
    elif written.vocab != model.vocab_size:
        yield f"vocabulary: padded to {model.vocab_size}"
    if written.kv_heads is None:
        yield "key and value heads: as many as heads"
    if written.ffn_hidden is None:
        yield f"feed-forward width: {4 * written.hidden}, four times the model's"
    if written.ffn_type is None:
        yield "activation function: GELU"
    if written.tied_embeddings is None:
        yield f"embedding and head: {'one matrix' if tied else 'two matrices'}"
    elif written.tied_embeddings and not tied:
        yield "embedding and head: two matrices, though tied"


def _of_hardware(written: HardwareRecord, cluster: Cluster) -> Iterator[str]:
    if written.gpus_per_node is None:
        yield f"GPUs of a node: {cluster.per_node}"
    if written.device is None:
        yield f"device: {cluster.device.name}"
    if cluster.nodes > 1 and not (written.network and written.nics):
        unknown = written.interconnect and not (written.network or network_in(written.interconnect))
        since = f", since {written.interconnect} is none that is known here" if unknown else ""
        yield f"network: {cluster.nics} x {cluster.inter_node.name} a node{since}"


def _of_plan(written: ParallelismRecord, least_stage: int, plan: Plan) -> Iterator[str]:
    if written.dp is None:
        yield f"data-parallel ranks: {plan.mesh.dp_shard}, what the other axes leave of the GPUs"
    if written.cp is None:
        yield "context parallelism: none"
    if written.sequence_parallel is None and plan.mesh.tp > 1:
        yield "sequence parallelism: none"
    if least_stage and not written.zero_stage:
        yield f"ZeRO stage: {least_stage}, the framework's way"
    elif written.zero_stage is None:
        yield "ZeRO stage: 0"
    if plan.mesh.pp > 1:
        if written.schedule != plan.schedule:
            yield f"schedule: {plan.schedule}"
        if plan.schedule == "interleaved-1f1b" and (written.interleave_v or 1) < 2:
            yield f"stages of a rank: {plan.stages_per_rank}"

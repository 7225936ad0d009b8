"""From a published run's row to what the simulator takes: a model, a plan, a cluster, a batch and a framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

from shardlab.models import GPT, Blocks, Llama
from shardlab.program import Mesh, UserError
from shardlab.simulate.precision import Precision
from shardlab.simulate.workload import Workload
from shardlab.strategies.plan import Plan, Recompute
from shardlab.validate.assumed import assumptions
from shardlab.validate.clusters import cluster_of
from shardlab.validate.fields import Incomplete, section, with_whole_numbers
from shardlab.validate.frameworks import DEEPSPEED, MEGATRON_2021, STACKS, TORCHTITAN, TORCHTITAN_EAGER, Stack
from shardlab.validate.rows import Measured, measured_of
from shardlab.validate.stages import layers_per_stage

SCHEDULES = (
    ("interleaved", "interleaved-1f1b"),
    ("zb-1p", "zb-h1"),
    ("zb-2p", "zb-h2"),
    ("zb-v", "zb-v"),
    ("1f1b", "1f1b"),
    ("gpipe", "gpipe"),
)
"""What a schedule's name contains, and ours. The automatic schedules of Qi et al. hold what their hand-made ones hold
(arXiv 2401.10241, section 5.1: p and 2p microbatches)."""

ASYNC_TP = {"tp": 0.4}
"""What torchtitan's asynchronous tensor parallelism hides: all-gathers and reduce-scatters are cut into chunks beside
the products. A fit to pytorch/torchtitan's benchmarks, where steps became 5 to 14 % shorter."""


@dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
        id, source: as in the file.
        workload: one step of it.
        stack: the framework that ran it.
        measured: what was measured.
        assumed: what the prediction takes for granted because the row does not say it.
    """

    id: str
    source: str
    workload: Workload
    stack: Stack
    measured: Measured
    assumed: tuple[str, ...]

    @property
    def each(self) -> int:
        """Microbatches of a data-parallel rank."""
        return self.workload.microbatches // self.plan.data_ranks

    @property
    def plan(self) -> Plan:
        assert isinstance(self.workload.plan, Plan)
        return self.workload.plan


def read_run(row: dict[str, Any]) -> Run:
    """A run from its row.

    Raises:
        Incomplete: it does not say all that a prediction needs.
    """
    try:
        return _read(row)
    except UserError as error:
        raise Incomplete(str(error)) from None


def _read(row: dict[str, Any]) -> Run:
    measured = measured_of(row)
    if measured.seconds is None and measured.bytes is None and not measured.out_of_memory:
        raise Incomplete("measured neither the seconds of a step nor memory")
    row = with_whole_numbers(row)
    for name, keys in WANTED.items():
        missing = [key for key in keys if section(row, name).get(key) is None]
        if missing:
            raise Incomplete(f"does not say {', '.join(missing).replace('_', ' ')}")
    source = str(row.get("source") or "")
    stack = next((stack for words, stack in STACKS if words in source), None)
    if stack is None:
        raise Incomplete("comes from no framework that is known here")
    if stack is MEGATRON_2021 and section(row, "parallelism").get("zero_stage") == 3:
        stack = DEEPSPEED
    if stack is TORCHTITAN and not row.get("compile", True):
        stack = TORCHTITAN_EAGER
    cluster = cluster_of(section(row, "hardware"))
    if cluster is None:
        raise Incomplete(f"ran on a GPU that is unknown here, {section(row, 'hardware')['gpu']}")
    parallelism, batch = section(row, "parallelism"), section(row, "batch")
    zero = 1 if stack.shards_optimizer and not parallelism.get("zero_stage") else parallelism.get("zero_stage") or 0
    others = [parallelism.get(axis, 1) for axis in ("tp", "pp", "cp")]
    data = parallelism.get("dp") or max(1, section(row, "hardware")["gpus"] // prod(others))
    mesh = Mesh(pp=parallelism["pp"], dp_shard=data, cp=parallelism.get("cp", 1), tp=parallelism["tp"])
    if mesh.world != section(row, "hardware")["gpus"]:
        raise Incomplete(f"has a mesh of {mesh.world} ranks on {section(row, 'hardware')['gpus']} GPUs")
    rows, each = _batch(batch, mesh)
    if stack.framework.name.startswith("torchtitan"):
        attends = (2 * mesh.cp - 1) / mesh.cp  # PyTorch's context parallelism of 2024 went as fast as without balance
        hidden = ASYNC_TP if parallelism.get("async_tp") else stack.framework.hidden
        stack = stack.running(attends=attends, hidden=hidden)
    model, recompute = model_of(row, stack, zero), recompute_of(row)
    if recompute == "per_op":
        stack = stack.running(kept=replace(stack.framework.kept, per_op=True))
    plan = plan_of(row, mesh, zero, stack, model, "none" if recompute == "per_op" else recompute)
    workload = Workload(
        plan, model, cluster, each * mesh.dp_shard, rows, precision_of(row, stack, zero), framework=stack.framework
    )
    return Run(str(row["id"]), source, workload, stack, measured, assumptions(row, stack, model, cluster, plan))


WANTED = {
    "model": ("layers", "hidden", "heads", "seq_len"),
    "hardware": ("gpu", "gpus"),
    "parallelism": ("tp", "pp"),
    "batch": ("global_sequences", "micro_batch"),
}
"""What a row must say."""


def _batch(batch: dict[str, Any], mesh: Mesh) -> tuple[int, int]:
    """(sequences of a microbatch, microbatches of a data-parallel rank)."""
    rows = int(batch["micro_batch"])
    each, rest = divmod(int(batch["global_sequences"]), rows * mesh.dp_shard)
    if rest or not each:
        raise Incomplete(
            f"has {batch['global_sequences']} sequences, which {mesh.dp_shard} data-parallel ranks cannot take in "
            f"microbatches of {rows}"
        )
    return rows, each


def model_of(row: dict[str, Any], stack: Stack, zero: int) -> Blocks:
    """The model that was trained; Megatron-LM pads vocabularies to a multiple of 128 on every tensor-parallel rank.

    With ZeRO-3 a tied head is a matrix of its own here: whole blocks, which FSDP gathers, share none.
    """
    written, parallelism = section(row, "model"), section(row, "parallelism")
    vocabulary, to = written.get("vocab") or stack.vocabulary, 128 * int(parallelism["tp"])
    padded = -(-vocabulary // to) * to if stack.framework.carries_sum or to > 128 else vocabulary
    kind = written.get("ffn_type") or "gelu"
    tied = bool(written.get("tied_embeddings")) and zero < 3
    if written.get("tied_embeddings") is None and parallelism["pp"] > 1:  # half a block a stage takes half-blocks
        tied = written["layers"] + 2 == parallelism["pp"] * _stages_of_a_rank(parallelism)
    common: dict[str, Any] = {
        "layers": written["layers"],
        "width": written["hidden"],
        "heads": written["heads"],
        "kv_heads": written.get("kv_heads") or written["heads"],
        "ffn_hidden": written.get("ffn_hidden") or 4 * written["hidden"],
        "vocabulary": padded,
        "block": written["seq_len"],
        "tied": tied,
    }
    if kind == "swiglu":
        return Llama(**common)
    if kind == "squared_relu":  # Nemotron: rotary positions, no biases
        return GPT(**common, activation="squared_relu", rope_theta=10000.0, bias=False)
    if kind != "gelu":
        raise Incomplete(f"has an activation function that is unknown here, {kind}")
    return GPT(**common, bias=stack.bias, dropout=0.1 if stack.dropout else 0.0)


def _stages_of_a_rank(parallelism: dict[str, Any]) -> int:
    return 2 if "zb-v" in str(parallelism.get("schedule")) else int(parallelism.get("interleave_v") or 1)


def recompute_of(row: dict[str, Any]) -> Recompute | str:
    """What was computed again; nothing where a run does not say."""
    said = str(row.get("recompute") or "none")
    if said.startswith("selective (per-op"):
        return "per_op"
    if said not in ("none", "selective", "full"):
        raise Incomplete(f"recomputes {said}, which is unknown here")
    return said


def plan_of(row: dict[str, Any], mesh: Mesh, zero: int, stack: Stack, model: Blocks, recompute: Any) -> Plan:
    """How the model was laid over the ranks."""
    parallelism = section(row, "parallelism")
    said = str(parallelism.get("schedule") or "none")
    chunks = int(parallelism.get("interleave_v") or 0)
    schedule = next((ours for name, ours in SCHEDULES if name in said), "interleaved-1f1b" if chunks > 1 else "1f1b")
    if mesh.pp == 1:
        schedule, chunks = "1f1b", 1
    elif schedule == "interleaved-1f1b" and chunks < 2:
        chunks = max(1, round(model.layers / mesh.pp))  # as many as there are layers: what hides most of the bubble
    stages = mesh.pp * ({"zb-v": 2, "interleaved-1f1b": chunks}.get(schedule, 1))
    shard = ("dp_shard", "cp") if mesh.cp > 1 else ("dp_shard",)
    shard = shard if mesh.dp_shard * mesh.cp > 1 else ()
    pipelined = mesh.pp > 1
    halves = mesh.tp > 1 or mesh.cp > 1 or model.borrowed(model.layers - 1) or recompute == "selective"
    fewer_at_ends = bool(parallelism.get("first_last_stage_one_layer_less")) or "embedding" in str(
        parallelism.get("pp_partition")
    )
    keeps_weights = zero == 3 and (pipelined or "SHARD_GRAD_OP" in str(parallelism.get("fsdp")))
    return Plan(
        mesh,
        schedule,
        stages_per_rank=chunks if schedule == "interleaved-1f1b" else None,
        layers_per_stage=layers_per_stage(model.layers, stages, fewer_at_ends, bool(halves)) if pipelined else (),
        shard_parameters=shard if zero >= 3 else (),
        shard_gradients=shard if zero >= 2 and not keeps_weights else (),  # a pipeline's FSDP reduces once a step
        shard_optimizer=shard if zero >= 1 else (),
        reduce_at="step" if stack.reduces_at_end else "layer",
        reshard_after="step" if keeps_weights else "layer",
        sequence_parallel=bool(parallelism.get("sequence_parallel")) and mesh.tp > 1,
        recompute=recompute,
        context="all_gather",
    )


DTYPES = (
    ("rowwise", "bfloat16"),  # PyTorch's float8 scaled row by row was no faster in torchtitan's benchmarks of 2025
    ("fp8", "float8"),
    ("float8", "float8"),
    ("bf16", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("fp16", "float16"),
    ("float16", "float16"),
    ("fp32", "float32"),
    ("float32", "float32"),
)
"""What a precision's description contains, and in what products are computed: the first that is found."""


def precision_of(row: dict[str, Any], stack: Stack, zero: int) -> Precision:
    """In which numbers; FSDP's parameters are the optimizer's float32 copy, gathered in half of its width.

    Raises:
        Incomplete: for a dtype that is unknown here.
    """
    said = str(row.get("precision") or "").lower()
    compute = next((dtype for words, dtype in DTYPES if words in (said or "fp16")), None)
    if compute is None:
        raise Incomplete(f"computes in {said}, which is unknown here")
    wide = "fp32 grad" in said or (zero == 3 and "default" in said and "foundry" in stack.framework.name)
    wide = wide or (compute == "bfloat16" and stack.wide_bfloat16_gradients)
    gradients = 4 if wide else stack.reduce_bytes
    optimizer = 10 if zero == 3 else 12
    return Precision(said or "unknown", compute, 2, gradients, optimizer, 2, True, "the run's own row")

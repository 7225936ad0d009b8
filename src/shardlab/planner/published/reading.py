"""Conversion of a published run to a workload of the simulator: model, plan, cluster, batch and recipe.

A row is the JSON object of one run in a file (see `records`). `read_run` converts a row, and `find_name` finds known
names, such as that of a GPU, in a row's texts. Values that a row does not have are assumed, and `assumptions` lists
these assumptions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from shardlab.common.errors import suggest_name
from shardlab.language import Mesh, UserError
from shardlab.language.pass_names import with_offload
from shardlab.language.precision import WIDE, Precision, find_precision
from shardlab.language.recompute_names import is_inside_blocks
from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.planner.published.records import (
    HardwareRecord,
    Incomplete,
    Measurement,
    ModelRecord,
    ParallelismRecord,
    RunRecord,
    Unknown,
    read_figures,
    read_record,
    wrong_measurement,
)
from shardlab.simulate.hardware import DEVICES, LINKS, Cluster, Device, find_device, find_link
from shardlab.simulate.hardware.cluster import NODES
from shardlab.simulate.hardware.device import ALIASES
from shardlab.simulate.predict.recipe import Recipe, find_recipe, recipes
from shardlab.simulate.predict.stages import stages_by_cost
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import SCHEDULES

T = TypeVar("T")

RECOMPUTE: dict[str, Any] = {"none": "none", "selective": "selective", "full": "full", "selective-per-op": "per-op"}
"""Values of a plan's `recompute`, by their names in files."""

_WORDS = {plan: word for word, plan in RECOMPUTE.items()}

DTYPES = {name: name for name in ("fp8", "mxfp8", "bf16", "bf16-params", "fp16", "tf32", "fp32")} | {
    "float8": "fp8",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
}
"""Shardlab's names of precisions, without the dtype of gradients, by their names in files."""


@dataclass(frozen=True)
class PublishedRun:
    """Published run as a workload, with its measured figures.

    Attributes:
        workload: one step of the run.
        measured: measured figures.
        assumed: assumptions about values that the row does not have.
    """

    workload: Workload
    measured: Measurement
    assumed: tuple[str, ...]

    @property
    def rank_microbatches(self) -> int:
        """Number of microbatches of a data-parallel rank."""
        return self.workload.microbatches // self.plan.data_ranks

    @property
    def plan(self) -> Plan:
        assert isinstance(self.workload.plan, Plan)
        return self.workload.plan


def read_run(row: dict[str, Any], recipe: Recipe | None = None) -> PublishedRun:
    """Convert a row to a run.

    Args:
        row: the row.
        recipe: recipe of the prediction (None: the recipe of the row's framework).

    Raises:
        Incomplete: if the row lacks a value that a prediction needs.
    """
    if wrong := wrong_measurement(row):
        raise Incomplete(wrong)
    measured = read_figures(row)
    if measured.seconds is None and measured.bytes is None and not measured.out_of_memory:
        raise Incomplete("measured neither the seconds of a step nor memory")
    record = read_record(row)
    try:
        workload = workload_of(record, recipe or recipe_of(record))
    except UserError as error:
        raise Incomplete(str(error)) from None
    return PublishedRun(workload, measured, assumptions(record, workload, has_recipe=recipe is not None))


def workload_of(record: RunRecord, recipe: Recipe) -> Workload:
    """Return the workload of a run.

    Raises:
        Unknown: if a name is unknown.
        Incomplete: if the run's numbers do not fit together.
        UserError: if no plan or model can have the run's sizes.
    """
    recompute = _recompute_of(record, recipe)
    zero = max(recipe.defaults.zero_stage, record.parallelism.zero_stage or 0)
    cluster, mesh, rows = cluster_of(record), mesh_of(record), record.batch.micro_batch
    data_ranks = mesh.dp_shard * mesh.dp_replicate * mesh.ep
    microbatches, rest = divmod(record.batch.global_sequences, rows * data_ranks)
    if rest or not microbatches:
        raise Incomplete(
            f"has {record.batch.global_sequences} sequences, which {data_ranks} data-parallel ranks cannot take in "
            f"microbatches of {rows}"
        )
    model = recipe.model_as_run(model_of(record, recipe, zero))
    plan = plan_of(record, mesh, zero, recipe, model, recompute)
    if recipe.defaults.gradient_sync == "last" and microbatches > 1:
        plan = replace(plan, shard_gradients=())
    return Workload(plan, model, cluster, microbatches * data_ranks, rows, precision_of(record, recipe), recipe=recipe)


def _recompute_of(record: RunRecord, recipe: Recipe) -> Any:
    """Return the `recompute` of a plan for a run; the framework's default if the run does not say.

    Raises:
        Unknown: if the run's value is unknown.
    """
    text = record.recompute
    if text is None:
        return recipe.defaults.recompute
    if is_inside_blocks(text):
        return text
    return RECOMPUTE[_find_word(text, RECOMPUTE, f"recomputes {text}, which is unknown here")]


def recipe_of(record: RunRecord) -> Recipe:
    """Return the recipe of the run's framework.

    If the run has no framework, the text `source` is searched for one. If it names none either, the framework is the
    usual one for the device and the ZeRO stage.

    Raises:
        Unknown: if the framework or the device is unknown. The message suggests the nearest name.
    """
    name = record.framework
    if name is None:
        name = find_name(record.source, recipes()) or _usual(record)
    return _look_up(partial(find_recipe, switches=record.switches), name)


def _look_up(find: Callable[[str], T], name: str) -> T:
    """Return the recipe, device or link that `find` returns for a name in a run, or raise `Unknown`."""
    try:
        return find(name)
    except UserError as error:
        raise Unknown(f"has an unknown name: {error}") from None


def _find_word(text: str, names: Iterable[str], unknown: str) -> str:
    """Return the known name in a text, or raise `Unknown` with a message and the nearest name."""
    if (name := find_name(text, names)) is None:
        raise Unknown(f"{unknown}; {suggest_name(text, names)}")
    return name


def _usual(record: RunRecord) -> str:
    """Return the name of the usual recipe for the run's stage of ZeRO, and for a device with or without FP8 units."""
    sharded, recent = record.parallelism.zero_stage == 3, "float8" in device_of(record.hardware).flops
    if sharded:
        return "fsdp2" if recent else "deepspeed"
    return "megatron-core-tuned" if recent else "megatron-2021"


def mesh_of(record: RunRecord) -> Mesh:
    """Return the mesh of a run. If the number of data-parallel ranks is missing, it follows from the number of GPUs."""
    axes, gpus = record.parallelism, record.hardware.gpus
    cp, ep, replicas = axes.cp or 1, axes.ep or 1, axes.dp_replicate or 1
    rest = max(1, gpus // (axes.tp * axes.pp * cp * ep * replicas))
    mesh = Mesh(pp=axes.pp, dp_replicate=replicas, dp_shard=axes.dp or rest, cp=cp, ep=ep, tp=axes.tp)
    if mesh.world != gpus:
        raise Incomplete(f"has a mesh of {mesh.world} ranks on {gpus} GPUs")
    return mesh


def device_of(hardware: HardwareRecord) -> Device:
    """Return the device of a run by the field `device`, or else by the name in the text `gpu`."""
    name = hardware.device or find_name(hardware.gpu, [*DEVICES, *ALIASES])
    if name is None:
        if hardware.gpu is None:
            raise Incomplete("does not say device")
        raise Unknown(f"ran on an unknown GPU, {hardware.gpu}; {suggest_name(hardware.gpu, DEVICES)}")
    return _look_up(find_device, name)


def cluster_of(record: RunRecord) -> Cluster:
    """Return the cluster of a run."""
    hardware, device = record.hardware, device_of(record.hardware)
    usual = NODES[device.name]
    per_node = min(hardware.gpus_per_node or usual.devices, hardware.gpus)
    link = (hardware.network, 1) if hardware.network else network_in(hardware.interconnect)
    network, count = link or (usual.inter_node, 1)
    nics = hardware.nics or (None if hardware.network else nics_in(hardware.interconnect)) or per_node * count
    nodes = math.ceil(hardware.gpus / per_node)
    on_board = hardware.gpus_per_node or usual.devices
    intra_node, host = find_link(usual.link_between(on_board)), find_link(usual.host)
    return Cluster(device, per_node, nodes, intra_node, _look_up(find_link, network), host, nics)


def model_of(record: RunRecord, recipe: Recipe, zero: int) -> Blocks:
    """Return the model of a run, with a padded vocabulary if tensor parallelism or the recipe needs it.

    With ZeRO-3 a tied head becomes a separate matrix, because FSDP gathers whole blocks, which cannot share a matrix.
    """
    sizes, parallelism = record.model, record.parallelism
    vocabulary, unit = sizes.vocab or recipe.defaults.vocab_size, 128 * parallelism.tp
    tied = bool(sizes.tied_embeddings) and zero < 3
    if sizes.tied_embeddings is None and parallelism.pp > 1:  # if stages have half a block, the model is tied
        rank_stages = 2 if _schedule(record) == "zb-v" else parallelism.interleave_v or 1
        tied = sizes.layers + 2 == parallelism.pp * rank_stages
    common: dict[str, Any] = {
        "layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads or sizes.heads,
        "ffn_hidden_size": sizes.ffn_hidden or 4 * sizes.hidden,
        "vocab_size": -(-vocabulary // unit) * unit if recipe.defaults.pads_vocab or parallelism.tp > 1 else vocabulary,
        "seq_len": sizes.seq_len,
        "tied": tied,
        "head_dim": sizes.head_dim,
    }
    if sizes.experts:
        common |= {"experts": sizes.experts, "top_k": sizes.top_k or 2, "capacity_factor": sizes.capacity_factor}
        return Mixtral(**common)
    kind = sizes.ffn_type or "gelu"
    if kind == "swiglu":
        return Llama(**common)
    if kind == "squared_relu":  # Nemotron: rotary positions, no biases
        return GPT(**common, activation="squared_relu", rope_theta=10000.0, bias=False)
    if kind != "gelu":
        raise Unknown(f"has an activation function that is unknown here, {kind}")
    return GPT(**common, bias=recipe.defaults.bias, dropout=recipe.defaults.dropout)


def plan_of(record: RunRecord, mesh: Mesh, zero: int, recipe: Recipe, model: Blocks, recompute: Any) -> Plan:
    """Return the plan of a run."""
    parallelism = record.parallelism
    chunks = parallelism.interleave_v or 0
    schedule = _schedule(record) or ("interleaved-1f1b" if chunks > 1 else "1f1b")
    if mesh.pp == 1:
        schedule, chunks = "1f1b", 1
    elif schedule == "interleaved-1f1b" and chunks < 2:
        chunks = max(1, round(model.layers / mesh.pp))  # one layer in each stage, which has the smallest bubble
    stages = mesh.pp * ({"zb-v": 2, "interleaved-1f1b": chunks}.get(schedule, 1))
    shard = ("dp_shard", "cp") if mesh.cp > 1 else ("dp_shard",)
    shard = shard if mesh.dp_shard * mesh.cp > 1 else ()
    pipelined = mesh.pp > 1
    halves = mesh.tp > 1 or mesh.cp > 1 or model.borrowed(model.layers - 1) or recompute == "selective"
    stage_layers: tuple[int, ...] = ()
    if pipelined and recipe.defaults.stages == "cost":
        stage_layers = stages_by_cost(model, stages, halves=bool(halves))
    elif pipelined:
        stage_layers = layers_per_stage(model.layers, stages, parallelism.first_last_stage_one_layer_less, bool(halves))
    usual = recipe.can_run.reshard_after_with_pp[:1] if pipelined else ()
    reshard: Any = parallelism.reshard_after or (*usual, "step" if pipelined else "layer")[0]
    reshard = reshard if zero == 3 else "layer"
    return Plan(
        mesh,
        schedule,
        stages_per_rank=chunks if schedule == "interleaved-1f1b" else None,
        layers_per_stage=stage_layers,
        shard_parameters=shard if zero >= 3 else (),
        shard_gradients=shard if zero >= 2 and reshard == "layer" else (),  # in a pipeline, FSDP reduces once a step
        shard_optimizer=shard if zero >= 1 else (),
        reduce_at=recipe.defaults.reduction(zero),
        reshard_after=reshard,
        sequence_parallel=bool(parallelism.sequence_parallel) and mesh.tp > 1,
        recompute=recompute,
        context="all_gather",
        passes=with_offload(None, parallelism.offload.split()) if parallelism.offload else None,
    )


BY_HAND = {"zb-1p": "zb-h1", "zb-2p": "zb-h2"}
"""Handcrafted schedules that stand in for ZB-1p and ZB-2p, which the Zero Bubble paper finds by a search within the
same memory (Qi et al. 2023, arXiv 2401.10241, sections 3 and 5). A prediction lists this as an assumption."""


def _schedule(record: RunRecord) -> str | None:
    """Return the schedule of a run (None: the run has none).

    Raises:
        Unknown: if the name is unknown. The message suggests the nearest name.
    """
    text = record.parallelism.schedule
    if text is None or text == "none":
        return None
    text = BY_HAND.get(text, text)
    return _find_word(text, SCHEDULES, f"has a schedule that is unknown here, {text}")


def precision_of(record: RunRecord, recipe: Recipe) -> Precision:
    """Return the precision of a run.

    Raises:
        Unknown: if a dtype is unknown.
    """
    text = record.precision or "fp16"
    precision = find_precision(DTYPES[_find_word(text, DTYPES, f"computes in {text}, which is unknown here")])
    if record.gradients is None:
        return recipe.defaults.with_gradients(precision)
    return precision.with_gradients_of(4 if record.gradients == "fp32" else 2)


def layers_per_stage(blocks: int, stages: int, fewer_at_ends: bool, halves: bool) -> tuple[int, ...]:
    """Return the `layers_per_stage` of a plan.

    The first and the last stage may have one block fewer, since embedding and head take time as well (Megatron's
    standalone embedding; Llama 3, arXiv 2407.21783, section 3.3.2). They do if the number of stages divides the number
    of blocks plus two, no stage is left without a block, and either `fewer_at_ends` is true or an even split is
    impossible.

    >>> layers_per_stage(10, 4, fewer_at_ends=True, halves=False)
    (2, 3, 3, 2)

    Args:
        blocks: number of blocks of the model.
        stages: number of stages of the pipeline.
        fewer_at_ends: whether the run says that the first and the last stage have one block fewer.
        halves: whether the plan counts half-blocks: two for each block, and one for the head.
    """
    size, rest = divmod(blocks + 2, stages)
    if size == 1 and not rest and halves:  # no block is left for the ends: the first has half of one, the last the head
        pairs = 2 * blocks - 1
        return (1, *_split_evenly(pairs, stages - 2), 1)
    if size > 1 and not rest and (fewer_at_ends or blocks % stages):
        counts = [size - 1, *[size] * (stages - 2), size - 1]
    else:
        counts = _split_evenly(blocks, stages)
    if not halves:
        return tuple(counts)
    counts = [2 * count for count in counts]
    counts[-1] += 1
    return tuple(counts)


def _split_evenly(count: int, stages: int) -> list[int]:
    """Divide blocks among stages as evenly as possible. Stages with one block more are in the middle."""
    size, extra = divmod(count, stages)
    first = (stages - extra + 1) // 2
    return [size + (first <= stage < first + extra) for stage in range(stages)]


NETWORKS = {"efa": ("efa-100", 4)}
"""For the name of a family of networks, the link and the number of links of a device (AWS p5: 32 of 100 Gb/s)."""


_INSIDE = {re.split(r"[^a-z]", name)[0] for node in NODES.values() for name in (node.intra_node, node.host, "nvme")}

BETWEEN = [name for name in LINKS if re.split(r"[^a-z]", name)[0] not in _INSIDE]
"""Names of links of kinds that connect only nodes. In a text, names of other kinds usually mean links inside nodes."""


def network_in(text: str | None) -> tuple[str, int] | None:
    """Find the link between nodes in a text, and the number of links of a device (None: there is no known link).

    A link that is used within nodes counts only if the text says that it connects nodes.

    >>> network_in("NVLink3 intra-node; 8x HDR InfiniBand"), network_in("NVLink; EFA"), network_in("a fast network")
    (('infiniband-hdr', 1), ('efa-100', 4), None)
    >>> network_in("NVLink4"), network_in("NVLink4 between nodes")
    (None, ('nvlink4', 1))
    """
    if (family := find_name(text, NETWORKS)) is not None:
        return NETWORKS[family]
    link = find_name(text, BETWEEN)
    if link is None:
        parts = re.split(r"[;,.]", text or "")
        crossing = [part for part in parts if re.search(r"inter-?node|(between|across) nodes", part)]
        link = next(filter(None, (find_name(part, LINKS) for part in crossing)), None)
    return None if link is None else (link, 1)


def nics_in(text: str | None) -> int | None:
    """Find the number of NICs before the name of a network in a text (None: there is none).

    >>> nics_in("NVLink3 intra-node; 8x HDR InfiniBand"), nics_in("4 x EFA"), nics_in("8x A100; InfiniBand")
    (8, 4, None)
    """
    for part in re.split(r"[;,]", text or ""):
        if network_in(part) and (match := re.match(r"\s*(\d+) ?x\b", part.lower())) and "per gpu" not in part.lower():
            return int(match[1])
    return None


def find_name(text: str | None, names: Iterable[str]) -> str | None:
    """Find a known name whose words are all in a text (None: there is none).

    If there are several, the one that begins first in the text is returned, and the longest of those that begin with
    the same word. A name does not begin after a hyphen: Megatron-DeepSpeed is not DeepSpeed.

    >>> find_name("A100-SXM4-40GB (Polaris)", ["a100", "a100-40gb", "h100"])
    'a100-40gb'
    >>> find_name("amp_fp8 / bf16", ["bf16", "fp8"]), find_name("H1000", ["h100"])
    ('fp8', None)
    """
    joined = re.sub(r"(\d+) ?gb\b", r"\1gb", (text or "").lower())
    words = {match[0] for match in re.finditer(r"[a-z0-9]+", joined)}
    starts = {match[0]: match.start() for match in reversed([*re.finditer(r"(?<![a-z0-9-])[a-z0-9]+", joined)])}
    matches = [
        (starts[first], -len(name), name)
        for name in names
        if (first := name.partition("-")[0]) in starts and words.issuperset(name.split("-"))
    ]
    return min(matches)[2] if matches else None


def assumptions(record: RunRecord, workload: Workload, *, has_recipe: bool = False) -> tuple[str, ...]:
    """Return a short phrase for each value that the record does not have and that its prediction assumes.

    Args:
        has_recipe: whether the user has chosen the recipe, so that it is no assumption.
    """
    assert isinstance(workload.plan, Plan)
    computes = workload.precision.name.removesuffix(WIDE)
    recompute = _WORDS.get(workload.plan.recompute, workload.plan.recompute)
    return (
        *(() if record.framework or has_recipe else (f"framework: {workload.recipe.name}",)),
        *_of_model(record.model, workload.model),
        *_of_hardware(record.hardware, workload.cluster),
        *_of_plan(record.parallelism, workload.recipe.defaults.zero_stage, workload.plan),
        *(() if record.recompute == recompute else (f"recompute: {recompute}",)),
        *(() if record.precision == computes else (f"precision: {computes}",)),
    )


def _of_model(record: ModelRecord, model: Blocks) -> Iterator[str]:
    tied = model.has_tied_head
    if record.vocab is None:
        yield f"vocabulary: {model.vocab_size}, the framework's usual one, padded"
    elif record.vocab != model.vocab_size:
        yield f"vocabulary: padded to {model.vocab_size}"
    if record.kv_heads is None:
        yield "key and value heads: as many as heads"
    if record.ffn_hidden is None:
        yield f"feed-forward width: {4 * record.hidden}, four times the model's"
    if record.ffn_type is None:
        yield "activation function: GELU"
    if record.tied_embeddings is None:
        yield f"embedding and head: {'one matrix' if tied else 'two matrices'}"
    elif record.tied_embeddings and not tied:
        yield "embedding and head: two matrices, though tied"


def _of_hardware(record: HardwareRecord, cluster: Cluster) -> Iterator[str]:
    if record.gpus_per_node is None:
        yield f"GPUs of a node: {cluster.per_node}"
    if record.device is None:
        yield f"device: {cluster.device.name}"
    if cluster.nodes > 1 and not (record.network and record.nics):
        unknown = record.interconnect and not (record.network or network_in(record.interconnect))
        since = f", since {record.interconnect} is unknown" if unknown else ""
        yield f"network: {cluster.nics} x {cluster.inter_node.name} a node{since}"


def _of_plan(record: ParallelismRecord, least_stage: int, plan: Plan) -> Iterator[str]:
    if record.dp is None:
        yield f"data-parallel ranks: {plan.mesh.dp_shard}, what the other axes leave of the GPUs"
    if record.cp is None:
        yield "context parallelism: none"
    if record.sequence_parallel is None and plan.mesh.tp > 1:
        yield "sequence parallelism: none"
    if least_stage and not record.zero_stage:
        yield f"ZeRO stage: {least_stage}, the framework's default"
    elif record.zero_stage is None:
        yield "ZeRO stage: 0"
    if plan.mesh.pp > 1:
        if record.schedule != plan.schedule:
            yield f"schedule: {plan.schedule}"
        if plan.schedule == "interleaved-1f1b" and (record.interleave_v or 1) < 2:
            yield f"stages of a rank: {plan.stages_per_rank}"

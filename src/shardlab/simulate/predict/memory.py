"""Memory that a device holds beyond a replay's count at its peak: the one place that says whether a step fits.

Megatron-LM allocates the buffer of all gradients once (`param_and_grad_buffer.py`; `DDP-impl local` before).

PyTorch's caching allocator never gives a block that was allocated on one stream to another
(`c10/cuda/CUDACachingAllocator.cpp`), and FSDP2 gathers and reduces on streams of their own
(`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`). So two things stay reserved while activations are at their
peak: the room of the reduced gradients, and that of the largest gather. Its root group, the embedding, the last norm
and the head, stays gathered as a whole.

nanotron gathers a slice's inputs on a stream of its own before each product, frees them after it, and runs ahead of its
device (`parallel/tensor_parallel/functional.py`): the allocator holds their room back until the device has come there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlab.language import Kind, OpKind
from shardlab.simulate.predict.estimate import Peak, peak_of
from shardlab.simulate.timeline.memory import Category, memory_in_bytes
from shardlab.simulate.timeline.prices import rank_of
from shardlab.strategies.plan.plan import BATCH_AXES, Plan
from shardlab.strategies.plan.rank_plan import model_layers

if TYPE_CHECKING:
    from shardlab.simulate.predict.workload import Workload


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that the fullest device holds in a step, as they may be measured.

    Attributes:
        allocated: tensors at their peak, and buffers that stand.
        reserved: what the allocator has reserved for them.
        total: what nvidia-smi shows: with CUDA's context and NCCL's buffers.
        wanted: as `total`, were there room for all that the allocator would reserve.
        needed: what must find room: all but the blocks that the allocator frees before it fails.
        room: of the device.
        safe: whether beside it so much of the device stays free as the recipe wants of a plan that is chosen.
        logged: what the framework logs of what is reserved: that of the fullest device, or of the first.
    """

    allocated: float
    reserved: float
    total: float
    wanted: float
    needed: float
    room: float
    safe: bool
    logged: float

    @property
    def parts(self) -> dict[str, float]:
        """Bytes by what they are for."""
        return {
            "tensors and standing buffers": self.allocated,
            "allocator's reserve": self.reserved - self.allocated,
            "context and communicators": self.total - self.reserved,
        }

    @property
    def fits(self) -> bool:
        """Whether all of it finds room on the device."""
        return self.needed <= self.room


def held_memory(workload: Workload, peaks: Sequence[Peak]) -> HeldMemory:
    """Reckon, as the workload's recipe says, what the fullest device holds at the peaks of its replay.

    On CPUs an allocator's reserve and CUDA's context are nothing, and what `left_out` names is not counted.
    """
    recipe, room, on_gpu = workload.recipe.memory, workload.cluster.device.memory, not workload.cluster.on_cpu
    each = [peak.bytes + recipe.gradient_buffer * standing_gradients(workload, peak) for peak in peaks]
    taken = allocated = max(each)
    if recipe.stream_memory and on_gpu:
        taken = max(peak.bytes + standing_streams(workload, peak) for peak in peaks)
    share = recipe.reserved if on_gpu else 1.0
    gathers = [share * bytes + standing_gathers(workload, peak) for bytes, peak in zip(each, peaks, strict=True)]
    held_back, context = (share - 1) * taken, on_gpu * recipe.context_bytes
    needed = taken + recipe.kept_when_full * held_back + context
    wanted = max(taken + held_back, *gathers)
    most = room - context if needed <= room else math.inf
    reserved, first = min(wanted, most), min(gathers[0], most)
    all = wanted + context
    safe = all + recipe.margin_bytes <= room
    logged = first if recipe.logs_first_rank else reserved
    return HeldMemory(allocated, reserved, reserved + context, all, needed, room, safe, logged)


def left_out(workload: Workload) -> str:
    """Say what the ranks of a workload hold that `HeldMemory` does not count; empty if it counts all.

    Memory that ranks of a host share for messages grows with how far one runs ahead of another (`docs/launch.md`).
    """
    shares = workload.cluster.on_cpu and workload.mesh.world > 1
    return "without what ranks share for messages" if shares else ""


def held_by(workload: Workload) -> HeldMemory:
    """What the fullest device holds, without asking how long anything takes."""
    return held_memory(workload, _peaks(workload))


def room_of_tensors(workload: Workload) -> float:
    """Bytes of tensors that a rank may hold at its peak, so that with all that is held beyond them the device is full.

    What stands beside the tensors is taken to stay as it is.
    """
    peaks, recipe = _peaks(workload), workload.recipe.memory
    held = held_memory(workload, peaks)
    held_back = recipe.kept_when_full * (recipe.reserved - 1) if not workload.cluster.on_cpu else 0.0
    return max(peak.bytes for peak in peaks) + (held.room - held.needed) / (1 + held_back)


def _peaks(workload: Workload) -> list[Peak]:
    traced = workload.traced
    rows = memory_in_bytes(traced, workload.kept_sizes)
    return [peak_of(traced, row, memory, rank_of(traced.program, row)) for row, memory in enumerate(rows)]


def standing_gradients(workload: Workload, peak: Peak) -> float:
    """Bytes of a rank's buffer of gradients that are not in it yet at the peak."""
    if _shards(workload, Kind.GRAD_WEIGHT) or _shards(workload, Kind.WEIGHT):
        return 0.0
    precision = workload.precision
    each = workload.recipe.memory.held_gradient_bytes(precision.bytes(Kind.GRAD_WEIGHT)) / precision.bytes(Kind.WEIGHT)
    all = each * peak.by_category[Category.PARAMETERS.value]
    return max(0.0, all - peak.by_category[Category.GRADIENTS.value])


def standing_gathers(workload: Workload, peak: Peak) -> float:
    """Bytes of gathered inputs of a slice's matrices that the allocator holds back, beside what a rank stores."""
    held_back = workload.recipe.memory.gathers_held_back
    plan, model, mesh = workload.plan, workload.model, workload.mesh
    if not held_back or not isinstance(plan, Plan) or not plan.sequence_parallel:
        return 0.0
    stage = mesh.coordinate(peak.rank, "pp")
    dealt = plan.layers_per_stage or (1,) * mesh.pp
    blocks = model.layers * sum(dealt[stage :: mesh.pp]) / sum(dealt)
    each = min(workload.microbatches // plan.data_ranks, mesh.pp - stage)
    gathered = workload.micro_batch_size * model.seq_len / mesh.cp * model.hidden_size * (1 - 1 / mesh.tp)
    return held_back * blocks * each * gathered * workload.precision.bytes(Kind.ACTIVATION)


def standing_streams(workload: Workload, peak: Peak) -> float:
    """Bytes of a rank that FSDP2's streams, its root group and a pipeline's messages hold beyond the peak."""
    if not _shards(workload, Kind.WEIGHT):
        return 0.0
    mesh, model, precision = workload.mesh, workload.model, workload.precision
    gradients = precision.bytes(Kind.GRAD_WEIGHT) / precision.optimizer * peak.by_category[Category.OPTIMIZER.value]
    embedding = precision.bytes(Kind.WEIGHT) * model.vocab_size * model.hidden_size / mesh.tp
    if mesh.pp == 1:
        summed = peak.by_category[Category.GRADIENTS.value]
        return max(0.0, gradients - summed) + 3 * embedding  # the embedding's own, and the root group's gather
    stage = mesh.coordinate(peak.rank, "pp")
    ends = stage in (0, mesh.pp - 1)
    return gradients + ends * embedding + _kept_for_messages(workload, last=stage == mesh.pp - 1)


def _kept_for_messages(workload: Workload, *, last: bool) -> float:
    """What a pipeline's rank keeps for messages and results (`torch/distributed/pipelining/stage.py`).

    For every microbatch and stage it receives a gradient in a buffer of its own, and an input or, once that is counted
    as what is kept, holds the stage's output. The last stage keeps all logits, and in the end puts them into one.
    """
    plan, mesh, model = workload.plan, workload.mesh, workload.model
    each = workload.microbatches / math.prod(mesh.sizes()[axis] for axis in BATCH_AXES)
    sliced, stages = False, 1
    if isinstance(plan, Plan):
        sliced = plan.sequence_parallel
        stages = plan.stages_of_a_rank(model_layers(workload.sizes).pipeline_units)
    tokens = workload.micro_batch_size * model.seq_len / mesh.cp
    residual = tokens * model.hidden_size / (mesh.tp if sliced else 1)
    logits = tokens * model.vocab_size / mesh.tp
    elements = 2 * stages * residual + last * 2 * logits
    return each * elements * workload.precision.bytes(Kind.ACTIVATION)


def _shards(workload: Workload, kind: Kind) -> bool:
    """Whether each rank has a slice of the parameters, or of their gradients; of a page its collectives tell."""
    plan = workload.plan
    if isinstance(plan, Plan):
        return bool(plan.shard_parameters if kind is Kind.WEIGHT else plan.shard_gradients)
    doing = OpKind.ALL_GATHER if kind is Kind.WEIGHT else OpKind.REDUCE_SCATTER
    return any(
        op.kind is doing and specs[op.outputs[0]].kind is kind
        for tape, specs in zip(workload.traced.program.tapes, workload.traced.specs, strict=True)
        for op in tape
    )

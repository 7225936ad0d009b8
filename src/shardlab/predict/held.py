"""Memory that a GPU holds beyond a replay's count at its peak: buffers that stand, even with nothing in them.

Megatron-LM allocates the buffer of all gradients once (`param_and_grad_buffer.py`; `DDP-impl local` before).

PyTorch's caching allocator never gives a block that was allocated on one stream to another
(`c10/cuda/CUDACachingAllocator.cpp`), and FSDP2 gathers and reduces on streams of their own
(`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`). So two things stay reserved while activations are at their
peak: the room of the reduced gradients, and that of the largest gather. Its root group, the embedding, the last norm
and the head, stays gathered as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.predict.estimate import Peak
from shardlab.predict.workload import Workload
from shardlab.program import Kind
from shardlab.strategies.model_layers import model_layers
from shardlab.strategies.plan import Plan
from shardlab.timeline.memory import Category

KEPT_WHEN_FULL = 0.5
"""Share of what the allocator holds back that it cannot give up when there is no room: before it fails it frees the
blocks in which nothing lies (`c10/cuda/CUDACachingAllocator.cpp`, `release_cached_blocks`). An assumption; that it is
neither 0 nor 1 follows from runs that ended and runs that did not."""


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that the fullest GPU holds in a step, as they may be measured.

    Attributes:
        allocated: tensors at their peak, and buffers that stand.
        reserved: what the allocator has reserved for them.
        total: what nvidia-smi shows: with CUDA's context and NCCL's buffers.
        fits: whether all of it finds room on the device.
    """

    allocated: float
    reserved: float
    total: float
    fits: bool


def held_memory(workload: Workload, peaks: Sequence[Peak]) -> HeldMemory:
    """Reckon, as the workload's recipe says, what the fullest GPU holds at the peaks of its replay."""
    recipe, room = workload.recipe.memory, workload.cluster.device.memory
    allocated = max(peak.bytes + recipe.gradient_buffer * standing_gradients(workload, peak) for peak in peaks)
    taken = allocated
    if recipe.stream_memory:
        taken = max(peak.bytes + standing_streams(workload, peak) for peak in peaks)
    held_back = (recipe.reserved - 1) * taken
    fits = taken + KEPT_WHEN_FULL * held_back + recipe.context_bytes <= room
    reserved = min(taken + held_back, room - recipe.context_bytes) if fits else taken + held_back
    return HeldMemory(allocated, reserved, reserved + recipe.context_bytes, fits)


def standing_gradients(workload: Workload, peak: Peak) -> float:
    """Bytes of a rank's buffer of gradients that are not in it yet at the peak."""
    plan = workload.plan
    assert isinstance(plan, Plan)
    if plan.shard_gradients or plan.shard_parameters:
        return 0.0
    precision = workload.precision
    each = workload.recipe.memory.held_gradient_bytes(precision.bytes(Kind.GRAD_WEIGHT)) / precision.bytes(Kind.WEIGHT)
    all = each * peak.by_category[Category.PARAMETERS.value]
    return max(0.0, all - peak.by_category[Category.GRADIENTS.value])


def standing_streams(workload: Workload, peak: Peak) -> float:
    """Bytes of a rank that FSDP2's streams, its root group and a pipeline's messages hold beyond the peak."""
    plan, model, precision = workload.plan, workload.model, workload.precision
    assert isinstance(plan, Plan)
    if not plan.shard_parameters:
        return 0.0
    mesh = plan.mesh
    gradients = precision.bytes(Kind.GRAD_WEIGHT) / precision.optimizer * peak.by_category[Category.OPTIMIZER.value]
    embedding = precision.bytes(Kind.WEIGHT) * model.vocab_size * model.hidden_size / mesh.tp
    if mesh.pp == 1:
        summed = peak.by_category[Category.GRADIENTS.value]
        return max(0.0, gradients - summed) + 3 * embedding  # the embedding's own, and the root group's gather
    stage = mesh.coordinate(peak.rank, "pp")
    ends = stage in (0, mesh.pp - 1)
    return gradients + ends * embedding + _kept_for_messages(workload, plan, last=stage == mesh.pp - 1)


def _kept_for_messages(workload: Workload, plan: Plan, *, last: bool) -> float:
    """What a pipeline's rank keeps for messages and results (`torch/distributed/pipelining/stage.py`).

    For every microbatch and stage it receives a gradient in a buffer of its own, and an input or, once that is counted
    as what is kept, holds the stage's output. The last stage keeps all logits, and in the end puts them into one.
    """
    mesh, model = plan.mesh, workload.model
    each, tokens = workload.microbatches // plan.data_ranks, workload.micro_batch_size * model.seq_len / mesh.cp
    residual = tokens * model.hidden_size / (mesh.tp if plan.sequence_parallel else 1)
    logits = tokens * model.vocab_size / mesh.tp
    stages = plan.stages_of_a_rank(model_layers(workload.sizes).pipeline_units)
    elements = 2 * stages * residual + last * 2 * logits
    return each * elements * workload.precision.bytes(Kind.ACTIVATION)

"""Memory of the fullest device in a step, and whether the step fits.

A replay counts the bytes of tensors at their peak (`Peak`). A framework uses more memory. `device_memory` adds the
parts that the workload's recipe describes:

- Buffers that exist for the whole step. Megatron-LM allocates the buffer of all gradients once
  (`param_and_grad_buffer.py`; in earlier versions with `--DDP-impl local`).
- Memory of other streams. PyTorch's caching allocator never reuses a block of one stream for another
  (`c10/cuda/CUDACachingAllocator.cpp`), and FSDP2 gathers and reduces on separate streams
  (`torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`). So the buffer of the reduced gradients and that of the
  largest gather stay reserved while activations are at their peak. FSDP2's root group (embedding, last norm and head)
  stays gathered as a whole.
- Freed blocks that the allocator cannot reuse yet. nanotron gathers a slice's inputs on a separate stream before each
  product, frees them after it, and runs ahead of its device (`parallel/tensor_parallel/functional.py`). The allocator
  does not reuse these blocks until the device has run the product.
- Graphs of recomputed blocks. KempnerForge's routers keep the last load-balancing loss (`kempnerforge/model/
  router.py`), and with it the recomputed graph of everything before the router, with its saved tensors.
- The allocator's reserve, CUDA's context and NCCL's buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from shardlab.language import Kind, Mesh, OpKind, Sizes
from shardlab.language.precision import Optimizer, Precision
from shardlab.models import MoE
from shardlab.simulate.predict.confidence import Step, memory_margin
from shardlab.simulate.predict.estimate import Peak, peak_of
from shardlab.simulate.predict.recipe import OWN, Recipe
from shardlab.simulate.timeline.memory import Category, memory_in_bytes
from shardlab.simulate.timeline.prices import Traced, rank_of
from shardlab.strategies.plan.plan import BATCH_AXES, Plan
from shardlab.strategies.plan.rank_plan import model_layers


class MemoryInputs(Step, Protocol):
    """Attributes of a `Workload` on which the memory of its step depends."""

    @property
    def plan(self) -> Plan | Mesh: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def micro_batch_size(self) -> int: ...
    @property
    def precision(self) -> Precision: ...
    @property
    def state_precision(self) -> Precision: ...
    @cached_property
    def sizes(self) -> Sizes: ...
    @cached_property
    def kept_sizes(self) -> Sizes: ...
    @cached_property
    def traced(self) -> Traced: ...


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the fullest device in a step, as different tools measure them.

    Attributes:
        allocated: tensors at their peak, and buffers that exist for the whole step.
        reserved: bytes that the allocator has reserved for these; if the step fits, at most the device's memory.
        total: `reserved`, CUDA's context and NCCL's buffers: the figure that nvidia-smi shows.
        unlimited: `total` if the device's memory were unlimited.
        needed: smallest memory with which the step runs: `unlimited` minus what can be freed if memory is short. This
            is mostly the allocator's empty blocks, without the share that the recipe's `kept_when_full` keeps.
        capacity: memory of the device.
        safe: whether `unlimited` leaves the margin free that a chosen plan must leave (`memory_margin`).
        logged_allocated, logged: the allocated and the reserved bytes that the framework logs: those of the first rank
            if the recipe has `logs_first_rank`, or else those of the fullest device.
    """

    allocated: float
    reserved: float
    total: float
    unlimited: float
    needed: float
    capacity: float
    safe: bool
    logged_allocated: float
    logged: float

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of `total` by purpose."""
        return {
            "tensors and standing buffers": self.allocated,
            "allocator's reserve": self.reserved - self.allocated,
            "context and communicators": self.total - self.reserved,
        }

    @property
    def fits(self) -> bool:
        """Whether the step runs on the device."""
        return self.needed <= self.capacity


class ModelState(NamedTuple):
    """Bytes of the parameters, gradients and optimizer state that a rank holds."""

    parameters: float
    gradients: float
    optimizer: float


def model_state(
    plan: Plan, parameters: float, precision: Precision, recipe: Recipe = OWN, optimizer: Optimizer = "adamw"
) -> ModelState:
    """Return the model state of one rank, each part of it divided among the ranks that share it.

    Gradients are counted as kept between microbatches (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).

    Args:
        plan: the plan.
        parameters: number of parameters of the rank, before sharding.
        precision: the precision.
        recipe: the recipe, which sets the bytes of a parameter.
        optimizer: the optimizer, which sets the size of the state.
    """
    sizes, precision_in_memory = plan.mesh.sizes(), recipe.memory.state_precision(precision, plan)
    gradient = recipe.memory.held_gradient_bytes(precision_in_memory.bytes(Kind.GRAD_WEIGHT))
    bytes_per_element = (
        precision_in_memory.bytes(Kind.WEIGHT),
        gradient,
        precision_in_memory.with_optimizer(optimizer).optimizer,
    )
    axes_of_parts = plan.shard_parameters, plan.shard_gradients, plan.shard_optimizer
    return ModelState(
        *(
            bytes * parameters / math.prod(sizes[axis] for axis in axes)
            for bytes, axes in zip(bytes_per_element, axes_of_parts, strict=True)
        )
    )


def zero_plan(ranks: int, stage: int) -> Plan:
    """Return the plan of data-parallel ranks with a stage of ZeRO (0: no sharding)."""
    fields = ("shard_optimizer", "shard_gradients", "shard_parameters")[:stage]
    return Plan(Mesh(dp_shard=ranks), **dict.fromkeys(fields, ("dp_shard",) if ranks > 1 else ()))


def device_memory(inputs: MemoryInputs, peaks: Sequence[Peak] | None = None) -> DeviceMemory:
    """Return the memory of the fullest device at the peaks of a step, by the recipe.

    On CPUs the allocator reserves nothing and there is no context. `uncounted_memory` names memory that is never
    counted.

    Args:
        inputs: the inputs.
        peaks: the peak of each replayed rank (None: compute the peaks without timing the step).
    """
    recipe, capacity, on_gpu = inputs.recipe.memory, inputs.cluster.device.memory, not inputs.cluster.on_cpu
    peaks = _untimed_peaks(inputs) if peaks is None else peaks
    streams = recipe.stream_memory and on_gpu
    peak_bytes = [peak.bytes + standing_bytes(inputs, peak, streams=streams) for peak in peaks]
    used = allocated = max(peak_bytes)
    if streams:
        used = max(bytes + stream_bytes(inputs, peak) for bytes, peak in zip(peak_bytes, peaks, strict=True))
    factor = recipe.reserved if on_gpu else 1.0
    with_gathers = [factor * bytes + gather_bytes(inputs, peak) for bytes, peak in zip(peak_bytes, peaks, strict=True)]
    slack, context = (factor - 1) * used, on_gpu * recipe.context_bytes
    tp_context = recipe.tp_context_bytes if on_gpu and inputs.mesh.tp > 1 else 0.0
    needed = used + recipe.kept_when_full * (slack + tp_context) + context
    unlimited = max(used + slack, *with_gathers)
    limit = capacity - context if needed <= capacity else math.inf
    reserved, first_reserved = min(unlimited, limit), min(with_gathers[0], limit)
    safe = unlimited + tp_context + context + memory_margin(inputs.recipe, inputs.cluster, inputs.model) <= capacity
    logged = (peak_bytes[0], first_reserved) if recipe.logs_first_rank else (allocated, reserved)
    unlimited_total = unlimited + tp_context + context
    total = min(reserved + tp_context + context, max(reserved + context, capacity))
    return DeviceMemory(allocated, reserved, total, unlimited_total, needed, capacity, safe, *logged)


def uncounted_memory(inputs: MemoryInputs) -> str:
    """Return a phrase for the memory of a workload that `DeviceMemory` does not count ("": all is counted).

    Not counted: the memory through which CPU ranks of a host exchange messages. It grows with how far senders run ahead
    of receivers (`docs/launch.md`).
    """
    shares = inputs.cluster.on_cpu and inputs.mesh.world > 1
    return "without what ranks share for messages" if shares else ""


def tensor_budget(inputs: MemoryInputs) -> float:
    """Return the bytes of tensors at a rank's peak that would exactly fill the device.

    The buffers beside the tensors are assumed to keep their present size.
    """
    peaks, recipe = _untimed_peaks(inputs), inputs.recipe.memory
    memory = device_memory(inputs, peaks)
    slack = recipe.kept_when_full * (recipe.reserved - 1) if not inputs.cluster.on_cpu else 0.0
    return max(peak.bytes for peak in peaks) + (memory.capacity - memory.needed) / (1 + slack)


def _untimed_peaks(inputs: MemoryInputs) -> list[Peak]:
    traced = inputs.traced
    rows = memory_in_bytes(traced, inputs.kept_sizes)
    return [peak_of(traced, row, memory, rank_of(traced.program, row)) for row, memory in enumerate(rows)]


def gradient_buffer_bytes(inputs: MemoryInputs, peak: Peak) -> float:
    """Return the bytes of a rank's gradient buffer that are still unused at the peak."""
    if _shards(inputs, Kind.GRAD_WEIGHT) or _shards(inputs, Kind.WEIGHT):
        return 0.0
    precision = inputs.precision
    bytes_ratio = inputs.recipe.memory.held_gradient_bytes(precision.bytes(Kind.GRAD_WEIGHT)) / precision.bytes(
        Kind.WEIGHT
    )
    buffer = bytes_ratio * peak.by_category[Category.PARAMETERS.value]
    return max(0.0, buffer - peak.by_category[Category.GRADIENTS.value])


def gather_bytes(inputs: MemoryInputs, peak: Peak) -> float:
    """Return the bytes of freed inputs of sliced matrices that the allocator cannot reuse yet (`gathers_held_back`)."""
    copies = inputs.recipe.memory.gathers_held_back
    plan, model, mesh = inputs.plan, inputs.model, inputs.mesh
    if not copies or not isinstance(plan, Plan) or not plan.sequence_parallel:
        return 0.0
    stage = mesh.coordinate(peak.rank, "pp")
    layers = plan.layers_per_stage or (1,) * mesh.pp
    blocks = model.layers * sum(layers[stage :: mesh.pp]) / sum(layers)
    microbatches_held = min(inputs.microbatches // plan.data_ranks, mesh.pp - stage)
    gathered = inputs.micro_batch_size * model.seq_len / mesh.cp * model.hidden_size * (1 - 1 / mesh.tp)
    return copies * blocks * microbatches_held * gathered * inputs.precision.bytes(Kind.ACTIVATION)


def standing_bytes(inputs: MemoryInputs, peak: Peak, *, streams: bool) -> float:
    """Return the bytes of tensors that exist for the whole step and that the replay does not count.

    Args:
        streams: whether pipelines are run by `torch.distributed.pipelining`.
    """
    bytes = router_graph_bytes(inputs)
    if inputs.recipe.memory.gradient_buffer:
        bytes += gradient_buffer_bytes(inputs, peak)
    if streams and inputs.mesh.pp > 1 and _shards(inputs, Kind.WEIGHT):
        bytes += _message_buffer_bytes(inputs, last=_is_last_stage(inputs, peak))
    return bytes


def _is_last_stage(inputs: MemoryInputs, peak: Peak) -> bool:
    return inputs.mesh.coordinate(peak.rank, "pp") == inputs.mesh.pp - 1


def router_graph_bytes(inputs: MemoryInputs) -> float:
    """Return the bytes that graphs of recomputed blocks hold until the next step, for all blocks of a rank but one."""
    plan, model, mesh = inputs.plan, inputs.model, inputs.mesh
    bytes_per_element = inputs.recipe.memory.router_graph_bytes
    if not bytes_per_element or not isinstance(model, MoE) or not isinstance(plan, Plan) or plan.recompute == "none":
        return 0.0
    tokens = inputs.micro_batch_size * model.seq_len / mesh.cp / (mesh.tp if plan.sequence_parallel else 1)
    return bytes_per_element * max(0.0, model.layers / mesh.pp - 1) * tokens * model.hidden_size


def stream_bytes(inputs: MemoryInputs, peak: Peak) -> float:
    """Return the bytes that FSDP2's separate streams and its gathered root group add to a rank's peak."""
    if not _shards(inputs, Kind.WEIGHT):
        return 0.0
    mesh, model, precision = inputs.mesh, inputs.model, inputs.state_precision
    gradients = precision.bytes(Kind.GRAD_WEIGHT) / precision.optimizer * peak.by_category[Category.OPTIMIZER.value]
    whole = inputs.recipe.kernels.whole_embedding
    embedding = precision.bytes(Kind.WEIGHT) * model.vocab_size * model.hidden_size / (1 if whole else mesh.tp)
    if mesh.pp == 1:
        summed = peak.by_category[Category.GRADIENTS.value]
        return max(0.0, gradients - summed) + 3 * embedding  # the embedding's reduction, and the root group's gather
    ends = mesh.coordinate(peak.rank, "pp") == 0 or _is_last_stage(inputs, peak)
    return gradients + ends * embedding


def _message_buffer_bytes(inputs: MemoryInputs, *, last: bool) -> float:
    """Return a pipeline rank's bytes of buffers for messages and results (`torch/distributed/pipelining/stage.py`).

    Every microbatch of every stage has two buffers: one for the gradient that the stage receives, and one for its input
    or, once the input counts as a saved activation, for its output. The last stage keeps all logits, and concatenates
    them at the end of the step.
    """
    plan, mesh, model = inputs.plan, inputs.mesh, inputs.model
    microbatches = inputs.microbatches / math.prod(mesh.sizes()[axis] for axis in BATCH_AXES)
    sliced, stages = False, 1
    if isinstance(plan, Plan):
        sliced = plan.sequence_parallel
        stages = plan.stages_on_rank(model_layers(inputs.sizes).pipeline_units)
    tokens = inputs.micro_batch_size * model.seq_len / mesh.cp
    residual = tokens * model.hidden_size / (mesh.tp if sliced else 1)
    whole_logits = inputs.recipe.memory.gathers_logits or inputs.recipe.kernels.whole_piped_head
    logits = tokens * model.vocab_size / (1 if whole_logits else mesh.tp)
    elements = 2 * stages * residual + last * 2 * logits
    return microbatches * elements * inputs.precision.bytes(Kind.ACTIVATION)


def _shards(inputs: MemoryInputs, kind: Kind) -> bool:
    """Return whether parameters or gradients are sharded; for a program without a plan, judge by its collectives."""
    plan = inputs.plan
    if isinstance(plan, Plan):
        return bool(plan.shard_parameters if kind is Kind.WEIGHT else plan.shard_gradients)
    collective = OpKind.ALL_GATHER if kind is Kind.WEIGHT else OpKind.REDUCE_SCATTER
    return any(
        op.kind is collective and specs[op.outputs[0]].kind is kind
        for tape, specs in zip(inputs.traced.program.tapes, inputs.traced.specs, strict=True)
        for op in tape
    )

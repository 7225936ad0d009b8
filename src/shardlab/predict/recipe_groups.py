"""The four groups of a recipe: kernels, memory, overlap, and what is used where a run does not say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from shardlab.models import CutModel
from shardlab.models.kept import AUTOGRAD, EXECUTOR, SavedActivations, kept_activations, kept_elements, saves_residual
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.model import Model
from shardlab.program import Kind, OpKind, Sizes


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels that a framework runs, compared with a model's own, of which each is fused (`shardlab.models.kernels`).

    Attributes:
        attention: generation of fused attention kernels (see `Efficiency.attention`); PyTorch's own is "flash2".
        memory_traffic: by a pointwise kernel's name, bytes moved over those of one fused kernel: forward, backward.
        fused_accumulation: the product that makes a weight's gradient adds to the older ones.
        update_bytes: bytes that the optimizer moves for each parameter (None: as the precision says).
        cp_imbalance: 0 where every rank along `cp` attends to as much; 1 where each has one run of a causal sequence,
            so that the last attends to (2 cp - 1) / cp of the mean.
        host_seconds: of a rank's host for each product of matrices and all that is started beside it: a rank is as slow
            as its host where kernels are shorter.
        piped_host_seconds: more than `host_seconds`, for each rank along `tp` if there are several, in a pipeline over
            nodes.
        step_seconds: of each step, whatever its size: data, logs, and what an optimizer does for each parameter.
        gathered_copy_seconds: of a rank's host, when parameters have been gathered after the optimizer's step, for each
            parameter and each rank whose slice of it is copied to its place.
    """

    attention: Literal["flash1", "flash2", "cudnn"] = "flash2"
    memory_traffic: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    fused_accumulation: bool = False
    update_bytes: float | None = None
    cp_imbalance: float = 0.0
    host_seconds: float = 0.0
    piped_host_seconds: float = 0.0
    step_seconds: float = 0.0
    gathered_copy_seconds: float = 0.0

    def run(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """A model's kernels as this framework runs them."""
        return [self._run(kernel) for kernel in kernels]

    def _run(self, kernel: Kernel) -> Kernel:
        if not isinstance(kernel, Pointwise):
            return kernel
        forward, backward = self.memory_traffic.get(kernel.name, (1.0, 1.0))
        return Pointwise(kernel.name, kernel.elements * forward, kernel.back * backward)


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """What a framework keeps, and what a device holds for it beyond tensors (see `shardlab.predict.held`).

    Attributes:
        saved: what stays for the backward pass.
        logit_bytes: bytes that the loss holds for each logit at its peak, logits and gradients included (None: two
            activations).
        sliced_logit_bytes: `logit_bytes` where each tensor-parallel rank has a slice of the logits (None: the same).
        half_gradients: gradients that add up in float32 are made in half precision, and stay beside their sum.
        gradient_buffer: gradients have a buffer that stands from one step to the next.
        stream_memory: gathers and reductions allocate on streams of their own.
        reserved: bytes that the allocator reserves for each byte that is allocated at its peak, where there is room.
        kept_when_full: share of what is reserved beyond that, which the allocator cannot give up where room lacks:
            before it fails it frees the blocks in which nothing lies (`c10/cuda/CUDACachingAllocator.cpp`,
            `release_cached_blocks`).
        context_bytes: bytes that a GPU holds beyond the allocator's, as nvidia-smi shows it (CUDA's context, NCCL).
        gathers_held_back: of each block and microbatch that is kept, the gathered inputs of a slice's matrices that the
            allocator holds back for the stream that gathered them, and gives up when there is no room.
        margin_bytes: what must stay free of a device for a plan to be chosen: near full memory the allocator frees and
            asks again, and steps take several times as long.
        logs_first_rank: what the framework logs is its first rank's memory, not the fullest's.
    """

    saved: SavedActivations = AUTOGRAD
    logit_bytes: float | None = None
    sliced_logit_bytes: float | None = None
    half_gradients: bool = False
    gradient_buffer: bool = False
    stream_memory: bool = False
    reserved: float = 1.0
    kept_when_full: float = 1.0
    context_bytes: float = 0.0
    gathers_held_back: float = 0.0
    margin_bytes: float = 0.0
    logs_first_rank: bool = False

    def kept_sizes(self, model: Model, sizes: Sizes, micro_batch_size: int, slices: int) -> Sizes:
        """A model's sizes as far as memory goes: what this framework keeps, and what its loss holds.

        Args:
            slices: into how many sequence parallelism cuts a sequence.
        """
        plain = self.logit_bytes is None and not self.half_gradients
        if plain and self.saved == EXECUTOR:
            return sizes
        width = sizes.element_bytes[Kind.SAVED]
        saved = tuple(kept_elements(model, layer, micro_batch_size, self.saved, width) for layer in range(model.layers))
        if plain and self.saved == AUTOGRAD:
            return replace(sizes, saved=saved)
        saves = tuple(saves_residual(model, layer, self.saved) for layer in range(model.layers))
        activations = kept_activations(model, micro_batch_size, self.saved, slices)
        if self.logit_bytes is not None:  # of logits and their gradient, which are counted alike
            sliced = isinstance(model, CutModel) and model.vocab_slices > 1 and self.sliced_logit_bytes is not None
            each = self.sliced_logit_bytes if sliced else self.logit_bytes
            activations = (*activations[:-1], int(activations[-1] * (each or 0.0) / (2 * width)))
        bytes = dict(sizes.element_bytes)
        bytes[Kind.GRAD_WEIGHT] = self.held_gradient_bytes(bytes[Kind.GRAD_WEIGHT])
        kept = replace(sizes, saved=saved, saves_residual=saves, activations=activations, keeps_input=())
        return replace(kept, element_bytes=bytes)

    def held_gradient_bytes(self, bytes: int) -> int:
        """Bytes that are held of a gradient's element whose sum has so many bytes."""
        return bytes + 2 * (self.half_gradients and bytes == 4)

    def recomputed(self, kernels: Iterable[Kernel]) -> list[tuple[Kernel, float]]:
        """Kernels of a layer's forward pass that its backward pass runs again, each with the share of it that is run.

        torchtitan keeps every second product; ours fuse queries, keys and values, and gate and up, so half of each is
        run again.
        """
        if not self.saved.per_op:
            return []
        run: list[tuple[Kernel, float]] = []
        for kernel in kernels:
            if isinstance(kernel, Pointwise):
                run.append((kernel, 1.0))
            elif isinstance(kernel, Matmul) and kernel.learned:
                run.append((kernel, 0.5))
        return run


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How a framework communicates, and how much of that runs beside compute.

    Attributes:
        share: by axis of the mesh, the share of each collective's time that runs beside compute.
        blocking_p2p: the share of a message's time for which its sender does nothing else.
        scatter_gather_p2p: tensor-parallel ranks each send a slice, which the receivers gather (Narayanan et al. 2021,
            arXiv 2104.04473, section 4.1).
        sends_residual_only: a pipeline's message is the residual stream alone, the branch already added to it.
        allreduce_sharded_gradients: gradients that ZeRO shards are all-reduced instead of reduce-scattered.
        single_nic: collectives leave a node through one of its NICs only.
        contention: seconds that compute loses in a second in which a communication is in flight beside it.
        bucket_bytes: gradients or parameters that are communicated at once, so that small ones share a start.
        gathered_bytes: parameters that are gathered at once over the ranks that have other tokens (0: `bucket_bytes`).
        tp_seconds: that each collective along `tp` takes beyond its bytes and hops, until its ranks' hosts have come.
    """

    share: Mapping[str, float] = field(default_factory=dict[str, float])
    blocking_p2p: float = 0.0
    scatter_gather_p2p: bool = False
    sends_residual_only: bool = False
    allreduce_sharded_gradients: bool = False
    single_nic: bool = False
    contention: float = 0.0
    bucket_bytes: float = 0.0
    gathered_bytes: float = 0.0
    tp_seconds: float = 0.0

    def at_once(self, kind: OpKind) -> float:
        """Bytes of gradients, or of parameters, that are communicated at once."""
        return (kind is OpKind.ALL_GATHER and self.gathered_bytes) or self.bucket_bytes


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What a framework uses where a run does not say.

    Attributes:
        vocab_size: tokens: those of GPT-2's tokenizer.
        pads_vocab: vocabularies are padded to a multiple of 128 on every tensor-parallel rank, also where tp is 1.
        bias: the products of its GPTs have biases.
        dropout: of its GPTs.
        gradient_bytes: bytes of a gradient's element when it is reduced.
        bf16_gradient_bytes: `gradient_bytes` of gradients in bfloat16 (None: the same).
        reduce_at: when gradients are reduced (see `Plan.reduce_at`).
        sharded_reduce_at: `reduce_at` where the optimizer's state is sharded ("": the same).
        zero_stage: the least ZeRO stage that it uses.
        axes: those of the mesh that it has (empty: all); dp_replicate is replicas of ranks that share something.
        most_zero_stage: the highest ZeRO stage that it has (None: 3).
        schedules: those of a pipeline that it has (empty: all).
        stages: how blocks are dealt to pipeline stages: evenly, or by cost (see `shardlab.predict.staging`).
        microbatches_short_of_ranks: how many microbatches fewer than pipeline ranks a step of 1F1B may have (None: any
            number).
    """

    vocab_size: int = 50257
    pads_vocab: bool = False
    bias: bool = True
    dropout: float = 0.0
    gradient_bytes: int = 2
    bf16_gradient_bytes: int | None = None
    reduce_at: Literal["layer", "step"] = "layer"
    sharded_reduce_at: Literal["", "layer", "step"] = ""
    zero_stage: int = 0
    axes: tuple[str, ...] = ()
    most_zero_stage: int | None = None
    schedules: tuple[str, ...] = ()
    stages: Literal["even", "cost"] = "even"
    microbatches_short_of_ranks: int | None = None

    def lacks(self, axis: str) -> bool:
        """Whether it has no such axis of the mesh."""
        return bool(self.axes) and axis not in self.axes

    def reduction(self, *, sharded: bool) -> Literal["layer", "step"]:
        """When gradients are reduced, with or without a sharded optimizer's state."""
        return (sharded and self.sharded_reduce_at) or self.reduce_at

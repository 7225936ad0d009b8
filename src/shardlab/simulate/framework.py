"""Which kernels a training framework runs for a model's layers, what they keep, and what it lets overlap.

A model's kernels are counted as if each were fused (`shardlab.models.kernels`). A framework may run an operation as
several kernels, each of which goes through memory; keep more, or less, for the backward pass than our own executor
does; add up gradients inside the product that makes them; or let communication run beside compute that, in the
program, waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardlab.models.halves import Halves
from shardlab.models.kept import AUTOGRAD, Kept, kept_activations, kept_elements
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.model import Model
from shardlab.program import Kind, Sizes


@dataclass(frozen=True)
class Framework:
    """How a framework runs a step; the default is our own executor on fused kernels.

    Attributes:
        name: how it is asked for.
        source: where its choices are described.
        attention: the generation of fused attention kernels (see `Efficiency.attention`; "": the device's own choice).
        passes: by a pointwise kernel's name, how often it moves what the fused kernel moves: forward, backward.
        kept: what stays for the backward pass.
        fused_accumulation: whether the product that makes a weight's gradient adds to the older ones.
        logit_bytes: what the loss holds for each logit at its peak, logits and gradients included (0: two activations).
        sliced_logit_bytes: the same where each tensor-parallel rank has a slice of the logits (0: as otherwise).
        half_gradients: whether gradients that add up in float32 are made in half precision, and stay beside their sum.
        hidden: by axis of the mesh, the share of each collective's time that the framework hides behind compute.
        blocking_p2p: the share of a message's time for which its sender does nothing else.
        scatters_messages: whether tensor-parallel ranks each send a slice, which the receivers gather (Narayanan et al.
            2021, arXiv 2104.04473, section 4.1).
        carries_sum: whether a pipeline's message is the residual stream alone, the branch already added to it.
        all_reduces: whether gradients that ZeRO shards are all-reduced, instead of reduce-scattered.
        one_card: whether collectives leave a node through one of its cards only.
        contention: seconds that compute loses in a second in which a communication is in flight beside it.
        attends: what the busiest rank along `cp` attends to, against their mean: 1 where slices are balanced, and
            (2 cp - 1) / cp where each has one run of a causal sequence.
        update_bytes: that the optimizer moves for each parameter (0: as the precision says).
        bucket: bytes of gradients or parameters that are communicated at once, so that small ones share a start.
    """

    name: str = "shardlab"
    source: str = "shardlab's own executor"
    attention: str = ""
    passes: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    kept: Kept = AUTOGRAD
    fused_accumulation: bool = False
    logit_bytes: float = 0.0
    sliced_logit_bytes: float = 0.0
    half_gradients: bool = False
    hidden: Mapping[str, float] = field(default_factory=dict[str, float])
    blocking_p2p: float = 0.0
    scatters_messages: bool = False
    carries_sum: bool = False
    all_reduces: bool = False
    one_card: bool = False
    contention: float = 0.0
    attends: float = 1.0
    bucket: float = 0.0
    update_bytes: float = 0.0

    def kernels(self, kernels: Iterable[Kernel]) -> list[Kernel]:
        """A model's kernels as this framework runs them."""
        return [self._run(kernel) for kernel in kernels]

    def _run(self, kernel: Kernel) -> Kernel:
        if not isinstance(kernel, Pointwise):
            return kernel
        forward, backward = self.passes.get(kernel.name, (1.0, 1.0))
        return Pointwise(kernel.name, kernel.elements * forward, kernel.back * backward)

    def kept_sizes(self, model: Model, sizes: Sizes, rows: int, slices: int) -> Sizes:
        """A model's sizes as far as memory goes: what this framework keeps, and what its loss holds.

        Args:
            slices: into how many sequence parallelism cuts a sequence.
        """
        if self.kept == AUTOGRAD and not (self.logit_bytes or self.half_gradients):
            return sizes
        width = sizes.element_bytes[Kind.SAVED]
        saved = tuple(kept_elements(model, layer, rows, self.kept, width) for layer in range(model.layers))
        activations = kept_activations(model, rows, self.kept, slices)
        if self.logit_bytes:  # of logits and their gradient, which are counted alike
            sliced = isinstance(model, Halves) and model.slices > 1 and self.sliced_logit_bytes
            logits = int(activations[-1] * (sliced or self.logit_bytes) / (2 * width))
            activations = (*activations[:-1], logits)
        bytes = dict(sizes.element_bytes)
        bytes[Kind.GRAD_WEIGHT] = self.kept_of_gradient(bytes[Kind.GRAD_WEIGHT])
        return replace(sizes, saved=saved, activations=activations, element_bytes=bytes)

    def kept_of_gradient(self, bytes: int) -> int:
        """Of a gradient's element that is summed in so many bytes, how many are held."""
        return bytes + 2 * (self.half_gradients and bytes == 4)

    def recomputed(self, kernels: Iterable[Kernel]) -> list[tuple[Kernel, float]]:
        """Of a layer's forward pass, what the backward pass runs again, each with the share of it that is run.

        Every second product of torchtitan's is kept; here some are one product of several, so half of each is.
        """
        if not self.kept.per_op:
            return []
        run: list[tuple[Kernel, float]] = []
        for kernel in kernels:
            if isinstance(kernel, Pointwise):
                run.append((kernel, 1.0))
            elif isinstance(kernel, Matmul) and kernel.learned:
                run.append((kernel, 0.5))
        return run


OWN = Framework()
"""Shardlab's own executor."""

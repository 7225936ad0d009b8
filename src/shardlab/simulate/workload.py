"""A strategy on a model and a cluster: from names to a replay in seconds and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from shardlab.hardware import Cluster
from shardlab.models import Blocks, Model
from shardlab.models.fit import cut_for
from shardlab.program import Mesh, Sizes
from shardlab.simulate.estimate import Estimate, estimate
from shardlab.simulate.folding import fold
from shardlab.simulate.memory import memory_in_bytes
from shardlab.simulate.precision import Precision
from shardlab.simulate.priced import ClusterPrices
from shardlab.simulate.traced import Traced
from shardlab.strategies.plan import Plan

Trace = Callable[[Mesh, Sizes, int], Traced]
"""Mesh, sizes and microbatches to a checked program."""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        plan: how the model is laid over the ranks; or the mesh of a program of its own.
        model: what is trained, whole.
        cluster: on what.
        microbatches: of the global batch.
        rows: sequences of a microbatch.
        precision: in which numbers.
        trace: what traces a program of its own; plans are folded.
    """

    plan: Plan | Mesh
    model: Blocks
    cluster: Cluster
    microbatches: int
    rows: int
    precision: Precision
    trace: Trace | None = None

    @property
    def mesh(self) -> Mesh:
        return self.plan if isinstance(self.plan, Mesh) else self.plan.mesh

    @cached_property
    def cut(self) -> Model:
        """The model in the program's layers."""
        if isinstance(self.plan, Mesh):
            return cut_for(self.model, self.plan)
        return cut_for(self.model, self.mesh, planned=True, half_blocks=self.plan.half_blocks)

    @cached_property
    def traced(self) -> Traced:
        """The program's tapes.

        Raises:
            Refused: for a wrong program.
            UserError: for sizes that do not go together.
        """
        sizes = self.precision.sizes(self.cut.sizes(self.rows, self.precision.activations))
        if isinstance(self.plan, Mesh):
            assert self.trace is not None, "a program of its own says how it is traced"
            return self.trace(self.plan, sizes, self.microbatches)
        return fold(self.plan, sizes, self.microbatches)

    def estimate(self) -> Estimate:
        """Replay it.

        Raises:
            UserError: if there are more ranks than devices, or the device does not compute in the precision's dtype.
        """
        self.cluster.require(self.mesh.world)
        self.cluster.device.peak(self.precision.compute)
        cluster = self.cluster.at_work(self.mesh.world)
        return estimate(self.traced, ClusterPrices(self.cut, self.rows, cluster, self.precision))

    def peak_bytes(self) -> int:
        """The most that any rank holds, without asking how long anything takes."""
        return max(memory.peak for memory in memory_in_bytes(self.traced))

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.rows * self.model.block

    @property
    def flops(self) -> float:
        """The model's FLOPs in a step: products of matrices, forward and twice as many backward, attention as a whole
        square, nothing for what is computed again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
        forward = sum(self.model.forward_flops(layer) for layer in range(self.model.layers))
        return 3.0 * forward * self.microbatches * self.rows

    def mfu(self, step: float) -> float:
        """Model FLOPs utilization: those FLOPs, of what all ranks' devices could do in a step of so many seconds."""
        return self.flops / (step * self.mesh.world * self.cluster.device.peak(self.precision.compute))

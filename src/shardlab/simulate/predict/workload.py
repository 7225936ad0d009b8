"""A strategy on a model and a cluster: from names to a replay in seconds and bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, Sizes, UserError, trace
from shardlab.language.pass_names import want_norm
from shardlab.language.precision import Optimizer, Precision
from shardlab.language.world import gc_paused
from shardlab.models import Blocks, Model, cut_for
from shardlab.models.cutting import Repeated, sampled
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.passes import GAIN, Goal, Passed, find_passes, run_named, run_passes
from shardlab.simulate.predict.estimate import Estimate, estimate
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.memory import tensor_budget
from shardlab.simulate.predict.prices import ClusterPrices
from shardlab.simulate.predict.recipe import OWN, Recipe
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.simulate.timeline.prices import Traced
from shardlab.simulate.timeline.timeline import Timeline
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan

Trace = Callable[[Mesh, Sizes, int], Checked]
"""Mesh, sizes and microbatches to a checked program."""


@dataclass(frozen=True)
class Workload:
    """One step.

    Attributes:
        plan: how the model is laid over the ranks; or the mesh of a program of its own.
        model: what is trained, whole.
        cluster: on what.
        microbatches: of the global batch.
        micro_batch_size: sequences of a microbatch.
        precision: in which numbers.
        trace: what traces and checks the program of all ranks; without it, a plan's alike ranks are folded.
        recipe: how the framework that runs it does so.
        columns: whether that program wants every matrix cut by columns.
        optimizer: what makes a step of a gradient, which says how large its state is.
        ema: whether an average of the weights is part of that.
        passes: what rewrites the program, by name (None: what the plan says, or else nothing); see `Plan.passes`.
        tiles: in how many tiles each rank may compute a layer, as the pass `tile` wants it cut.
        clips: whether programs that can clip compute the gradient's norm; not if `passes` say otherwise.
    """

    plan: Plan | Mesh
    model: Blocks
    cluster: Cluster
    microbatches: int
    micro_batch_size: int
    precision: Precision
    trace: Trace | None = None
    columns: bool = False
    recipe: Recipe = OWN
    optimizer: Optimizer = "adamw"
    ema: bool = False
    passes: str | None = None
    tiles: int = 1
    clips: bool = True

    @property
    def mesh(self) -> Mesh:
        return self.plan if isinstance(self.plan, Mesh) else self.plan.mesh

    @cached_property
    def cut(self) -> Model:
        """The model in the program's layers."""
        if isinstance(self.plan, Mesh):
            return cut_for(self.model, self.plan, columns=self.columns, tiles=self.tiles)
        return cut_for(
            self.model,
            self.mesh,
            planned=True,
            attention_apart=self.plan.attention_apart,
            ulysses=self.plan.ulysses,
            tiles=self.tiles,
        )

    @cached_property
    def traced(self) -> Traced:
        """The program's tapes, as its passes leave them.

        Raises:
            Refused: for a wrong program.
            UserError: for sizes that do not go together, or a pass that cannot apply.
        """
        if self.pass_names != "none":
            return self.passed[-1].checked
        if self.trace is not None:
            return self.trace(self.mesh, self.sizes, self.microbatches)
        assert isinstance(self.plan, Plan), "a program of its own says how it is traced"
        self.plan.require_ops(self.model.layers, self.microbatches, folded=True)  # before sizes are made of each layer
        return fold(self.plan, self.sizes, self.microbatches)

    @property
    def pass_names(self) -> str:
        """What rewrites the program, by name."""
        if self.passes is not None:
            return self.passes
        return (self.plan.passes or "none") if isinstance(self.plan, Plan) else "none"

    @cached_property
    def passed(self) -> list[Passed]:
        """The program of all ranks as it was written, and as each pass left it, for the cluster's prices and memory."""
        return self.rewritten(self.pass_names)

    def rewritten(
        self, names: str, most: float = math.inf, *, least: float = GAIN, lenient: bool = False
    ) -> list[Passed]:
        """The program of all ranks as it was written, and as each of other passes left it.

        Args:
            names: of the passes (see `find_passes`).
            most: ops of rewritten programs that are looked at (see `Goal`).
            least: the share of a step that a pass must gain (see `Goal`).
            lenient: leave passes out that are named and have nothing to do.

        Raises:
            Refused: for a wrong program.
            UserError: for sizes that do not go together, or a pass that is named and has nothing to do.
        """
        written = replace(self, passes="none", clips=want_norm(names), trace=self.trace or self._whole)
        assert isinstance(written.traced, Checked)
        goal = Goal(self.prices, tensor_budget(written), self.kept_sizes, most, least)
        if lenient:
            return run_passes(written.traced, find_passes(names), goal)
        return run_named(written.traced, names, goal)

    def _whole(self, mesh: Mesh, sizes: Sizes, microbatches: int) -> Checked:
        """A plan's program of every rank."""
        assert isinstance(self.plan, Plan), "a program of its own says how it is traced"
        try:
            self.plan.require_ops(self.model.layers, microbatches)
        except UserError as error:
            raise UserError(f"passes want the program of every rank: {error}") from None
        return check(trace(program_from_plan(self.plan), mesh, sizes, microbatches))

    @cached_property
    def sizes(self) -> Sizes:
        """Elements and bytes of the program's values."""
        if isinstance(self.plan, Plan) and self.sample.model.layers < self.model.layers:
            return self.repeated.sizes(self.sample.sizes)
        elements = self.cut.sizes(self.micro_batch_size, self.precision.bytes(Kind.ACTIVATION))
        clips = self.clips and want_norm(self.pass_names)
        sizes = self.precision.sizes(elements, self.optimizer, ema=self.ema, clips=clips)
        return self.plan.counted(sizes) if isinstance(self.plan, Plan) else sizes

    @cached_property
    def sample(self) -> Workload:
        """Take few of the model's blocks, which are all alike."""
        return replace(self, model=sampled(self.model))

    @cached_property
    def repeated(self) -> Repeated:
        """The program's layers, each like one of the sample's."""
        return Repeated(self.sample.cut, self.model.layers - self.sample.model.layers)

    def require(self) -> None:
        """Refuse more ranks than devices, and a device that does not compute in the precision's dtype.

        Raises:
            UserError: with what does not go together.
        """
        self.cluster.require(self.mesh.world)
        self.cluster.device.peak(self.precision.compute)
        if isinstance(self.plan, Plan):
            self.plan.require_ops(self.model.layers, self.microbatches, folded=True)

    def estimate(self) -> Estimate:
        """Replay it.

        Raises:
            UserError: if it is refused (see `require`).
        """
        self.require()
        with gc_paused():  # from the first op to the last figure
            made = estimate(self.traced, self.prices, self.kept_sizes, self.cut.place)
        return replace(made, beside=self.beside)

    @property
    def beside(self) -> float:
        """Seconds of the step beside its ops: what the recipe says of any step, and, where parameters are gathered
        after the optimizer's step, copies of each rank's slice of each parameter of a pipeline's mean rank."""
        kernels, plan = self.recipe.kernels, self.plan
        if not isinstance(plan, Plan) or not kernels.gathered_copy_seconds:
            return kernels.step_seconds
        sizes = self.mesh.sizes()
        axes = set(plan.shard_optimizer).difference(plan.shard_parameters)
        ranks = math.prod(sizes[axis] for axis in axes)
        copies = ranks * self.model.parameter_tensors / self.mesh.pp if ranks > 1 else 0.0
        return kernels.step_seconds + kernels.gathered_copy_seconds * copies

    def timeline(self, traced: Traced) -> Timeline:
        """The step of a program of this workload, such as a pass has left, in seconds and bytes."""
        return estimate(traced, self.prices, self.kept_sizes).timeline()

    @property
    def kept_sizes(self) -> Sizes:
        """How large values are in memory, as the recipe keeps them."""
        sequence_parallel = isinstance(self.plan, Plan) and self.plan.sequence_parallel
        slices = self.mesh.tp if sequence_parallel else 1
        return self.recipe.memory.kept_sizes(self.cut, self.sizes, self.micro_batch_size, slices)

    @property
    def prices(self) -> ClusterPrices:
        """Prices of its ops, in seconds."""
        cluster = self.cluster.at_work(self.mesh.world)
        if self.recipe.overlap.single_nic:
            cluster = replace(cluster, nics=1)
        cluster = replace(cluster, device=replace(cluster.device, attention=self.recipe.kernels.attention))
        numbers = self.precision.under(self.optimizer, ema=self.ema)
        return ClusterPrices(self.cut, self.micro_batch_size, cluster, numbers, self.recipe, self.mesh)

    def peak_bytes(self) -> int:
        """The most that any rank holds, without asking how long anything takes."""
        return max(memory.peak for memory in memory_in_bytes(self.traced, self.kept_sizes))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.micro_batch_size * self.model.seq_len

    @property
    def flops(self) -> float:
        """The model's FLOPs in a step: products of matrices, forward and twice as many backward, attention as a whole
        square, nothing for what is computed again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)."""
        forward = sum(self.model.forward_flops(layer) for layer in range(self.model.layers))
        return 3.0 * forward * self.microbatches * self.micro_batch_size

    def mfu(self, step: float) -> float:
        """Model FLOPs utilization: those FLOPs, of what all ranks' devices could do in a step of so many seconds."""
        return self.flops / (step * self.mesh.world * self.cluster.device.peak(self.precision.compute))

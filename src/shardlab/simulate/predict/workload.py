"""A workload: one training step of a plan or program, for a model on a cluster.

`Workload` has the inputs of a step and derives everything else from them, each once: the model cut into the program's
layers (`cut`), the sizes of its values (`sizes`), the traced program (`traced`), prices of its ops (`prices`), and the
replay in seconds and bytes (`estimate`). A plan's identical ranks are folded, and sizes are computed on a `sample` of
the model's blocks, so that large models take no longer than small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from shardlab.check import Checked, check
from shardlab.language import Kind, Mesh, Sizes, UserError, trace
from shardlab.language.pass_names import needs_norm
from shardlab.language.precision import Optimizer, Precision
from shardlab.language.world import gc_paused
from shardlab.models import Blocks, Model, cut_for
from shardlab.models.cutting import Repeated, sampled
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.passes import GAIN, Goal, PassResult, find_passes, run_named, run_passes
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
"""Function of (mesh, sizes, microbatches) that traces and checks a program."""


@lru_cache(maxsize=64)
def _cut_for_plan(model: Blocks, mesh: Mesh, attention_apart: bool, ulysses: int, tiles: int) -> Model:
    """Return a model, cut into a plan's layers. Cached, since plans of a search share it."""
    return cut_for(model, mesh, planned=True, attention_apart=attention_apart, ulysses=ulysses, tiles=tiles)


@lru_cache(maxsize=64)
def _sizes_for_plan(cutting: tuple[Blocks, Mesh, bool, int, int], micro_batch_size: int, bytes: int) -> Sizes:
    """Return the elements of the values of a model, cut into a plan's layers."""
    return _cut_for_plan(*cutting).sizes(micro_batch_size, bytes)


@dataclass(frozen=True)
class Workload:
    """One training step of a model on a cluster.

    Attributes:
        plan: the plan; for a program without a plan, its mesh.
        model: the whole model.
        cluster: devices and links.
        microbatches: microbatches of the global batch.
        micro_batch_size: sequences of a microbatch.
        precision: dtypes and bytes of weights, gradients and optimizer state.
        trace: function that traces and checks the program of all ranks (None: trace the plan, with its identical ranks
            folded).
        columns: whether the program of `trace` needs every matrix cut by columns.
        recipe: how the framework runs the step.
        optimizer: the optimizer, which sets the size of the state.
        ema: whether the optimizer state includes an exponential moving average of the weights.
        passes: names of the tape passes (None: those of the plan, if it names any).
        tiles: number of tiles of a layer, for the pass `tile`.
        clips: whether programs that can clip the gradient compute its norm. They do not if the tape passes exclude it
            (see `needs_norm`).
    """

    plan: Plan | Mesh
    model: Blocks
    cluster: Cluster = field(repr=False)
    microbatches: int
    micro_batch_size: int
    precision: Precision
    trace: Trace | None = field(default=None, repr=False)
    columns: bool = False
    recipe: Recipe = field(default=OWN, repr=False)
    optimizer: Optimizer = "adamw"
    ema: bool = False
    passes: str | None = None
    tiles: int = 1
    clips: bool = True

    @property
    def mesh(self) -> Mesh:
        return self.plan if isinstance(self.plan, Mesh) else self.plan.mesh

    @property
    def state_precision(self) -> Precision:
        """The precision with the bytes of parameters and optimizer state in the recipe's framework."""
        return self.recipe.memory.state_precision(self.precision, self.plan)

    @cached_property
    def cut(self) -> Model:
        """The model, cut into the program's layers."""
        if isinstance(self.plan, Mesh):
            return cut_for(self.model, self.plan, columns=self.columns, tiles=self.tiles)
        return _cut_for_plan(*self._cutting)

    @property
    def _cutting(self) -> tuple[Blocks, Mesh, bool, int, int]:
        """Arguments of `_cut_for_plan`."""
        assert isinstance(self.plan, Plan)
        mesh = replace(self.mesh, pp=min(2, self.mesh.pp), dp_replicate=1, dp_shard=1)
        return self.model, mesh, self.plan.attention_apart, self.plan.ulysses, self.tiles

    @cached_property
    def traced(self) -> Traced:
        """The traced program after its passes.

        Raises:
            Refused: if the program is wrong.
            UserError: if sizes are inconsistent, or a pass cannot be applied.
        """
        if self.pass_names != "none":
            return self.pass_results[-1].checked
        if self.trace is not None:
            return self.trace(self.mesh, self.sizes, self.microbatches)
        assert isinstance(self.plan, Plan), "a program of its own says how it is traced"
        self.plan.require_ops(self.model.layers, self.microbatches, folded=True)  # before `sizes`, which take long
        return fold(self.plan, self.sizes, self.microbatches)

    @property
    def pass_names(self) -> str:
        """Names of the tape passes."""
        if self.passes is not None:
            return self.passes
        return (self.plan.passes or "none") if isinstance(self.plan, Plan) else "none"

    @cached_property
    def pass_results(self) -> list[PassResult]:
        """The original program of all ranks, and the program after each pass."""
        return self.rewritten(self.pass_names)

    def rewritten(
        self, names: str, max_ops: float = math.inf, *, least_gain: float = GAIN, lenient: bool = False
    ) -> list[PassResult]:
        """Return the original program of all ranks, and the program after each of the named passes.

        Args:
            names: names of the passes (see `find_passes`).
            max_ops: largest number of ops of replayed candidates (see `Goal`).
            least_gain: smallest share of a step that a pass must gain (see `Goal`).
            lenient: skip a named pass that has nothing to do.

        Raises:
            Refused: if the program is wrong.
            UserError: if sizes are inconsistent, or a named pass has nothing to do and `lenient` is not set.
        """
        original = replace(self, passes="none", clips=needs_norm(names), trace=self.trace or self._whole)
        assert isinstance(original.traced, Checked)
        goal = Goal(self.prices, tensor_budget(original), self.kept_sizes, max_ops, least_gain)
        if lenient:
            return run_passes(original.traced, find_passes(names), goal)
        return run_named(original.traced, names, goal)

    def _whole(self, mesh: Mesh, sizes: Sizes, microbatches: int) -> Checked:
        """Trace and check a plan's program of every rank."""
        assert isinstance(self.plan, Plan), "a program of its own says how it is traced"
        try:
            self.plan.require_ops(self.model.layers, microbatches)
        except UserError as error:
            raise UserError(f"passes need the program of every rank: {error}") from None
        return check(trace(program_from_plan(self.plan), mesh, sizes, microbatches))

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the program's values, in elements and bytes."""
        if isinstance(self.plan, Plan) and self.sample.model.layers < self.model.layers:
            return self.repeated.sizes(self.sample.sizes)
        counts = self.micro_batch_size, self.precision.bytes(Kind.ACTIVATION)
        shared = isinstance(self.plan, Plan) and self.cut is _cut_for_plan(*self._cutting)
        elements = _sizes_for_plan(self._cutting, *counts) if shared else self.cut.sizes(*counts)
        clips = self.clips and needs_norm(self.pass_names)
        sizes = self.state_precision.sizes(elements, self.optimizer, ema=self.ema, clips=clips)
        for layer in self.recipe.kernels.whole_layers(self.mesh, self.cut.layers):
            sizes = sizes.with_copies(layer, self.mesh.tp)
        return self.plan.counted(sizes) if isinstance(self.plan, Plan) else sizes

    @cached_property
    def sample(self) -> Workload:
        """This workload with few of the model's blocks."""
        return replace(self, model=sampled(self.model))

    @cached_property
    def repeated(self) -> Repeated:
        """Map from the program's layers to identical layers of the sample."""
        return Repeated(self.sample.cut, self.model.layers - self.sample.model.layers)

    def require(self) -> None:
        """Raise an error if the workload cannot run on its cluster.

        Raises:
            UserError: if there are more ranks than devices, or the device does not compute in the precision's dtype.
        """
        self.cluster.require(self.mesh.world)
        self.cluster.device.peak(self.precision.compute)
        if isinstance(self.plan, Plan):
            self.plan.require_ops(self.model.layers, self.microbatches, folded=True)

    def estimate(self) -> Estimate:
        """Replay the step in seconds and bytes.

        Raises:
            UserError: if the workload cannot run on its cluster (see `require`).
        """
        self.require()
        with gc_paused():  # from the first op to the last figure
            replayed = estimate(self.traced, self.prices, self.kept_sizes, self.cut.place)
        return replace(replayed, seconds_outside_ops=self.seconds_outside_ops)

    @property
    def seconds_outside_ops(self) -> float:
        """Seconds of the step that belong to no op, from the recipe.

        Every step takes the recipe's `step_seconds`. If parameters are gathered after the optimizer's step, the host
        copies each rank's slice of each parameter. The parameters count as evenly distributed over pipeline ranks.
        """
        kernels, plan = self.recipe.kernels, self.plan
        if not isinstance(plan, Plan) or not kernels.gathered_copy_seconds:
            return kernels.step_seconds
        sizes = self.mesh.sizes()
        axes = set(plan.shard_optimizer).difference(plan.shard_parameters)
        ranks = math.prod(sizes[axis] for axis in axes)
        copies = ranks * self.model.parameter_tensors / self.mesh.pp if ranks > 1 else 0.0
        return kernels.step_seconds + kernels.gathered_copy_seconds * copies

    def timeline(self, traced: Traced) -> Timeline:
        """Return the timeline of a program of this workload, such as the program after a pass."""
        return estimate(traced, self.prices, self.kept_sizes).timeline()

    @cached_property
    def kept_sizes(self) -> Sizes:
        """Sizes of values in memory, by the recipe."""
        sequence_parallel = isinstance(self.plan, Plan) and self.plan.sequence_parallel
        slices = self.mesh.tp if sequence_parallel else 1
        return self._recomputing.memory.kept_sizes(self.cut, self.sizes, self.micro_batch_size, slices)

    @property
    def _recomputing(self) -> Recipe:
        """The recipe, with the saved activations that remain if the plan recomputes values inside blocks."""
        if not isinstance(self.plan, Plan) or not (recomputed := self.plan.recompute_inside):
            return self.recipe
        memory = self.recipe.memory
        return replace(self.recipe, memory=replace(memory, saved=replace(memory.saved, again=recomputed)))

    @cached_property
    def prices(self) -> ClusterPrices:
        """Prices of the program's ops, in seconds."""
        cluster = self.cluster.at_work(self.mesh.world)
        if self.recipe.overlap.single_nic:
            cluster = replace(cluster, nics=1)
        cluster = replace(cluster, device=replace(cluster.device, attention=self.recipe.kernels.attention))
        recipe, plan = self._recomputing, self.plan
        if isinstance(plan, Plan) and plan.shard_gradients:
            share = {**recipe.overlap.share, **recipe.overlap.sharded_share}
            overlap = replace(recipe.overlap, share=share, allreduce_sharded_gradients=False)
            recipe = replace(recipe, overlap=overlap)
        if self.mesh.ep == 1:  # no rank waits for another's experts
            recipe = replace(recipe, kernels=replace(recipe.kernels, expert_load=1.0))
        numbers = self.state_precision.with_optimizer(self.optimizer, ema=self.ema)
        return ClusterPrices(self.cut, self.micro_batch_size, cluster, numbers, recipe, self.mesh)

    def peak_bytes(self) -> int:
        """Return the bytes of tensors on the fullest rank at its peak, without timing the step."""
        return max(memory.peak for memory in memory_in_bytes(self.traced, self.kept_sizes))

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.micro_batch_size * self.model.seq_len

    @property
    def flops(self) -> float:
        """Model FLOPs of a step (Chowdhery et al. 2022, arXiv 2204.02311, appendix B).

        Only matrix products count: once in the forward pass, and twice in the backward pass. Attention counts as a
        whole square, without a causal mask. Recomputation does not count.
        """
        forward = sum(self.model.forward_flops(layer) for layer in range(self.model.layers))
        return 3.0 * forward * self.microbatches * self.micro_batch_size

    def mfu(self, step: float) -> float:
        """Return the model FLOPs utilization: the share of all devices' peak FLOPs in a step of `step` seconds."""
        return self.flops / (step * self.mesh.world * self.cluster.device.peak(self.precision.compute))

"""Plan of one rank: its layers, slices of weights, steps and collectives.

`RankPlan` is the result of `resolve`, with a `LayerPlan` for each layer and a `WeightPlan` for each weight.
`ModelLayers` answers a plan's questions about a model: at which layers a pipeline may split it, which blocks can be
recomputed, and which axes can slice a layer.

The protocols at the end are the interface between the program of a plan and its rank. Two classes implement `PlanRank`:
`shardlab.language.Rank`, which is traced, and the rank of compressed steps, which records seconds and bytes. A verb
that one of them lacks is a type error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

from shardlab.common.text import counted
from shardlab.language import Group, Sizes, UserError
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.layer_graph import Layer
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules.steps import ReduceGrad, ShardedStep, Unshard

Keeps = Literal["all", "input", "nothing"]
"""Values that a forward pass keeps for the backward pass: everything, only its input, or nothing."""


@dataclass(frozen=True)
class RankPlan:
    """Plan with all details of one rank, as `resolve` returns it.

    Attributes:
        plan, model: the plan and the layers of the model.
        steps: steps of the rank in the schedule, in order.
        microbatches: this rank's microbatches of the global batch.
        sequence_slices: this rank's slices of every sequence (None: whole sequences).
        pipeline: the ranks of this pipeline, in order.
        stages: the layers of every stage of the pipeline.
        own_stages: numbers of this rank's stages.
        layers: plans of this rank's layers.
        weights: plans of the weights that this rank stores, by the layer that owns the weight.
        weightless: this rank's layers without parameters.
        frozen: layers of the model whose weights are not trained.
        training: ranks of this pipeline that train weights.
        gather_axes: axes over which weights are gathered before use, in order.
        scatter_axes: axes over which gradients are reduce-scattered; over other axes they are all-reduced.
        update_axes: axes over which weights are gathered after the update, in order.
        reduction_buffer: largest number of gradient elements that may be in reduction over one axis at once.
    """

    plan: Plan
    model: ModelLayers
    steps: tuple[ShardedStep, ...]
    microbatches: range
    sequence_slices: tuple[int, ...] | None
    pipeline: tuple[int, ...]
    stages: tuple[range, ...]
    own_stages: tuple[int, ...]
    layers: Mapping[int, LayerPlan]
    weights: Mapping[int, WeightPlan]
    weightless: tuple[int, ...]
    frozen: frozenset[int]
    training: tuple[int, ...]
    gather_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
    update_axes: tuple[str, ...]
    reduction_buffer: int

    @property
    def explicit_gathers(self) -> bool:
        """Whether the schedule has steps that gather and free weights."""
        return Unshard in map(type, self.steps)

    @property
    def explicit_reductions(self) -> bool:
        """Whether the schedule has steps that reduce gradients."""
        return ReduceGrad in map(type, self.steps)

    @property
    def trained(self) -> Mapping[int, WeightPlan]:
        """Plans of the weights that this rank stores and trains, by the layer that owns the weight."""
        return {l: weight for l, weight in self.weights.items() if l not in self.frozen}

    def weight_of(self, layer: int) -> int:
        """Return the layer that owns the weight which a layer uses."""
        return self.model.layers[layer].weight

    def backward_order(self, stage: int) -> Iterator[int]:
        """Yield the layers of a stage in the order of its backward pass, each after the layers that it recomputes."""
        for layer in reversed(self.stages[stage]):
            yield from self.layers[layer].recompute
            yield layer


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one layer on one rank.

    Attributes:
        completions: collectives before and after the layer.
        part: (index, count) of the part of the experts to which a router dispatches tokens (None: all experts, or the
            layer is not a router).
        keeps: values that its forward pass keeps for the backward pass.
        recompute: layers whose forward pass runs again before this layer's backward pass, in order. The layer itself is
            included unless its backward pass recomputes by itself.
    """

    completions: Completions
    part: tuple[int, int] | None = None
    keeps: Keeps = "all"
    recompute: range = range(0)


@dataclass(frozen=True)
class WeightPlan:
    """Slices of a weight on one rank, and the axes over which its gradient is reduced.

    Attributes:
        users: number of this rank's layers that use the weight.
        cut_axes: axes of tensor, context or expert parallelism that slice the parameters, before they are sharded.
        parameters, optimizer: (index, count) of the rank's slices of the weight and of the optimizer state.
        elements: number of elements of the gradient before it is sharded.
        reduce_every_microbatch: axes over which each microbatch's gradient is reduced. Axes that scatter come first.
        reduce_once: axes over which the sum over microbatches is reduced.
        direction_axes: axes over which the direction of the update is gathered, in order (empty: the optimizer works on
            elements, or the rank has whole matrices).
        shared_by: ranks of this pipeline that have replicas of the weight and sum their gradients once a step.
        counted: whether this rank adds the weight to the gradient norm. One of the ranks in `shared_by` does.
    """

    users: int
    cut_axes: tuple[str, ...]
    parameters: tuple[int, int]
    optimizer: tuple[int, int]
    elements: int
    reduce_every_microbatch: tuple[str, ...]
    reduce_once: tuple[str, ...]
    direction_axes: tuple[str, ...]
    shared_by: tuple[int, ...]
    counted: bool


Verb = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice"]


class Completion(NamedTuple):
    """Collective that completes an input or output of a layer.

    Attributes:
        verb: method of the rank; `slice` does not communicate.
        axis: mesh axis of the group.
    """

    verb: Verb
    axis: str


class Completions(NamedTuple):
    """Collectives before and after a layer, in order.

    Attributes:
        input, output: collectives on the first input and the first output in the forward pass.
        grad_output: collectives on the gradient of the first output, before the layer's backward pass.
        grad_input: collectives on the gradient of the first input, after the layer's backward pass.
    """

    input: tuple[Completion, ...] = ()
    output: tuple[Completion, ...] = ()
    grad_output: tuple[Completion, ...] = ()
    grad_input: tuple[Completion, ...] = ()


def model_layers(sizes: Sizes) -> ModelLayers:
    """Return the layers of a model. Models of the same shape share one object."""
    return _model_layers(sizes.signatures, sizes.blocks)


@dataclass(frozen=True)
class ModelLayers:
    """Layers of a model, and the questions that a plan asks about them.

    Attributes:
        layers: signature of each layer: its inputs, outputs, and the layer that owns its weight.
        blocks: first layer of each block, and the end of the last block (empty: each layer is a block).
    """

    layers: tuple[Layer, ...]
    blocks: tuple[int, ...]

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Layers that use each weight, by the layer that owns it."""
        users: dict[int, tuple[int, ...]] = {}
        for number, layer in enumerate(self.layers):
            users[layer.weight] = (*users.get(layer.weight, ()), number)
        return users

    def cut_axes(self, layer: int) -> tuple[str, ...]:
        """Return the mesh axes that may slice a layer's parameters, outermost first.

        The ranks of `cp` split the experts too. Otherwise all of them would repeat the same work.
        """
        return self._cut_axes[layer]

    @cached_property
    def feeding_attention(self) -> frozenset[int]:
        """Layers that output queries, keys and values. Attention runs between each of them and the next layer."""
        return frozenset(l for l, layer in enumerate(self.layers) if layer.projects)

    @cached_property
    def pipeline_cuts(self) -> list[int]:
        """Layers at which a stage may begin (of half-blocks, those that read the residual stream), then the end."""
        if not any(layer.carries for layer in self.layers):
            return list(range(len(self.layers) + 1))
        readers = [l for l, layer in enumerate(self.layers) if any(port.kind is Kind.RESIDUAL for port in layer.inputs)]
        return [0, *readers, len(self.layers)]

    @property
    def pipeline_units(self) -> int:
        """Number of parts between which a pipeline may split the model: its largest number of stages."""
        return len(self.pipeline_cuts) - 1

    @property
    def units_text(self) -> str:
        """Description of the pipeline units for error messages."""
        if self.blocks and self.pipeline_units < len(self.layers):
            halves, blocks = self.pipeline_units - 1, len(self.blocks) - 1
            return f"{counted(halves, 'half-block')} of {counted(blocks, 'block')}, and the head,"
        return counted(self.pipeline_units, "layer" if self.pipeline_units == len(self.layers) else "part")

    @cached_property
    def recomputable(self) -> list[range]:
        """The blocks that can be recomputed, in order, each as a range of layers.

        In half-blocks, a block reaches from its first norm up to the next block's first norm. The embedding and the
        head are never recomputed. In a mixture of experts, only the experts of each block are.
        """
        if self.blocks:
            return [range(start, stop) for start, stop in pairwise(self.blocks)]
        experts = [layer for layer in range(len(self.layers)) if "ep" in self.cut_axes(layer)]
        return [range(layer, layer + 1) for layer in experts or range(len(self.layers))]

    @cached_property
    def gathered_with(self) -> Sequence[int]:
        """For each layer, the number of its block, or its own if each layer is a block. Layers with one number gather
        their weights together.
        """
        layers = range(len(self.layers))
        return [bisect_right(self.blocks, layer) for layer in layers] if self.blocks else layers

    def reduced_with(self, layer: int) -> int:
        """Return the number of the block whose gradients are reduced together with a layer's gradients.

        The embedding is part of the first block and the head part of the last, as in models of whole blocks.
        """
        return bisect_right((self.blocks or self.pipeline_cuts)[1:-1], layer)

    def require(self, plan: Plan) -> None:
        """Check that the layers are cut finely enough for a plan's mesh and recomputation.

        Raises:
            UserError: if they are not. The message names the layers that the plan needs.
        """
        mesh = plan.mesh
        if mesh.tp > 1 and not self._is_cut_along("tp"):
            raise UserError(
                f"the mesh has tp {mesh.tp}, which works on half-blocks, but this model's layers are whole; give "
                "Sizes.half_blocks or those of models.cut"
            )
        if mesh.ep > 1 and not self._is_cut_along("ep"):
            raise UserError(
                f"the mesh has ep {mesh.ep}, which cuts mixtures of experts, but this model has none; give "
                "Sizes.mixture or those of models.cut"
            )
        if mesh.cp > 1 and self._is_cut_along("ep") and "cp" in plan.shard_optimizer:
            raise UserError(
                f"the plan shards over cp, but the {mesh.cp} ranks of cp share a mixture's experts, so that none is on "
                "all of them; shard over dp_shard"
            )
        if plan.attention_apart and self._attention_inside:
            cuts = f"the mesh has cp {mesh.cp}, which cuts sequences"
            reason = cuts if mesh.cp > 1 else "selective recomputation was asked for"
            raise UserError(
                f"{reason}, but attention is not a step of its own in this model's layers; give Sizes.context_blocks "
                "or those of models.cut with attention_apart=True"
            )

    @cached_property
    def _cut_axes(self) -> list[tuple[str, ...]]:
        axes = {"expert": ("cp", "ep")}
        return [tuple(axis for index in layer.cut for axis in axes.get(index, ("tp",))) for layer in self.layers]

    @cached_property
    def _attention_inside(self) -> bool:
        """Whether attention is part of a layer rather than a separate step."""
        sliced = [layer for layer in self.layers if layer.sliced]
        return not sliced or any(layer.mixes_tokens for layer in sliced)

    def _is_cut_along(self, axis: str) -> bool:
        return any(axis in axes for axes in self._cut_axes)


_model_layers = lru_cache(maxsize=64)(ModelLayers)


class Addend(Protocol):
    """Value with an addition."""

    def __add__(self, other: Self, /) -> Self: ...


V = TypeVar("V", bound=Addend)


class PlanStore(Protocol[V]):
    """Store of the values of one kind."""

    def __getitem__(self, key: Any, /) -> V: ...
    def __setitem__(self, key: Any, value: V, /) -> None: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __delitem__(self, key: Any, /) -> None: ...
    def pop(self, key: Any, /) -> V: ...


class BoundaryStore(Protocol[V]):
    """Store of values that pipeline stages exchange. Keys are (layer, microbatch)."""

    @property
    def name(self) -> str: ...
    def __setitem__(self, key: Any, value: V, /) -> None: ...
    def __delitem__(self, key: Any, /) -> None: ...
    def pop(self, key: Any, /) -> V: ...


class PlanRank(Protocol[V]):
    """Stores and verbs of a rank that follows a plan, as in `shardlab.language.Rank`."""

    @property
    def layers(self) -> range: ...
    @property
    def weights(self) -> PlanStore[V]: ...
    @property
    def opt_states(self) -> PlanStore[V]: ...
    @property
    def grad_weights(self) -> PlanStore[V]: ...
    @property
    def scalars(self) -> PlanStore[V]: ...
    @property
    def activations(self) -> BoundaryStore[V]: ...
    @property
    def grad_activations(self) -> BoundaryStore[V]: ...
    def store(self, kind: Kind, /) -> BoundaryStore[V]: ...
    def group(self, axis: str, /) -> Group: ...
    def load_weight(self, layer: int, shard: int = ..., of: int = ..., /) -> V: ...
    def load_opt_state(self, layer: int, shard: int = ..., of: int = ..., /) -> V: ...
    def load_batch(self, microbatches: Sequence[int], slices: Sequence[int] | None, /) -> V: ...
    def all_gather(self, value: V, /, *, axis: str) -> Awaitable[V]: ...
    def reduce_scatter(self, value: V, /, *, axis: str) -> Awaitable[V]: ...
    def all_reduce(self, value: V, /, *, axis: str = ..., among: Sequence[int] = ...) -> Awaitable[V]: ...
    def accumulate(self, gradient: V, /) -> None: ...
    def norm(self, layer: int, gradient: V, /) -> V: ...
    def direction(self, layer: int, gradient: V, opt_state: V, norm: V, /) -> V: ...
    def update(
        self, layer: int, gradient: V, weight: V, opt_state: V, norm: V, direction: V | None, /
    ) -> tuple[V, V]: ...


class LayerPasses(Protocol[V]):
    """Passes through one layer on one microbatch, as in `shardlab.strategies.plan.layer_passes.LayerRunner`."""

    async def forward(self, layer: int, m: int, weight: V, keeps: Keeps, /, *, stores_outputs: bool = ...) -> None: ...
    async def loss(self, m: int, /) -> None: ...
    async def backward(self, layer: int, m: int, weight: V, /) -> V: ...
    async def backward_input(self, layer: int, m: int, weight: V, /) -> None: ...
    def backward_weight(self, layer: int, m: int, /) -> V: ...
    def discard(self, layer: int, m: int, /) -> None: ...

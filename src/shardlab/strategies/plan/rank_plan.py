"""A plan made out for one rank: which layers, slices and groups are its own, and what meets where."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeVar

from shardlab.language import Group, Sizes, UserError
from shardlab.language.rules.kinds import Kind, counted
from shardlab.language.rules.layer_graph import Layer
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules.steps import ReduceGrad, ShardedStep, Unshard

Keeps = Literal["all", "input", "nothing"]
"""Leavings of a forward pass for the backward pass: input and what the layer keeps, or less, to be computed again."""


Verb = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice"]


class Completion(NamedTuple):
    """The collective that makes a layer's result, or what it reads, complete.

    Attributes:
        verb: the rank's method; to slice, nobody meets.
        axis: the mesh axis whose ranks meet.
    """

    verb: Verb
    axis: str


class Completions(NamedTuple):
    """Collectives by which a layer meets other ranks.

    Attributes:
        input, output: how its first input and its first output are completed in the forward pass, in order.
        grad_output, grad_input: how the gradients of these are completed in the backward pass, before and after it.
    """

    input: tuple[Completion, ...] = ()
    output: tuple[Completion, ...] = ()
    grad_output: tuple[Completion, ...] = ()
    grad_input: tuple[Completion, ...] = ()


@dataclass(frozen=True)
class LayerPlan:
    """A layer as one rank runs it.

    Attributes:
        completions: where it meets other ranks.
        part: (which, of how many) parts of the experts it dispatches tokens to (None: it dispatches none, or to all).
        keeps: what its forward pass leaves to the backward pass.
        recompute: the layers whose forward pass is done again before this layer's backward pass, in order: with itself,
            if its backward pass does not do that by itself.
    """

    completions: Completions
    part: tuple[int, int] | None = None
    keeps: Keeps = "all"
    recompute: range = range(0)


@dataclass(frozen=True)
class WeightPlan:
    """Slices that one rank keeps of a weight, and the axes over which its gradient is reduced.

    Attributes:
        users: how many of this rank's layers compute with it.
        cut_axes: the axes over which the layer's parameters are sliced, before they are sharded.
        parameters, optimizer: (which, of how many) slices of the weight and of the optimizer's state the rank keeps.
        elements: of the gradient before it is sharded.
        reduce_every_microbatch: axes over which each microbatch's gradient is reduced; those that scatter it first.
        reduce_once: axes over which the sum over microbatches is reduced.
        direction_axes: axes over which the optimizer's directions are gathered, in order (none: of matrices that are
            whole on each rank, or of elements).
        shared_by: ranks of this pipeline that keep replicas of it, and sum their gradients once a step (empty: none).
        counted: whether this rank counts its squares in the gradient's norm, as one of these ranks does.
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


@dataclass(frozen=True)
class RankPlan:
    """A plan on a mesh and a model, made out for one rank (see `resolve`). Its parts read this and keep no copies.

    Attributes:
        plan, model: what was made out, and for which layers.
        steps: what the schedule has the rank do, in order.
        microbatches: those of the global batch that are this rank's.
        sequence_slices: slices of every sequence that are this rank's (None: whole sequences).
        pipeline: the ranks of its pipeline, by their place.
        stages: the layers of every stage of the pipeline.
        own_stages: numbers of the stages that are this rank's.
        layers: every layer of its stages.
        weights: every weight that it keeps, by the layer that has it.
        bare: its layers that have no parameters.
        frozen: layers of the model whose weights are not trained.
        training: ranks of its pipeline that train weights.
        gather_axes: axes over which weights are gathered before their use, in order.
        scatter_axes: axes along which gradients are scattered; over others they are all-reduced.
        update_axes: axes over which weights are gathered after the update, in order.
        room: elements of gradients whose reductions may be in flight at a time, over each axis.
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
    bare: tuple[int, ...]
    frozen: frozenset[int]
    training: tuple[int, ...]
    gather_axes: tuple[str, ...]
    scatter_axes: tuple[str, ...]
    update_axes: tuple[str, ...]
    room: int

    @property
    def explicit_gathers(self) -> bool:
        """Whether the steps say when a stage's weights are gathered and freed."""
        return Unshard in map(type, self.steps)

    @property
    def explicit_reductions(self) -> bool:
        """Whether the steps say when a stage's gradients are reduced."""
        return ReduceGrad in map(type, self.steps)

    @property
    def trained(self) -> Mapping[int, WeightPlan]:
        """Every weight that this rank keeps and trains, by the layer that has it."""
        return {l: weight for l, weight in self.weights.items() if l not in self.frozen}

    def weight_of(self, layer: int) -> int:
        """The layer whose weight a layer computes with."""
        return self.model.layers[layer].weight

    def backward_order(self, stage: int) -> Iterator[int]:
        """The layers of a stage in the order of its backward pass, with those that are computed forward again."""
        for layer in reversed(self.stages[stage]):
            yield from self.layers[layer].recompute
            yield layer


# Questions that a plan asks of a model: where it may be cut, and how each layer is. They are asked here alone.


def model_layers(sizes: Sizes) -> ModelLayers:
    """The layers of a model of these sizes; the same object for all models of one shape."""
    return _model_layers(sizes.signatures, sizes.blocks)


@dataclass(frozen=True)
class ModelLayers:
    """A model's layers, as a plan needs to know them.

    Attributes:
        layers: each layer's signature: what it takes and makes, and whose weight it computes with.
        blocks: where blocks begin and the last one ends, if not every layer is one (empty: each layer is a block).
    """

    layers: tuple[Layer, ...]
    blocks: tuple[int, ...]

    @cached_property
    def users(self) -> dict[int, tuple[int, ...]]:
        """Layers that compute with each weight, by the layer that has it."""
        users: dict[int, tuple[int, ...]] = {}
        for number, layer in enumerate(self.layers):
            users[layer.weight] = (*users.get(layer.weight, ()), number)
        return users

    def cut_axes(self, layer: int) -> tuple[str, ...]:
        """The mesh axes over which a layer's parameters may be sliced, outermost first; every other rank has all.

        Ranks that cut sequences share their experts: what all of them would compute alike, each does for some.
        """
        return self._cut_axes[layer]

    @cached_property
    def _cut_axes(self) -> list[tuple[str, ...]]:
        axes = {"expert": ("cp", "ep")}
        return [tuple(axis for index in layer.cut for axis in axes.get(index, ("tp",))) for layer in self.layers]

    @cached_property
    def feeding_attention(self) -> frozenset[int]:
        """The layers that make queries, keys and values: attention lies between each of them and the next layer."""
        return frozenset(l for l, layer in enumerate(self.layers) if layer.projects)

    @cached_property
    def pipeline_cuts(self) -> list[int]:
        """Layers before which a pipeline may cut, both ends included: all, or those that take a residual."""
        if not any(layer.carries for layer in self.layers):
            return list(range(len(self.layers) + 1))
        taking = [l for l, layer in enumerate(self.layers) if any(port.kind is Kind.RESIDUAL for port in layer.inputs)]
        return [0, *taking, len(self.layers)]

    @property
    def pipeline_units(self) -> int:
        """The most stages that a pipeline may have."""
        return len(self.pipeline_cuts) - 1

    @property
    def units_text(self) -> str:
        """Words for these units in a message."""
        if self.blocks and self.pipeline_units < len(self.layers):
            halves, blocks = self.pipeline_units - 1, len(self.blocks) - 1
            return f"{counted(halves, 'half-block')} of {counted(blocks, 'block')}, and the head,"
        return counted(self.pipeline_units, "layer" if self.pipeline_units == len(self.layers) else "part")

    @cached_property
    def recomputable(self) -> list[range]:
        """The layers of each block that can be computed again, in order.

        In half-blocks, a block reaches from its first norm up to the next block's; the embedding before the blocks and
        the head after them keep what they need. In a mixture, these are each block's experts.
        """
        if self.blocks:
            return [range(start, stop) for start, stop in pairwise(self.blocks)]
        experts = [layer for layer in range(len(self.layers)) if "ep" in self.cut_axes(layer)]
        return [range(layer, layer + 1) for layer in experts or range(len(self.layers))]

    def gathered_with(self, layer: int) -> int:
        """A number that layers share whose weights are gathered together: those of one block, as FSDP wraps it."""
        return self._gathered_with[layer]

    @cached_property
    def _gathered_with(self) -> list[int]:
        layers = range(len(self.layers))
        return [bisect_right(self.blocks, layer) for layer in layers] if self.blocks else list(layers)

    def reduced_with(self, layer: int) -> int:
        """A number that layers share whose gradients count together as one block's.

        The embedding counts as part of the first block and the head as part of the last, as where blocks are whole.
        """
        return bisect_right((self.blocks or self.pipeline_cuts)[1:-1], layer)

    @cached_property
    def _attention_inside(self) -> bool:
        """Whether attention lies within a layer, or layers are whole blocks."""
        sliced = [layer for layer in self.layers if layer.sliced]
        return not sliced or any(layer.mixes_tokens for layer in sliced)

    def _is_cut_along(self, axis: str) -> bool:
        return any(axis in axes for axes in self._cut_axes)

    def require(self, plan: Plan) -> None:
        """Refuse a plan whose mesh or recomputation asks for finer layers than these.

        Raises:
            UserError: with the layers that are wanted.
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
            what = cuts if mesh.cp > 1 else "selective recomputation was asked for"
            raise UserError(
                f"{what}, but attention is not a step of its own in this model's layers; give Sizes.context_blocks or "
                "those of models.cut with attention_apart=True"
            )


_model_layers = lru_cache(maxsize=64)(ModelLayers)


# What the code that follows plans wants of a rank: of one that is traced, and of one that notes seconds and bytes.
#
# A rank that lacks a verb is an error of types where it is given to a `PlanRunner`, so that no verb that a plan may
# call can be forgotten on either.


class Addend(Protocol):
    """A value that can be added to others like it."""

    def __add__(self, other: Self, /) -> Self: ...


V = TypeVar("V", bound=Addend)


class PlanStore(Protocol[V]):
    """Values of a kind that steps keep."""

    def __getitem__(self, key: Any, /) -> V: ...
    def __setitem__(self, key: Any, value: V, /) -> None: ...
    def __contains__(self, key: object, /) -> bool: ...
    def __delitem__(self, key: Any, /) -> None: ...
    def pop(self, key: Any, /) -> V: ...


class BorderStore(Protocol[V]):
    """Values of a kind between layers, which stages hand on; keys are (layer, microbatch)."""

    @property
    def name(self) -> str: ...
    def __setitem__(self, key: Any, value: V, /) -> None: ...
    def __delitem__(self, key: Any, /) -> None: ...
    def pop(self, key: Any, /) -> V: ...


class PlanRank(Protocol[V]):
    """One rank of a plan, with values of some class: its stores, and the verbs of `shardlab.language.Rank`."""

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
    def activations(self) -> BorderStore[V]: ...
    @property
    def grad_activations(self) -> BorderStore[V]: ...
    def store(self, kind: Kind, /) -> BorderStore[V]: ...
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
    """Passes through one layer on one microbatch, as of `shardlab.strategies.plan.layer_passes.LayerRunner`."""

    async def forward(self, layer: int, m: int, weight: V, keeps: Keeps, /, *, hands_on: bool = ...) -> None: ...
    async def loss(self, m: int, /) -> None: ...
    async def backward(self, layer: int, m: int, weight: V, /) -> V: ...
    async def backward_input(self, layer: int, m: int, weight: V, /) -> None: ...
    def backward_weight(self, layer: int, m: int, /) -> V: ...
    def discard(self, layer: int, m: int, /) -> None: ...

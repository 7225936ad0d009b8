"""A plan made out for one rank: which layers, slices and groups are its own, and what meets where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardlab.strategies.model_layers import ModelLayers
from shardlab.strategies.plan import Plan
from shardlab.strategies.schedules.sharding import ReduceGrad, ShardedStep, Unshard

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

"""Seconds and bytes of a shape's layers on one microbatch, priced without a trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from shardlab.models import CutModel, MoE
from shardlab.planner.alike import alike_blocks
from shardlab.planner.arrays import Array, Places
from shardlab.planner.layer_prices import LayerPrices
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.problem import Candidate, Problem
from shardlab.predict.priced import ClusterPrices
from shardlab.program import Kind, Sizes
from shardlab.strategies.model_layers import model_layers
from shardlab.strategies.plan import Plan
from shardlab.strategies.rank_plan import LayerPlan
from shardlab.strategies.resolve import resolve


class SumArrays(NamedTuple):
    """Sums of `LayerFloors`: (layers + 1,) each."""

    forward: Array
    backward: Array
    inputs: Array
    halves: Array
    weights: Array
    kept: Array
    halved: Array


@dataclass(frozen=True)
class LayerFloors:
    """Seconds of a shape's layers on one microbatch, and bytes that they keep of it; lists are sums up to each layer.

    Attributes:
        forward, backward: seconds, with what is waited for; a share of blocks is computed again.
        inputs, halves: seconds of the halves of backward passes, which make gradients of inputs and of weights.
        kept: bytes from the forward pass to the backward pass.
        whole: bytes that would be kept if nothing were computed again.
        halved: bytes that stay between the halves of a backward pass.
        weights: elements of a rank's parameters, before they are sharded.
        like: the layer of those with as many elements, cut alike, that comes first; no sums.
        given: bytes of the activation that enters each layer, as it is sent, and of the logits as they are kept; no
            sums.
        again: the layers of each block that is computed again.
        least_again: bytes that such a block keeps at least, once it has been (0: none is).
    """

    forward: list[float]
    backward: list[float]
    inputs: list[float]
    halves: list[float]
    kept: list[float]
    whole: list[float]
    halved: list[float]
    weights: list[float]
    like: list[int]
    given: list[float]
    again: tuple[range, ...] = ()
    least_again: float = 0.0

    @cached_property
    def arrays(self) -> SumArrays:
        """The sums to reckon with."""
        return SumArrays(*(np.array(getattr(self, name)) for name in SumArrays._fields))

    @cached_property
    def passes(self) -> Array:
        """Seconds of each kind of pass through each layer, from `forward` to `halves`: (kinds, layers)."""
        return np.diff(np.array(self.arrays[:4]))

    @cached_property
    def kinds(self) -> tuple[Places, Places]:
        """Layers that are the first of their kind: (kinds,); and the place of each layer's among these: (layers,)."""
        first, of_layers = np.unique(np.array(self.like, np.intp), return_inverse=True)
        return first, of_layers

    @property
    def logits(self) -> float:
        """Bytes of logits and their gradient, when the loss is computed."""
        return 2 * self.given[-1]


class ShapeLayers:
    """Floors of the layers of a problem's shapes, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._floors: dict[Any, LayerFloors] = {}
        self._kernels: dict[Any, Any] = {}
        self._of_one: dict[Any, tuple[Sizes, Mapping[int, LayerPlan]]] = {}
        self._priced: dict[Any, ClusterPrices] = {}

    def floors(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        mesh = shape.mesh
        key = (
            (mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep, shape.micro_batch_size, shape.precision.name),
            (shape.sequence_parallel, shape.recompute == "selective", recompute, shape.context, shape.ulysses_degree),
            shape.stripes,
        )
        if key not in self._floors:
            if isinstance(recompute, tuple):
                self._floors[key] = self._some(shape, recompute)
            else:
                self._floors[key] = self._of_layers(shape, recompute)
        return self._floors[key]

    def prices(self, candidate: Candidate) -> ClusterPrices:
        """Prices of a candidate's ops, whatever its layers are."""
        key = (candidate.plan.mesh, candidate.precision.name)
        if key not in self._priced:
            blocks = alike_blocks(self.problem.model, candidate.plan.mesh)
            assert blocks is not None, "candidates are of models that divide"
            short = replace(self.problem, model=blocks.whole)
            self._priced[key] = short.workload(candidate).prices
        return self._priced[key]

    def _some(self, shape: PlanShape, recompute: tuple[int, ...]) -> LayerFloors:
        """Floors of the shape's layers, if the blocks with these numbers are computed again."""
        layers, none, full = blocks_of(self.problem, shape).layers, self.floors(shape), self.floors(shape, "full")
        blocks = tuple(layers.recomputable[block] for block in recompute)
        again = np.zeros(len(layers.layers), bool)
        again[[layer for block in blocks for layer in block]] = True
        backward, inputs, kept = (
            [0.0, *np.cumsum(np.where(again, np.diff(full_of), np.diff(none_of))).tolist()]
            for none_of, full_of in (
                (none.arrays.backward, full.arrays.backward),
                (none.arrays.inputs, full.arrays.inputs),
                (none.arrays.kept, full.arrays.kept),
            )
        )
        return replace(none, backward=backward, inputs=inputs, kept=kept, again=blocks, least_again=full.least_again)

    def _of_layers(self, shape: PlanShape, recompute: str) -> LayerFloors:
        """What resolving a plan of one pipeline stage says of each layer, priced."""
        mesh, blocks = replace(shape.mesh, pp=1, dp_shard=1), blocks_of(self.problem, shape)
        model = blocks.short
        alone = replace(shape, mesh=mesh).candidate
        prices = self.prices(alone)
        sizes, layers = self._resolved(shape, replace(alone.plan, recompute=recompute))
        kept_sizes = self.problem.recipe.memory.kept_sizes(
            model, sizes, shape.micro_batch_size, mesh.tp if shape.sequence_parallel else 1
        )
        cuts = model_layers(sizes).pipeline_cuts
        pricing = LayerPrices(shape, model, prices, sizes, layers, self._kernels)
        forward = [pricing.forward(layer) for layer in range(model.layers)]
        outputs = [pricing.waits(layers[layer].completions.output, layer + 1) for layer in range(model.layers)]
        backward: list[float] = []
        inputs: list[float] = []
        for layer in range(model.layers):
            completions = layers[layer].completions
            beside = pricing.waits(completions.grad_output, layer + 1) + pricing.waits(completions.grad_input, layer)
            if layers[layer].keeps != "all":  # what a stage hands on is not made again, wherever stages end
                beside += forward[layer] + (outputs[layer] if layer + 1 not in cuts else 0.0)
            backward.append(pricing.backward(layer) + beside)
            inputs.append(pricing.backward_input(layer) + beside)
        halves = [pricing.backward_weight(layer) for layer in range(model.layers)]
        kept = [pricing.kept(kept_sizes, layer, layers[layer].keeps) for layer in range(model.layers)]
        whole = _sums(blocks.all([pricing.kept(kept_sizes, layer, "all") for layer in range(model.layers)]))
        halved = [pricing.halved(kept_sizes, layer) for layer in range(model.layers)]
        weights = [sizes.weights[layer] / pricing.slices(layer) for layer in range(model.layers)]
        seconds = [each + waited for each, waited in zip(forward, outputs, strict=True)]
        given = [pricing.given(sizes, layer) for layer in range(model.layers)]
        given.append(pricing.given(kept_sizes, model.layers))
        again = tuple(blocks.layers.recomputable) if recompute == "full" else ()
        return LayerFloors(
            *(_sums(blocks.all(each)) for each in (seconds, backward, inputs, halves, kept)),
            whole=whole,
            halved=_sums(blocks.all(halved)),
            weights=_sums(blocks.all(weights)),
            like=_like(
                list(
                    zip(blocks.all(weights), map(blocks.layers.cut_axes, range(len(blocks.layers.layers))), strict=True)
                )
            ),
            given=[*blocks.all(given), given[-1]],
            again=again,
            least_again=min((between(whole, block) for block in again), default=0.0),
        )

    def _resolved(self, shape: PlanShape, plan: Plan) -> tuple[Sizes, Mapping[int, LayerPlan]]:
        """The sizes of a shape's values, and its layers as a rank runs them, which no microbatch's size changes."""
        mesh, model, size = shape.mesh, blocks_of(self.problem, shape).short, shape.micro_batch_size
        cut = mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep
        key = cut, shape.sequence_parallel, shape.precision.name, plan.recompute, shape.stripes
        if key not in self._of_one:
            elements = model.sizes(1, shape.precision.bytes(Kind.ACTIVATION))
            sizes = plan.counted(shape.precision.sizes(elements, self.problem.optimizer))
            self._of_one[key] = sizes, resolve(plan, sizes, mesh.ep, 0).layers
        sizes, layers = self._of_one[key]
        if isinstance(model, CutModel) and not isinstance(model.whole, MoE):
            lists = sizes.activations, sizes.saved, sizes.saved_for_weight
            activations, saved, halved = (tuple(size * each for each in of) for of in lists)
            queries, keys_values = size * sizes.queries, size * sizes.keys_values
        else:
            whole = model.sizes(size, shape.precision.bytes(Kind.ACTIVATION))
            activations, saved, halved = whole.activations, whole.saved, whole.saved_for_weight
            queries, keys_values = whole.queries, whole.keys_values
        sizes = replace(sizes, activations=activations, saved=saved, saved_for_weight=halved)
        return replace(sizes, queries=queries, keys_values=keys_values), layers


def _sums(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _like(values: list[Any]) -> list[int]:
    first: dict[Any, int] = {}
    return [first.setdefault(value, place) for place, value in enumerate(values)]


def between(sums: list[float], layers: range) -> float:
    """What consecutive layers add to a sum."""
    return sums[layers.stop] - sums[layers.start]

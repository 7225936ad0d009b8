"""Seconds and bytes of the layers of a plan shape on one microbatch, priced without a trace.

`ShapeLayers` has the sums over layers that all other bounds use; `LayerPrices` prices the kernels of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.common.errors import UserError
from shardlab.language import Group, Kind, OpKind, Sizes
from shardlab.language.mesh import group_of
from shardlab.models import CutModel, Model, MoE
from shardlab.planner.problem import Candidate, PlanShape, Problem, blocks_of, identical_blocks
from shardlab.simulate.predict.prices import ClusterPrices, backward_input
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import Completion, Keeps, LayerPlan, model_layers
from shardlab.strategies.plan.resolve import resolve


class SumArrays(NamedTuple):
    """Sums of `LayerBounds`: (layers + 1,) each."""

    forward: Array
    backward: Array
    inputs: Array
    halves: Array
    weights: Array
    kept: Array
    halved: Array


@dataclass(frozen=True)
class LayerBounds:
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
    """Lower bounds of the layers of a problem's shapes, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._bounds: dict[Any, LayerBounds] = {}
        self._kernels: dict[Any, Any] = {}
        self._of_one: dict[Any, tuple[Sizes, Mapping[int, LayerPlan]]] = {}
        self._priced: dict[Any, ClusterPrices] = {}

    def bounds(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerBounds:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        mesh = shape.mesh
        key = (
            (mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep, shape.micro_batch_size, shape.precision.name),
            (shape.sequence_parallel, shape.recompute == "selective", recompute, shape.context, shape.ulysses_degree),
            shape.stripes,
        )
        if key not in self._bounds:
            if isinstance(recompute, tuple):
                self._bounds[key] = self._some(shape, recompute)
            else:
                self._bounds[key] = self._of_layers(shape, recompute)
        return self._bounds[key]

    def prices(self, candidate: Candidate) -> ClusterPrices:
        """Prices of a candidate's ops, whatever its layers are."""
        key = (candidate.plan.mesh, candidate.precision.name)
        if key not in self._priced:
            blocks = identical_blocks(self.problem.model, candidate.plan.mesh)
            assert blocks is not None, "candidates are of models that divide"
            short = replace(self.problem, model=blocks.whole)
            self._priced[key] = short.workload(candidate).prices
        return self._priced[key]

    def _some(self, shape: PlanShape, recompute: tuple[int, ...]) -> LayerBounds:
        """Lower bounds of the shape's layers, if the blocks with these numbers are computed again."""
        layers, none, full = blocks_of(self.problem, shape).layers, self.bounds(shape), self.bounds(shape, "full")
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

    def _of_layers(self, shape: PlanShape, recompute: str) -> LayerBounds:
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
        return LayerBounds(
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


PASSES = OpKind.FORWARD, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT
"""A layer's passes on a microbatch."""

GATHER = Completion("all_gather", "tp")
"""What makes a sequence whole that tensor-parallel ranks have slices of."""


class LayerPrices:
    """Seconds of a shape's layers, from their kernels; and bytes."""

    def __init__(
        self,
        shape: PlanShape,
        model: Model,
        prices: ClusterPrices,
        sizes: Sizes,
        layers: Mapping[int, LayerPlan],
        known: dict[Any, Any],
    ) -> None:
        self.shape, self.model, self.prices, self.sizes, self.layers = shape, model, prices, sizes, layers
        self.known = known
        self.mesh = shape.mesh
        self.tokens = model.seq_len // self.mesh.cp
        self.group, self.contexts = self.mesh.group(0, "tp"), self.mesh.group(0, "cp").ranks

    def slices(self, layer: int) -> int:
        """Into how many pieces a layer's parameters are cut over ranks."""
        return self.model.run(layer).slices

    def forward(self, layer: int) -> float:
        """Seconds of a layer's forward pass."""
        return self._times(layer)[0]

    def backward(self, layer: int) -> float:
        """Seconds of its backward pass; of the last layer's, with the loss."""
        return self._times(layer)[1]

    def backward_input(self, layer: int) -> float:
        """Seconds of the half of it that makes the gradient of the input; of the last layer's, with the loss."""
        return self._times(layer)[2]

    def backward_weight(self, layer: int) -> float:
        """Seconds of the half of it that makes the gradient of the weights."""
        return self._times(layer)[3]

    def waits(self, completions: tuple[Completion, ...], activation: int) -> float:
        """Collectives over tp that complete an activation, which are waited for."""
        if activation > self.model.layers or self.mesh.tp == 1:
            return 0.0
        elements = self.sizes.activations[activation] / self.mesh.cp
        bytes = elements * self.sizes.element_bytes[Kind.ACTIVATION]
        kinds = [OpKind(verb) for verb, axis in completions if axis == "tp" and verb != "slice"]
        return sum(self._collective(kind, bytes, self.group) for kind in kinds)

    def _collective(self, kind: OpKind, bytes: float, group: Group) -> float:
        key = kind, bytes, group
        if key not in self.known:
            self.known[key] = self.prices.collective_time(kind, bytes, group)
        return self.known[key]

    def kept(self, sizes: Sizes, layer: int, keeps: Keeps) -> float:
        """Bytes of one microbatch that stay from a layer's forward pass to its backward pass; of experts, none is sure:
        its input, if that is no tokens, and what the layer keeps."""
        run, mesh = self.model.run(layer), self.mesh
        if "expert" in run.cut or keeps == "nothing":
            return 0.0
        if keeps == "input":
            return self.given(sizes, layer)
        shared = (mesh.tp if run.cut or self.shape.sequence_parallel else 1) * mesh.cp
        saved = sizes.saved[layer] * sizes.element_bytes[Kind.SAVED] / shared
        if run.attend is not None:  # attention is a step of its own
            for elements, kind in ((sizes.queries, Kind.QUERIES), (sizes.keys_values, Kind.KEYS_VALUES)):
                saved += elements * sizes.element_bytes[kind] / shared
        return self._entered(sizes, layer) + saved

    def halved(self, sizes: Sizes, layer: int) -> float:
        """Bytes of one microbatch that stay between the halves of a backward pass: input, output's gradient, and what
        layers keep; of experts, none is sure."""
        run, mesh = self.model.run(layer), self.mesh
        if "expert" in run.cut:
            return 0.0
        shared = (mesh.tp if run.cut or self.shape.sequence_parallel else 1) * mesh.cp
        saved = (sizes.saved_for_weight or sizes.saved)[layer] * sizes.element_bytes[Kind.SAVED_FOR_WEIGHT] / shared
        gathered = GATHER in self.layers[layer].completions.grad_output
        output = 0.0 if run.attend else self._activation(sizes, layer + 1, gathered)  # else it is no activation
        return self._entered(sizes, layer) + saved + output

    def _entered(self, sizes: Sizes, layer: int) -> float:
        """Bytes of a layer's input that it keeps."""
        return self.given(sizes, layer) if not sizes.keeps_input or sizes.keeps_input[layer] else 0.0

    def given(self, sizes: Sizes, activation: int) -> float:
        """Bytes of an activation of one microbatch as it enters its layer; tokens count as nothing."""
        gathered = activation > 0 and GATHER in self.layers[activation - 1].completions.output
        return self._activation(sizes, activation, gathered)

    def _activation(self, sizes: Sizes, activation: int, gathered: bool) -> float:
        """Bytes of an activation, or of its gradient; tp slices it by heads, by logits, or along the sequence."""
        heads = activation and self.model.run(activation - 1).attend is not None
        sliced = heads or activation == self.model.layers or (self.shape.sequence_parallel and not gathered)
        bytes = sizes.activations[activation] * sizes.element_bytes[Kind.ACTIVATION] if activation else 0.0
        return bytes / (self.mesh.tp if sliced else 1) / self.mesh.cp

    def _times(self, layer: int) -> tuple[float, float, float, float]:
        """Forward, backward, and the halves of that; with the loss on the last layer."""
        run, last = self.model.run(layer), layer == self.model.layers - 1
        mesh, shape = self.mesh, self.shape
        key = (run.name, run.cut, run.layout.numel, run.attend is None, len(run.steps), last, mesh.tp, mesh.cp, mesh.ep)
        key = (*key, shape.micro_batch_size, shape.sequence_parallel, shape.precision.name, layer == 0)
        key = (*key, shape.context, shape.ulysses_degree) if run.attend is not None else key
        if key not in self.known:
            self.known[key] = self._priced(layer)
        return self.known[key]

    def _priced(self, layer: int) -> tuple[float, float, float, float]:
        run, size, recipe = self.model.run(layer), self.shape.micro_batch_size, self.prices.recipe
        if "expert" in run.cut:  # whose tokens depend on the routing: its products alone, at the peak
            peak = self.prices.cluster.device.peak(self.prices.precision.compute)
            forward = size * run.flops() / (self.mesh.tp * self.mesh.cp) / peak
            return forward, 2 * forward, forward, forward
        tokens = self.tokens // (self.mesh.tp if self.shape.sequence_parallel and not run.cut else 1)
        kernels = recipe.kernels.run(self.model.kernels(layer, size, tokens, run.slices))
        forward, backward, inputs, weights = (self.prices.layer_seconds(kind, kernels) for kind in PASSES)
        back = 0.0
        if run.attend is not None:
            there, back = self._attention(layer, run.slices)
            forward += there
        if layer == self.model.layers - 1:
            loss = recipe.kernels.run(self.model.loss_kernels(size, self.tokens, run.slices))
            back += self.prices.seconds_of([*loss, *backward_input(loss)])
        return forward, backward + back, inputs + back, weights

    def _attention(self, layer: int, slices: int) -> tuple[float, float]:
        """Forward and backward, of as many pieces as keys and values come in, with what is waited for."""
        degree = self.shape.ulysses_degree or (self.mesh.cp if self.shape.context == "ulysses" else 1)
        queries, pieces = self.tokens * degree, self.mesh.cp // degree if self.shape.context == "ring" else 1
        keys, size = self.model.seq_len // pieces, self.shape.micro_batch_size
        attended = self.prices.recipe.kernels.run(
            self.model.attend_kernels(layer, size, queries, keys, 0.5, slices * degree)
        )
        kinds = OpKind.ATTEND, OpKind.ATTEND_BACKWARD
        forward, backward = (pieces * self.prices.layer_seconds(kind, attended) for kind in kinds)
        if self.mesh.cp > 1:
            with suppress(UserError):  # a profile lacks a collective: then such plans have no forecast
                forward, backward = self._met(layer, degree, forward, backward)
        return forward, backward

    def _met(self, layer: int, degree: int, forward: float, backward: float) -> tuple[float, float]:
        """Seconds of attention's passes with what ranks of cp wait for (see `shardlab.strategies.plan.layer_passes`).

        Slices exchanged for heads, and keys and values that are gathered, come before attention or after it. In a ring
        they run beside it, but each message follows the one before.

        Args:
            degree: how many neighbours exchange slices for heads.
            forward, backward: of attention alone.
        """
        near, ring = group_of("cp", self.contexts[:degree]), group_of("cp", self.contexts[::degree])
        hops = len(ring.ranks)
        queries, keys_values, grad_queries, grad_keys_values, output, grad_output = (
            self._bytes_met(layer, elements, kind)
            for elements, kind in (
                (self.sizes.queries, Kind.QUERIES),
                (self.sizes.keys_values, Kind.KEYS_VALUES),
                (self.sizes.queries, Kind.GRAD_QUERIES),
                (self.sizes.keys_values, Kind.GRAD_KEYS_VALUES),
                (self.sizes.activations[layer + 1], Kind.ACTIVATION),
                (self.sizes.activations[layer + 1], Kind.GRAD_ACTIVATION),
            )
        )
        if hops > 1 and self.shape.context == "all_gather":
            forward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.REDUCE_SCATTER, hops * grad_keys_values, ring)
        elif hops > 1:
            forward += (hops - 1) * self._sum(layer, self.sizes.activations[layer + 1])
            backward += (hops - 1) * (self._sum(layer, self.sizes.queries) + self._sum(layer, self.sizes.keys_values))
            forward = max(forward, (hops - 1) * self._hop(Kind.KEYS_VALUES, keys_values, ring))
            backward = max(backward, hops * self._hop(Kind.GRAD_KEYS_VALUES, grad_keys_values, ring))
        if degree > 1:
            there, back = (queries, keys_values, output), (grad_output, grad_queries, grad_keys_values)
            forward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, near) for bytes in there)
            backward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, near) for bytes in back)
        return forward, backward

    def _hop(self, kind: Kind, bytes: float, ring: Group) -> float:
        return self.prices.message_times(kind, bytes, *ring.ranks[:2])[1]

    def _sum(self, layer: int, elements: float) -> float:
        """Seconds to add what a hop gives to what those before it have given."""
        return self.prices.add_seconds(int(elements / (self.slices(layer) * self.mesh.cp)))

    def _bytes_met(self, layer: int, elements: float, kind: Kind) -> float:
        """Bytes of a rank's part of a value that goes into attention or comes out of it."""
        return elements * self.sizes.element_bytes[kind] / (self.slices(layer) * self.mesh.cp)


Array = NDArray[np.float64]

Places = NDArray[np.intp]

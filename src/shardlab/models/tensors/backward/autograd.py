"""Backward passes by autograd, for primitives without a hand-written one and for compiled layers.

`AutogradGraph` is the common part: it runs a function under autograd without keeping the parameters alive.
`autograd_passes` wraps it for one primitive, and `CompiledPasses` for a layer that torch.compile compiles.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from shardlab.models.primitives import Primitive
from shardlab.models.tensors.backward.workspace import Accumulate, BothPasses, Context, TensorPlaces, Weights, is_buffer
from shardlab.models.tensors.compute import Operands, compute
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.layers import TensorLayer
from shardlab.models.tensors.share import WHOLE_LAYER, Share

Function = Callable[[Weights, Sequence[Tensor]], Sequence[Tensor]]
"""Function from (parameters, inputs) to output tensors."""


class ParameterView(NamedTuple):
    """View of a parameter that autograd saved, without the parameter itself; `weight` is the parameter's index."""

    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class SavedTensors:
    """Hooks that decide which tensors autograd saves for a function.

    The weight of a forward pass may be freed before the backward pass, and gathered again at another address. Autograd
    would keep it alive. So a saved view of a parameter is stored as `ParameterView`, and looked up in the parameters of
    the backward pass (torch.autograd.graph.saved_tensors_hooks).
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._begins = [weight.data_ptr() for weight in weights]
        spans = (sum((size - 1) * by for size, by in zip(w.shape, w.stride(), strict=True)) for w in weights)
        self._bytes = [(1 + span) * weight.itemsize for span, weight in zip(spans, weights, strict=True)]

    def pack(self, tensor: Tensor) -> Tensor | ParameterView:
        place = tensor.data_ptr()
        for number, (begin, bytes) in enumerate(zip(self._begins, self._bytes, strict=True)):
            if 0 <= place - begin < bytes and tensor.numel():
                return ParameterView(number, tensor.shape, tensor.stride(), (place - begin) // tensor.itemsize)
        return tensor.detach()  # otherwise tensor and graph would keep each other alive

    def unpack(self, tensor: Tensor | ParameterView) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        weight = self.weights[tensor.weight]
        return weight.as_strided(tensor.size, tensor.stride, weight.storage_offset() + tensor.offset)


class AutogradGraph:
    """Autograd graph of one call of a function. The constructor runs the forward pass.

    Args:
        function: the function.
        weights: parameters of the function.
        inputs: other inputs of the function.
    """

    def __init__(self, function: Function, weights: Weights, inputs: Sequence[Tensor]) -> None:
        self._saved_tensors = SavedTensors(weights)
        self._weights = [weight.detach().requires_grad_() for weight in weights]
        self._inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with torch.enable_grad(), saved_tensors_hooks(self._saved_tensors.pack, self._saved_tensors.unpack):
            outputs = function(self._weights, self._inputs)
        self._saved_tensors.weights = ()
        self._edges = [get_gradient_edge(output) if output.requires_grad else None for output in outputs]
        self._outputs = [output.detach() for output in outputs]  # before the leaves are emptied, which may be outputs
        for leaf in (*self._weights, *self._inputs):
            if leaf.requires_grad:  # autograd has saved what it needs; the leaf only receives its gradient
                leaf.data = leaf.new_empty(1).expand(leaf.shape)

    def take_outputs(self) -> list[Tensor]:
        """Return the outputs and forget them, so that the graph does not keep them alive."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def backward(self, weights: Weights, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients of the inputs, then of the parameters; None for inputs and parameters without one.

        Args:
            weights: the parameters, which may have other addresses than in the forward pass.
            gradients: gradients of the outputs.
        """
        self._saved_tensors.weights = weights
        pairs = [
            (edge, gradient)
            for edge, gradient in zip(self._edges, gradients, strict=True)
            if edge and gradient is not None
        ]
        leaves = [*self._inputs, *self._weights]
        differentiable = [leaf for leaf in leaves if leaf.requires_grad]
        self._edges = []
        if not differentiable or not pairs:
            return [None] * len(leaves)
        edges, output_gradients = zip(*pairs, strict=True)
        results = iter(torch.autograd.grad(edges, differentiable, output_gradients, allow_unused=True))
        return [next(results) if leaf.requires_grad else None for leaf in leaves]


def autograd_passes(primitive: Primitive, places: TensorPlaces) -> BothPasses:
    """Prepare both passes of a primitive. The backward pass is autograd's derivative of its definition, `compute`."""
    names = [*(parameter.name for parameter in primitive.parameters()), *primitive.borrows]
    weight_places = [places.weights[name] for name in names]
    inputs_by_name = {name: (places.tensors[name], is_buffer(indices)) for name, indices in primitive.reads.items()}
    results = [(places.make(name), is_buffer(indices)) for name, indices in primitive.makes.items()]
    graph, block = places.make(), places.block

    def forward(ctx: Context) -> None:
        tensors, factor = ctx.tensors, ctx.factor(primitive, block)
        sequences = ctx.rows, ctx.tokens
        inputs = [
            tensors[index] if buffers else tensors[index].unflatten(0, sequences)
            for index, buffers in inputs_by_name.values()
        ]
        weights = [ctx.weights[place] for place in weight_places]

        def function(parameters: Weights, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
            by_name = dict(zip(names, parameters, strict=True))
            return compute(
                primitive, Operands(by_name, dict(zip(inputs_by_name, tensors, strict=True)), ctx.share, factor)
            )

        if ctx.keeps:
            tensors[graph] = AutogradGraph(function, weights, inputs)
            outputs: Sequence[Tensor] = tensors[graph].take_outputs()
        else:
            outputs = function(weights, inputs)
        memories = {x.untyped_storage().data_ptr() for x in inputs}
        for (place, buffers), output in zip(results, outputs, strict=True):
            shared = output.untyped_storage().data_ptr() in memories  # other primitives may write over the inputs
            result = output.clone() if shared else output
            tensors[place] = result if buffers else result.flatten(0, 1)

    def backward(ctx: Context) -> None:
        output_pairs = [(ctx.gradients[place], buffers) for place, buffers in results]
        output_gradients = [
            output if buffers or output is None else ctx.of_sequences(output) for output, buffers in output_pairs
        ]
        for place, _ in results:
            ctx.gradients[place] = None
        gradients = ctx.tensors[graph].backward([ctx.weights[place] for place in weight_places], output_gradients)
        for (place, buffers), gradient in zip(inputs_by_name.values(), gradients, strict=False):
            if gradient is not None:
                ctx.add_shared_gradient(place, gradient if buffers else gradient.flatten(0, 1))
        accumulate_gradients(ctx.accumulate, weight_places, gradients[len(inputs_by_name) :])

    kept_inputs = [place for place, _ in inputs_by_name.values()] if primitive.made_again else []
    return BothPasses(forward, backward, (graph, *kept_inputs))


def accumulate_gradients(accumulate: Accumulate, places: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
    """Accumulate gradients of parameters; None is skipped."""
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is not None:
            accumulate(partial(_add_gradient, place), gradient, gradient)


@dataclass(frozen=True)
class CompiledPasses:
    """Both passes of a compiled layer, with the interface of `PreparedLayer`. The compiler chooses the tensors to save.

    Attributes:
        layer: the layer, which is compiled at its first call.
    """

    layer: TensorLayer

    def forward(
        self,
        inputs: Sequence[Tensor],
        weights: Weights,
        share: Share = WHOLE_LAYER,
        dropout: Dropout | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[list[Tensor], AutogradGraph | None]:
        """Compute the layer's outputs and the graph for its backward pass (see `PreparedLayer.forward`)."""

        def function(parameters: Weights, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return self.layer.run(parameters, tensors, share, dropout)

        if not keeps:
            with torch.no_grad():
                return [*function(weights, inputs)], None
        graph = AutogradGraph(function, weights, inputs)
        return graph.take_outputs(), graph

    def backward(
        self, graph: AutogradGraph, gradients: Sequence[Tensor], weights: Weights, accumulate: Accumulate
    ) -> list[Tensor | None]:
        """Turn the gradients of the outputs into those of the inputs; None for tokens."""
        results = graph.backward(weights, gradients)
        inputs = len(results) - len(weights)
        accumulate_gradients(accumulate, range(len(weights)), results[inputs:])
        return results[:inputs]


def _add_gradient(place: int, totals: Weights, gradient: Tensor, _: Tensor) -> None:
    totals[place].add_(gradient)

"""Backward passes that autograd makes: of a primitive that has none written out, or of a layer that is compiled."""

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
from shardlab.models.tensors.backward.workspace import BothPasses, Take, TensorPlaces, Weights, Workspace, are_buffers
from shardlab.models.tensors.compute import Given, compute
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.layers import TensorLayer
from shardlab.models.tensors.share import ALL, Share

Function = Callable[[Weights, Sequence[Tensor]], Sequence[Tensor]]
"""Computes some tensors, given parameters and other tensors."""


class View(NamedTuple):
    """A tensor that autograd saved, as its place in a parameter."""

    weight: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Saved:
    """What autograd keeps of a function.

    The weight that a forward pass used may be freed before the backward pass and gathered again, elsewhere. Autograd
    would keep it alive; instead, whatever it saves of a parameter is kept as a place, and looked up in the parameters
    that the backward pass is given (torch.autograd.graph.saved_tensors_hooks).
    """

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self._begins = [weight.data_ptr() for weight in weights]
        spans = (sum((size - 1) * by for size, by in zip(w.shape, w.stride(), strict=True)) for w in weights)
        self._bytes = [(1 + span) * weight.itemsize for span, weight in zip(spans, weights, strict=True)]

    def pack(self, tensor: Tensor) -> Tensor | View:
        place = tensor.data_ptr()
        for number, (begin, bytes) in enumerate(zip(self._begins, self._bytes, strict=True)):
            if 0 <= place - begin < bytes and tensor.numel():
                return View(number, tensor.shape, tensor.stride(), (place - begin) // tensor.itemsize)
        return tensor.detach()  # or it would keep the graph, which keeps this, for ever

    def unpack(self, kept: Tensor | View) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        weight = self.weights[kept.weight]
        return weight.as_strided(kept.size, kept.stride, weight.storage_offset() + kept.offset)


class Graph:
    """A function's forward pass, which is done when this is made, and what its backward pass needs of it.

    Args:
        function: what is computed.
        weights: the parameters.
        inputs: the tensors.
    """

    def __init__(self, function: Function, weights: Weights, inputs: Sequence[Tensor]) -> None:
        self._saved = Saved(weights)
        self._weights = [weight.detach().requires_grad_() for weight in weights]
        self._inputs = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
        with torch.enable_grad(), saved_tensors_hooks(self._saved.pack, self._saved.unpack):
            made = function(self._weights, self._inputs)
        self._saved.weights = ()
        self._edges = [get_gradient_edge(each) if each.requires_grad else None for each in made]
        self._made = [each.detach() for each in made]  # before a leaf that is handed on lets go of what is in it
        for leaf in (*self._weights, *self._inputs):
            if leaf.requires_grad:  # what is wanted of it is saved: it only waits for its gradient
                leaf.data = leaf.new_empty(1).expand(leaf.shape)

    def take_outputs(self) -> list[Tensor]:
        """What the function made, to be taken once: the graph must not keep it alive."""
        made, self._made = self._made, []
        return made

    def backward(self, weights: Weights, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the inputs, then of the parameters; none where there is none.

        Args:
            weights: the parameters now.
            gradients: those of the outputs.
        """
        self._saved.weights = weights
        given = [(edge, each) for edge, each in zip(self._edges, gradients, strict=True) if edge and each is not None]
        leaves = [*self._inputs, *self._weights]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        self._edges = []
        if not wanted or not given:
            return [None] * len(leaves)
        edges, arrived = zip(*given, strict=True)
        found = iter(torch.autograd.grad(edges, wanted, arrived, allow_unused=True))
        return [next(found) if leaf.requires_grad else None for leaf in leaves]


def by_autograd(primitive: Primitive, at: TensorPlaces) -> BothPasses:
    """Both passes of a primitive, the second by autograd through what computes it (`compute`)."""
    names = [*(parameter.name for parameter in primitive.parameters()), *primitive.borrows]
    held = [at.weights[name] for name in names]
    read = {name: (at.tensors[name], are_buffers(indices)) for name, indices in primitive.reads.items()}
    made = [(at.make(name), are_buffers(indices)) for name, indices in primitive.makes.items()]
    graph, block = at.make(), at.block

    def forward(its: Workspace) -> None:
        tensors, factor = its.tensors, its.factor(primitive, block)
        sequences = its.rows, its.tokens
        inputs = [
            tensors[place] if buffers else tensors[place].unflatten(0, sequences) for place, buffers in read.values()
        ]
        weights = [its.weights[place] for place in held]

        def function(parameters: Weights, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
            by_name = dict(zip(names, parameters, strict=True))
            return compute(primitive, Given(by_name, dict(zip(read, given, strict=True)), its.share, factor))

        if its.keeps:
            tensors[graph] = Graph(function, weights, inputs)
            outputs: Sequence[Tensor] = tensors[graph].take_outputs()
        else:
            outputs = function(weights, inputs)
        memories = {x.untyped_storage().data_ptr() for x in inputs}
        for (place, buffers), each in zip(made, outputs, strict=True):
            own = each.clone() if each.untyped_storage().data_ptr() in memories else each  # others may write over them
            tensors[place] = own if buffers else own.flatten(0, 1)

    def backward(its: Workspace) -> None:
        arrived = [(its.gradients[place], buffers) for place, buffers in made]
        given = [each if buffers or each is None else its.of_sequences(each) for each, buffers in arrived]
        for place, _ in made:
            its.gradients[place] = None
        found = its.tensors[graph].backward([its.weights[place] for place in held], given)
        for (place, buffers), gradient in zip(read.values(), found, strict=False):
            if gradient is not None:
                its.hand_on(place, gradient if buffers else gradient.flatten(0, 1))
        take_gradients(its.take, held, found[len(read) :])

    kept = [place for place, _ in read.values()] if primitive.made_again else []
    return BothPasses(forward, backward, (graph, *kept))


def take_gradients(take: Take, places: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
    """Take the gradients of parameters, by their places, that are made already; none where there is none."""
    for place, gradient in zip(places, gradients, strict=True):
        if gradient is not None:
            take(partial(_add_gradient, place), gradient, gradient)


def _add_gradient(place: int, rooms: Weights, gradient: Tensor, _: Tensor) -> None:
    rooms[place].add_(gradient)


# Both passes of a layer that is compiled: the compiler makes the second of the first.


@dataclass(frozen=True)
class CompiledPasses:
    """Both passes of one layer, as `PreparedLayer`; the compiler chooses what is kept.

    Attributes:
        layer: compiled at its first call.
    """

    layer: TensorLayer

    def forward(
        self,
        inputs: Sequence[Tensor],
        weights: Weights,
        share: Share = ALL,
        dropout: Dropout | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[list[Tensor], Graph | None]:
        """The layer's outputs, and what its backward pass wants (see `PreparedLayer.forward`)."""

        def function(parameters: Weights, given: Sequence[Tensor]) -> Sequence[Tensor]:
            return self.layer.run(parameters, given, share, dropout)

        if not keeps:
            with torch.no_grad():
                return [*function(weights, inputs)], None
        graph = Graph(function, weights, inputs)
        return graph.take_outputs(), graph

    def backward(self, kept: Graph, given: Sequence[Tensor], weights: Weights, take: Take) -> list[Tensor | None]:
        """The inputs' gradients, of those of the outputs; none for tokens."""
        found = kept.backward(weights, given)
        inputs = len(found) - len(weights)
        take_gradients(take, range(len(weights)), found[inputs:])
        return found[:inputs]

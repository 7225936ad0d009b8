"""One layer's forward and backward pass on tensors, with the graph that autograd keeps between them.

The weight that a FORWARD used may be freed before its BACKWARD and gathered again, elsewhere. Autograd would keep it
alive; instead, whatever it saves of the weight's buffer is kept as a place (size, stride, offset) and looked up in
the buffer that BACKWARD is given (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from shardlab.execute.entries import Entry, deepest, entries
from shardlab.models import LayerLayout
from shardlab.models.tensors import Dropout, Layer, views


class FlatWeight:
    """A layer's complete flat weights on the device, and its parameters as leaves that view them."""

    def __init__(self, flat: Tensor, layout: LayerLayout) -> None:
        self.flat = flat
        self.leaves = [view.detach().requires_grad_() for view in views(layout, flat)]


@dataclass(frozen=True)
class _Place:
    """A tensor that autograd saved, as its place in the weight's buffer."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int | torch.SymInt


class Graph:
    """What is kept between a layer's forward and backward."""

    def __init__(self, layer: Layer, x: Tensor, weight: FlatWeight, dropout: Dropout | None, regathered: bool) -> None:
        """Run the layer; `output` is its result, to be taken once, since the graph must not keep it alive."""
        self._flat: Tensor | None = weight.flat
        self._leaves = weight.leaves
        self._x = x.detach().requires_grad_(x.is_floating_point())
        if regathered:
            with saved_tensors_hooks(self._pack, self._unpack):
                y = layer(weight.leaves, self._x, dropout)
        else:
            y = layer(weight.leaves, self._x, dropout)
        self._edge: GradientEdge = get_gradient_edge(y)
        self._entries: list[Entry] = []
        self._whole: dict[int, Tensor] = {}
        self.output: Tensor | None = y.detach()

    def take_output(self) -> Tensor:
        output, self.output = self.output, None
        assert output is not None
        return output

    def backward(self, gradient: Tensor, flat: Tensor, into: Sequence[Tensor]) -> Tensor | None:
        """Add the parameters' gradients to the views `into`; gives the input's gradient (None for tokens).

        `flat` is the weight's buffer now.
        """
        self._flat = flat
        inputs = [self._x] if self._x.requires_grad else []
        with _gradients_into(self._leaves, into):
            torch.autograd.backward(self._edge, gradient, inputs=[*self._leaves, *inputs])
        return self._x.grad

    def backward_input(self, gradient: Tensor, flat: Tensor) -> Tensor | None:
        """The input's gradient alone; keeps the gradients that arrive where the parameters enter the graph.

        Tokens have no gradient; in their place stands the first thing that is made of them. The gradient of a parameter
        that enters at several nodes (a tied embedding) is not put off.
        """
        self._flat = flat
        start = get_gradient_edge(self._x) if self._x.requires_grad else deepest(self._edge, self._leaves)
        self._entries = entries(self._edge, start, self._leaves)
        entered = {place for entry in self._entries for place in entry.leaves}
        rest = [place for place in range(len(self._leaves)) if place not in entered]
        hooks = [entry.node.register_prehook(entry.catch) for entry in self._entries]
        wanted = [start, *(get_gradient_edge(self._leaves[place]) for place in rest)]
        gradients: tuple[Tensor, ...] = torch.autograd.grad(self._edge, wanted, gradient, retain_graph=True)
        grad_start = gradients[0]
        self._whole = dict(zip(rest, gradients[1:], strict=True))
        for hook in hooks:
            hook.remove()
        if self._x.requires_grad:
            return grad_start
        for entry in self._entries:
            if entry.node is start.node:  # where the walk ended: no hook is called there
                entry.caught = {start.output_nr: grad_start}
        return None

    def backward_weight(self, into: Sequence[Tensor]) -> None:
        """Add the parameters' gradients to the views `into`, from what `backward_input` kept."""
        self._flat = None
        for place, gradient in self._whole.items():
            into[place].add_(gradient)
        for entry in self._entries:
            leaves = [self._leaves[place] for place in entry.leaves]
            edges = [GradientEdge(entry.node, output) for output in entry.caught]
            with _gradients_into(leaves, [into[place] for place in entry.leaves]):
                torch.autograd.backward(edges, list(entry.caught.values()), inputs=leaves)

    def _pack(self, tensor: Tensor) -> Any:
        assert self._flat is not None
        if tensor.untyped_storage().data_ptr() != self._flat.untyped_storage().data_ptr():
            return tensor
        return _Place(tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - self._flat.storage_offset())

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Place):
            return kept
        if self._flat is None:  # the weight may be gone: an op hands it on, but no parameter's gradient depends on it
            return self._leaves[0].new_full((), math.nan).expand(kept.size)
        return self._flat.as_strided(kept.size, kept.stride, self._flat.storage_offset() + kept.offset)


@contextmanager
def _gradients_into(leaves: Sequence[Tensor], into: Iterable[Tensor]) -> Generator[None, None, None]:
    """Autograd adds the leaves' gradients to these tensors."""
    for leaf, view in zip(leaves, into, strict=True):
        leaf.grad = view
    yield
    for leaf in leaves:
        leaf.grad = None

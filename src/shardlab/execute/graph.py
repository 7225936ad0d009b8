"""One layer's forward and backward pass on tensors, with the graph that autograd keeps between them.

The weight that a FORWARD used may be freed before its BACKWARD and gathered again, elsewhere. Autograd would keep it
alive; instead, whatever it saves of the weight's buffer is kept as a place (size, stride, offset) and looked up in
the buffer that BACKWARD is given (torch.autograd.graph.saved_tensors_hooks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

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
        self._flat = weight.flat
        self._leaves = weight.leaves
        self._x = x.detach().requires_grad_(x.is_floating_point())
        if regathered:
            with saved_tensors_hooks(self._pack, self._unpack):
                y = layer(weight.leaves, self._x, dropout)
        else:
            y = layer(weight.leaves, self._x, dropout)
        self._edge: GradientEdge = get_gradient_edge(y)
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
        for leaf, view in zip(self._leaves, into, strict=True):
            leaf.grad = view
        inputs = [*self._leaves, self._x] if self._x.requires_grad else self._leaves
        torch.autograd.backward(self._edge, gradient, inputs=inputs)
        for leaf in self._leaves:
            leaf.grad = None
        return self._x.grad

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.untyped_storage().data_ptr() != self._flat.untyped_storage().data_ptr():
            return tensor
        return _Place(tuple(tensor.shape), tensor.stride(), tensor.storage_offset() - self._flat.storage_offset())

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, _Place):
            return kept
        return self._flat.as_strided(kept.size, kept.stride, self._flat.storage_offset() + kept.offset)

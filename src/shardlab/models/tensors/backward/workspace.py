"""The interface of a primitive's two passes: their context, the numbers of tensors, and the function that prepares
them.

- `Context` (`ctx`, as in torch.autograd.Function) has the tensors and gradients of one pass through a layer.
- `TensorPlaces` numbers these tensors once, when a layer is prepared. A tensor's *place* is its index in the context's
  lists.
- `make_passes` prepares both passes of a primitive. A primitive with a hand-written backward pass registers a function
  there.

The tokens of all sequences are one dim, (rows x T, features), as matrix products need it. Experts' buffers are
(experts, capacity, features).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from shardlab.models.primitives import Primitive
from shardlab.models.tensors.dropout import Dropout, FactorInputs, make_factor
from shardlab.models.tensors.share import Share

Weights = Sequence[Tensor]
"""A layer's parameters in the order of their names, or the totals of their gradients in the same order."""

AddGradients = Callable[[Weights, Tensor, Tensor], None]
"""Function of (totals, gradient of the result, input) that adds the parameters' gradients to `totals`."""

Accumulate = Callable[[AddGradients, Tensor, Tensor], None]
"""Function of (function, gradient of the result, input). It calls the function at once, or stores all three for the
second half of a split backward pass."""


def _ignore_gradient(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
    """Placeholder for `Accumulate` outside a backward pass."""


@dataclass(slots=True)
class Context:
    """Context of one forward pass of a layer and of the backward pass that follows it.

    Attributes:
        tensors: tensors by place. After the forward pass, only the tensors for the backward pass are left.
        weights: the layer's parameters. Each pass sets them, since their addresses may differ between passes.
        share: the slice of the layer, or the tokens, that are computed.
        dropout: the masks (None: nothing is dropped).
        rows: number of sequences.
        tokens: tokens of each sequence on this rank.
        keeps: whether a backward pass follows.
        gradients: gradients of the tensors, by place, in the backward pass.
        accumulate: function that adds the parameters' gradients, now or later.
    """

    tensors: list[Any]
    weights: Weights
    share: Share
    dropout: Dropout | None
    rows: int
    tokens: int
    keeps: bool = True
    gradients: list[Any] = field(default_factory=list[Any])
    accumulate: Accumulate = _ignore_gradient

    def end(self) -> None:
        """Drop the fields of a single pass, at its end."""
        self.weights, self.accumulate = (), _ignore_gradient

    def factor(self, primitive: Primitive, block: int) -> Tensor | None:
        """Return a primitive's factor that is not a parameter: a dropout mask, rotary angles, or None."""
        like = next(x for x in (*self.weights, *self.tensors) if isinstance(x, Tensor))
        dropout = None if self.dropout is None else self.dropout.of_block(block)
        return make_factor(primitive, FactorInputs(self.rows, self.tokens, self.share, dropout, like))

    def of_sequences(self, x: Tensor) -> Tensor:
        """View (rows x T, features) as (rows, T, features)."""
        return x.view(self.rows, self.tokens, -1)

    def pop_gradient(self, place: int) -> Tensor:
        """Remove and return the gradient of a tensor."""
        gradient, self.gradients[place] = self.gradients[place], None
        return gradient

    def add_gradient(self, place: int, gradient: Tensor) -> None:
        """Add `gradient` to the gradient of a tensor. The sum overwrites `gradient`, which nothing else may read."""
        older: Tensor | None = self.gradients[place]
        self.gradients[place] = gradient if older is None else gradient.add_(older)

    def add_shared_gradient(self, place: int, gradient: Tensor) -> None:
        """Add `gradient` to the gradient of a tensor. `gradient` is not overwritten: another tensor may have it too."""
        older: Tensor | None = self.gradients[place]
        self.gradients[place] = gradient if older is None else gradient + older


class BothPasses(NamedTuple):
    """Forward and backward pass of a primitive.

    Attributes:
        forward: computes the result from the tensors of a context.
        backward: turns the gradient of the result into those of the inputs and the parameters.
        keeps: places of the tensors that the backward pass reads.
    """

    forward: Callable[[Context], None]
    backward: Callable[[Context], None]
    keeps: tuple[int, ...] = ()


@dataclass
class TensorPlaces:
    """Numbering of a layer's tensors: a place is an index in the lists of `Context`.

    Attributes:
        weights: index of each parameter, by name, in the list of parameters.
        device: type of the device that computes the layer, such as "cpu".
        block: block of the primitive that is being prepared. Each block has separate dropout masks.
        tensors: place of the latest tensor of each name.
        recompute: by place, the forward pass that recomputes a tensor that is not kept.
        count: number of places.
    """

    weights: dict[str, int]
    device: str
    block: int = 0
    tensors: dict[str, int] = field(default_factory=dict[str, int])
    recompute: dict[int, Callable[[Context], None]] = field(default_factory=dict[int, Callable[[Context], None]])
    count: int = 0

    def make(self, name: str = "") -> int:
        """Return a new place. A name refers to this place from now on."""
        place = self.count
        self.count += 1
        if name:
            self.tensors[name] = place
        return place

    def weights_of(self, name: str, bias: bool) -> tuple[int, int]:
        """Return the indices of a weight and its bias; -1 if `bias` is false.

        A bias of this name may still exist: a residual sum (`Add`) may own it.
        """
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"] if bias else -1


def is_buffer(indices: str) -> bool:
    """Return whether a tensor with these indices is an experts' buffer, (experts, capacity, features)."""
    return "expert" in indices.split()


@singledispatch
def make_passes(primitive: Primitive, places: TensorPlaces) -> BothPasses | None:
    """Prepare both passes of a primitive; None if autograd is to derive the backward pass.

    A new primitive works without a function here. A registered function gives it a hand-written backward pass.

    Args:
        primitive: the primitive.
        places: numbering of the layer's tensors. The function adds places for the primitive's results.
    """
    return None

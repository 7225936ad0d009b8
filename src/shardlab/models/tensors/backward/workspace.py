"""A primitive's forward and backward pass, and what they have at hand.

Passes are prepared once: tensors go by their places in a list, weights and gradients too. The tokens of all sequences
are one dim, (rows x T, features), since products take it so; experts' buffers are (experts, capacity, features).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

from torch import Tensor

from shardlab.models.primitives import Primitive
from shardlab.models.tensors.dropout import Dropout, Surroundings, factor
from shardlab.models.tensors.share import Share

Weights = Sequence[Tensor]
"""A layer's parameters, in the order of their names; or where their gradients are added."""

AddGradients = Callable[[Weights, Tensor, Tensor], None]
"""Adds the gradients of a primitive's parameters to `Weights`, given that of its result, and what it read."""

Take = Callable[[AddGradients, Tensor, Tensor], None]
"""Takes what a primitive's parameters' gradients are made of: makes them at once, or keeps it for later."""


def _nothing(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
    """In place of `Take`, where there is no backward pass."""


@dataclass(slots=True)
class Workspace:
    """One forward pass of a layer, and the backward pass that follows: what their primitives have at hand.

    Attributes:
        tensors: by place; after the forward pass those that the backward pass reads.
        weights: the layer's parameters now: they may lie elsewhere when the backward pass comes.
        share: which slice, or which tokens, are computed.
        dropout: the masks (None: nothing is dropped).
        rows, tokens: sequences, and the tokens of each that are here.
        keeps: whether a backward pass follows.
        gradients: of the tensors, by place, in the backward pass.
        take: takes what the parameters' gradients are made of.
    """

    tensors: list[Any]
    weights: Weights
    share: Share
    dropout: Dropout | None
    rows: int
    tokens: int
    keeps: bool = True
    gradients: list[Any] = field(default_factory=list[Any])
    take: Take = _nothing

    def end(self) -> None:
        """One of the two passes is over: what it was given for itself alone is let go."""
        self.weights, self.take = (), _nothing

    def factor(self, primitive: Primitive, block: int) -> Tensor | None:
        """What a primitive of a block multiplies by beside its parameters: a mask, or turns."""
        like = next(each for each in (*self.weights, *self.tensors) if isinstance(each, Tensor))
        dropout = None if self.dropout is None else self.dropout.of_block(block)
        return factor(primitive, Surroundings(self.rows, self.tokens, self.share, dropout, like))

    def of_sequences(self, x: Tensor) -> Tensor:
        """(rows x T, features) to (rows, T, features)."""
        return x.view(self.rows, self.tokens, -1)

    def taken(self, place: int) -> Tensor:
        """The gradient of a tensor, which nobody wants afterwards."""
        gradient, self.gradients[place] = self.gradients[place], None
        return gradient

    def give(self, place: int, gradient: Tensor) -> None:
        """Add a gradient to that of a tensor: it has memory of its own; the older one may be another's as well."""
        older: Tensor | None = self.gradients[place]
        self.gradients[place] = gradient if older is None else gradient.add_(older)

    def hand_on(self, place: int, gradient: Tensor) -> None:
        """Add a gradient to that of a tensor; its memory is another's as well."""
        older: Tensor | None = self.gradients[place]
        self.gradients[place] = gradient if older is None else gradient + older


class BothPasses(NamedTuple):
    """A primitive's passes.

    Attributes:
        forward, backward: what is done in each.
        keeps: places of what the backward pass reads.
    """

    forward: Callable[[Workspace], None]
    backward: Callable[[Workspace], None]
    keeps: tuple[int, ...] = ()


@dataclass
class TensorPlaces:
    """Where the tensors of a layer lie in its list.

    Attributes:
        weights: places of the parameters, by name, in their own list.
        device: the type of that on which the layer is computed.
        block: the block of the primitive at hand, which has masks of its own.
        tensors: places of the tensors that were last made under their names.
        again: what makes a tensor again that is not kept, by its place.
        count: how many there are.
    """

    weights: dict[str, int]
    device: str
    block: int = 0
    tensors: dict[str, int] = field(default_factory=dict[str, int])
    again: dict[int, Callable[[Workspace], None]] = field(default_factory=dict[int, Callable[[Workspace], None]])
    count: int = 0

    def make(self, name: str = "") -> int:
        """A new place, of the tensor of this name from now on; without one, of something beside."""
        place = self.count
        self.count += 1
        if name:
            self.tensors[name] = place
        return place

    def weights_of(self, name: str, bias: bool) -> tuple[int, int]:
        """TensorPlaces of a weight and its bias; -1 for none. One of this name may be another primitive's (`Add`)."""
        return self.weights[f"{name}.weight"], self.weights[f"{name}.bias"] if bias else -1


def are_buffers(indices: str) -> bool:
    """Whether a tensor with these indices is experts' buffers, whose dims are not those of sequences."""
    return "expert" in indices.split()


@singledispatch
def passes(primitive: Primitive, at: TensorPlaces) -> BothPasses | None:
    """Both passes of a primitive; None where autograd is to make the second of the first.

    A new primitive needs none; one that registers a function here has a backward pass of its own.
    """
    return None

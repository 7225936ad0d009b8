"""The interface of a primitive's two passes: their context, their places, and the function that prepares them.

- `Context` (`ctx`, as in torch.autograd.Function) holds the tensors and gradients of one pass through a layer.
- `TensorPlaces` numbers these tensors once, when a layer is prepared. A pass then finds them by index in a list.
- `make_passes` prepares both passes of a primitive. A primitive registers a function there if it has a backward pass
  that is written out.

The tokens of all sequences are one dim, (rows x T, features), because matrix products need it so. Experts' buffers are
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
"""A layer's parameters in the order of their names, or the tensors to which their gradients are added."""

AddGradients = Callable[[Weights, Tensor, Tensor], None]
"""Called with (totals, gradient of the result, input): adds the gradients of a primitive's parameters to `totals`."""

Accumulate = Callable[[AddGradients, Tensor, Tensor], None]
"""Called with (function, gradient of the result, input): calls the function at once, or keeps all three for the second
half of a split backward pass."""


def _nothing(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
    """Stand in for `Accumulate` while there is no backward pass."""


@dataclass(slots=True)
class Context:
    """Context of one forward pass of a layer and of the backward pass that follows it.

    Attributes:
        tensors: tensors by place. After the forward pass, only those are left that the backward pass reads.
        weights: the layer's parameters. They may lie elsewhere when the backward pass runs, so each pass sets them.
        share: the slice, or the tokens, that are computed.
        dropout: the masks (None: nothing is dropped).
        rows: number of sequences.
        tokens: tokens of each sequence that this rank has.
        keeps: whether a backward pass follows.
        gradients: gradients of the tensors, by place, in the backward pass.
        accumulate: adds the parameters' gradients, now or later.
    """

    tensors: list[Any]
    weights: Weights
    share: Share
    dropout: Dropout | None
    rows: int
    tokens: int
    keeps: bool = True
    gradients: list[Any] = field(default_factory=list[Any])
    accumulate: Accumulate = _nothing

    def end(self) -> None:
        """Drop what belongs to one pass alone, at its end."""
        self.weights, self.accumulate = (), _nothing

    def factor(self, primitive: Primitive, block: int) -> Tensor | None:
        """Return the factor of a primitive beside its parameters: a dropout mask, rotary angles, or None."""
        like = next(each for each in (*self.weights, *self.tensors) if isinstance(each, Tensor))
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
        """Add to the gradient of a tensor, in the memory of `gradient`, which no one else may read."""
        older: Tensor | None = self.gradients[place]
        self.gradients[place] = gradient if older is None else gradient.add_(older)

    def add_shared_gradient(self, place: int, gradient: Tensor) -> None:
        """Add to the gradient of a tensor. `gradient` does not change: another tensor may have the same one."""
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
    """Numbering of a layer's tensors: each one's index in the lists of `Context`.

    Attributes:
        weights: index of each parameter, by name, in the list of parameters.
        device: type of the device that computes the layer, such as "cpu".
        block: block of the primitive that is being prepared. Each block has its own dropout masks.
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
        """Return a new place. If there is a name, it stands for this place from now on."""
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
    """Prepare both passes of a primitive; None if autograd shall derive the backward pass.

    A new primitive works without a function here. A registered function gives it a backward pass that is written out.

    Args:
        primitive: the primitive.
        places: numbering of the layer's tensors. The function makes places for its results.
    """
    return None

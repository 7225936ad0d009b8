"""The judge's toy layers: their interface, and whole layers, z = x W + b, y = z + z * z, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, BrokenTape, Column, Piece, elements, labels, rows, whole

EVERYWHERE = tuple(range(ELEMENTS))


class ToyLayer(Protocol):
    """Functions from pieces to pieces, with inputs and outputs in the order of the op.

    Saved data of a pass is any array or tuple; the backward half for the input saves data for the half for the weight.
    """

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Any]:
        """(activation, weight[, residual]) to ([all that the layer makes], kept)."""
        ...

    def backward_input(self, inputs: list[Piece], ctx: Any) -> tuple[list[Piece], Any]:
        """(activation, gradient, weight[, the other gradient]) to ([gradients of what forward read], half)."""
        ...

    def backward_weight(self, activation: Piece, gradient: Piece, half: Any) -> Piece:
        """The gradient of the weight."""
        ...


@dataclass(frozen=True)
class Place:
    """Position of a layer in its network; its numbers depend on it.

    Attributes:
        number: number of the layer.
        kinds: kinds of all layers.
        sequence: rows of a microbatch, its tokens.
        slices: number of slices of the experts, and of each expert's features, which order a layer's elements.
        gates: whether experts have gates, which the norms around them carry as well.
    """

    number: int
    kinds: tuple[str, ...]
    sequence: int = 1
    slices: tuple[int, int] = (1, 1)
    gates: bool = False

    @property
    def is_last(self) -> bool:
        return self.number == len(self.kinds) - 1

    def follows(self, kind: str) -> bool:
        """Whether the layer before is of a kind."""
        return self.number > 0 and self.kinds[self.number - 1] == kind

    def precedes(self, kind: str) -> bool:
        """Whether the next layer is of a kind."""
        return not self.is_last and self.kinds[self.number + 1] == kind

    @property
    def same_kind(self) -> list[int]:
        """Numbers of the layers of the same kind, in order."""
        return [number for number, kind in enumerate(self.kinds) if kind == self.kinds[self.number]]


class Whole:
    """An unsliced layer."""

    def __init__(self, place: Place) -> None:
        self.shift = 17 * place.number + 5

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Array]:
        activation, weight = inputs
        x = rows(activation)
        z = (x.data @ whole(weight).reshape(WIDTH, WIDTH) + self.shift) % PRIME
        return [Piece(x.positions, (z + z * z) % PRIME)], z

    def backward_input(self, inputs: list[Piece], ctx: Array) -> tuple[list[Piece], Array]:
        activation, gradient, weight = inputs
        rows(activation)
        dy = rows(gradient)
        dz = dy.data * ((1 + 2 * ctx) % PRIME) % PRIME
        return [Piece(dy.positions, dz @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME)], dz

    def backward_weight(self, activation: Piece, gradient: Piece, half: Array) -> Piece:
        rows(gradient)
        return Piece(EVERYWHERE, product(rows(activation).data, half).reshape(-1))


def product(a: Array, b: Array) -> Array:
    """a^T b, summed over the rows."""
    return (a[:, :, None] * b[:, None, :] % PRIME).sum(0) % PRIME


def matrix_of(weight: Piece) -> Array:
    """The rows of a weight matrix that a piece has; slices are made of whole rows."""
    positions = elements(weight).positions
    if len(positions) % WIDTH or any(
        positions[i] != positions[i - i % WIDTH] + i % WIDTH for i in range(len(positions))
    ):
        raise BrokenTape("the weight is not made of whole slices")
    if any(positions[i] % WIDTH for i in range(0, len(positions), WIDTH)):
        raise BrokenTape("the weight is not made of whole slices")
    return weight.data.reshape(-1, WIDTH)


def rows_of_matrix(weight: Piece, *sorts: str) -> tuple[Column, ...]:
    """The columns that these rows of the matrix compute, or read."""
    return labels((place // WIDTH for place in weight.positions[::WIDTH]), *sorts)


def own_columns(gradient: Piece, mine: tuple[Column, ...]) -> Array:
    """Return the columns of some outputs of a gradient, complete or in slices."""
    has = gradient.columns or labels(range(WIDTH), "feature")
    data = rows(gradient).data
    if len(has) != data.shape[1] or any(column not in has for column in mine):
        raise BrokenTape("the gradient lacks the layer's own columns")
    return data[:, [has.index(column) for column in mine]]


def batch_rows(places: tuple[int, ...]) -> Array:
    numbers = 100 * (np.array(places, np.int64)[:, None] + 1) + np.arange(WIDTH, dtype=np.int64)
    return numbers**3 % PRIME

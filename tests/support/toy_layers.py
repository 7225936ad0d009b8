"""The judge's toy network of whole layers: z = x W + b, y = z + z * z; a microbatch is one row."""

from __future__ import annotations

import numpy as np

from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, BrokenTape, Piece, rows, whole

EVERYWHERE = tuple(range(ELEMENTS))


def forward_layer(layer: int, x: Array, weight: Array) -> tuple[Array, Array]:
    """The output, and z, which is kept for the backward pass."""
    z = (x @ weight.reshape(WIDTH, WIDTH) + 17 * layer + 5) % PRIME
    return (z + z * z) % PRIME, z


def backward_input(z: Array, dy: Array, weight: Array) -> tuple[Array, Array]:
    """The gradient of the input, and dz, which is kept for the weight's."""
    dz = dy * ((1 + 2 * z) % PRIME) % PRIME
    return dz @ weight.reshape(WIDTH, WIDTH).T % PRIME, dz


def backward_weight(x: Array, dz: Array) -> Array:
    """The gradient of the weight, summed over the rows."""
    dw = sum((np.outer(a, b) % PRIME for a, b in zip(x, dz, strict=True)), np.zeros((WIDTH, WIDTH), np.int64)) % PRIME
    return dw.reshape(-1)


def batch_rows(places: tuple[int, ...]) -> Array:
    numbers = 100 * (np.array(places, np.int64)[:, None] + 1) + np.arange(WIDTH, dtype=np.int64)
    return numbers**3 % PRIME


class Whole:
    """What its layers do to pieces."""

    sequence = 1
    """Rows of a microbatch."""

    def batch(self, microbatches: tuple[int, ...]) -> Piece:
        return Piece(microbatches, batch_rows(microbatches))

    def forward(self, layer: int, inputs: list[Piece]) -> tuple[list[Piece], Array]:
        activation, weight = inputs
        x = rows(activation)
        y, z = forward_layer(layer, x.data, whole(weight))
        return [Piece(x.where, y)], z

    def backward_input(self, layer: int, inputs: list[Piece], z: Array) -> tuple[list[Piece], Array]:
        activation, gradient, weight = inputs
        rows(activation)
        dy = rows(gradient)
        dx, dz = backward_input(z, dy.data, whole(weight))
        return [Piece(dy.where, dx)], dz

    def backward_weight(self, layer: int, activation: Piece, gradient: Piece, dz: Array) -> Piece:
        rows(gradient)
        return Piece(EVERYWHERE, backward_weight(rows(activation).data, dz))

    def stats(self, logits: Piece) -> Piece:
        raise BrokenTape("whole layers have no slices of logits")

    def loss(self, inputs: list[Piece]) -> Piece:
        (activation,) = inputs
        y = rows(activation)
        return Piece(y.where, (3 * y.data + 1000 * np.array(y.where, np.int64)[:, None] + 7) % PRIME)

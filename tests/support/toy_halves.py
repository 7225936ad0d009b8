"""The judge's bodies of half-blocks, in which slices of layers and of sequences each have their own numbers.

A microbatch is a sequence of tokens. A body mixes the tokens of each sequence, and is a sum over its weight's rows: x'
= x + (place + 2) sum(x), z_j = x' . W_j, branch = sum_j (z_j + z_j * z_j) W_j; of the last body, the logits are the z_j
+ z_j * z_j themselves. A tokenwise body does not mix.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, Array, Piece, rows
from tests.support.toy_layers import Place, matrix_of, own_columns, product, rows_of_matrix


class Context(NamedTuple):
    """Values that a pass keeps for the next one: two arrays, and the weight's elements."""

    first: Array
    second: Array
    positions: tuple[int, ...]


class Body:
    """A body of kind `sliced`, or `tokenwise`, which does not mix tokens."""

    def __init__(self, place: Place) -> None:
        self.shift, self.is_last = 17 * place.number + 5, place.is_last
        self.sequence = place.sequence if place.kinds[place.number] == "sliced" else 1

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Context]:
        activation, weight = inputs
        positions, matrix = activation.positions, matrix_of(weight)
        z = (self._mixed(activation) @ matrix.T + self.shift) % PRIME
        h = (z + z * z) % PRIME
        ctx = Context(z, h, weight.positions)
        if self.is_last:
            return [Piece(positions, h, rows_of_matrix(weight, "feature"))], ctx
        return [Piece(positions, h @ matrix % PRIME)], ctx

    def backward_input(self, inputs: list[Piece], ctx: Context) -> tuple[list[Piece], Context]:
        activation, gradient, weight = inputs
        x, dy, matrix = rows(activation), rows(gradient), matrix_of(weight)
        columns = rows_of_matrix(weight, "feature")
        dh = own_columns(dy, columns) if self.is_last else dy.data @ matrix.T % PRIME
        dz = dh * ((1 + 2 * ctx.first) % PRIME) % PRIME
        dx = mixed(mixing(x.positions, self.sequence).T, dz @ matrix % PRIME)
        return [Piece(x.positions, dx)], Context(dz, ctx.second, weight.positions)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Context) -> Piece:
        dz, h, positions = half
        dy = rows(gradient)
        dw = product(dz, self._mixed(activation))
        if not self.is_last:
            dw = dw + product(h, dy.data)
        return Piece(positions, dw.reshape(-1) % PRIME)

    def _mixed(self, activation: Piece) -> Array:
        x = rows(activation)
        return mixed(mixing(x.positions, self.sequence), x.data)


def mixing(positions: tuple[int, ...], sequence: int) -> Array:
    """The matrix that mixes the tokens of each sequence, for the tokens of a piece."""
    identity = np.eye(len(positions), dtype=np.int64)
    if sequence == 1:
        return identity
    tokens = np.array(positions, np.int64)
    same_sequence = tokens[:, None] // sequence == tokens[None, :] // sequence
    return (same_sequence * (tokens[:, None] % sequence + 2) + identity).astype(np.int64)


def mixed(matrix: Array, x: Array) -> Array:
    """Matrix product, computed term by term, since a sequence may be long."""
    return (matrix[:, :, None] * x[None, :, :] % PRIME).sum(1) % PRIME

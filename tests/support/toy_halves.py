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


class Kept(NamedTuple):
    """Values that a pass keeps for the next one: two arrays, and the weight's elements."""

    first: Array
    second: Array
    where: tuple[int, ...]


class Body:
    """A body of kind `sliced`, or `tokenwise`, which does not mix tokens."""

    def __init__(self, place: Place) -> None:
        self.shift, self.is_last = 17 * place.number + 5, place.is_last
        self.sequence = place.sequence if place.kinds[place.number] == "sliced" else 1

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        activation, weight = inputs
        where, matrix = activation.where, matrix_of(weight)
        z = (self._mixed(activation) @ matrix.T + self.shift) % PRIME
        h = (z + z * z) % PRIME
        kept = Kept(z, h, weight.where)
        if self.is_last:
            return [Piece(where, h, rows_of_matrix(weight, "feature"))], kept
        return [Piece(where, h @ matrix % PRIME)], kept

    def backward_input(self, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        activation, gradient, weight = inputs
        x, dy, matrix = rows(activation), rows(gradient), matrix_of(weight)
        own = rows_of_matrix(weight, "feature")
        dh = own_columns(dy, own) if self.is_last else dy.data @ matrix.T % PRIME
        dz = dh * ((1 + 2 * kept.first) % PRIME) % PRIME
        dx = mixed(mixing(x.where, self.sequence).T, dz @ matrix % PRIME)
        return [Piece(x.where, dx)], Kept(dz, kept.second, weight.where)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Kept) -> Piece:
        dz, h, where = half
        dy = rows(gradient)
        made = product(dz, self._mixed(activation))
        if not self.is_last:
            made = made + product(h, dy.data)
        return Piece(where, made.reshape(-1) % PRIME)

    def _mixed(self, activation: Piece) -> Array:
        x = rows(activation)
        return mixed(mixing(x.where, self.sequence), x.data)


def mixing(where: tuple[int, ...], sequence: int) -> Array:
    """The matrix that mixes the tokens of each sequence, for the tokens of a piece."""
    own = np.eye(len(where), dtype=np.int64)
    if sequence == 1:
        return own
    tokens = np.array(where, np.int64)
    same = tokens[:, None] // sequence == tokens[None, :] // sequence
    return (same * (tokens[:, None] % sequence + 2) + own).astype(np.int64)


def mixed(matrix: Array, x: Array) -> Array:
    """Matrix product, computed term by term, since a sequence may be long."""
    return (matrix[:, :, None] * x[None, :, :] % PRIME).sum(1) % PRIME

"""The judge's half-blocks, in which slices of layers and of sequences each have their own numbers.

A microbatch is a sequence of tokens. A body mixes the tokens of each sequence, and is a sum over its weight's rows:
x' = x + (place + 2) sum(x), z_j = x' . W_j, branch = sum_j (z_j + z_j * z_j) W_j; of the last body, the logits are the
z_j + z_j * z_j themselves. A tokenwise body does not mix. A norm
works token by token: r = residual + f branch + bias, y = gain r + r * r, where the factor f, like a dropout's mask,
belongs to the token; so the gradients of residual and branch differ.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, WIDTH, Array, BrokenTape, Piece, rows, whole
from tests.support.toy_layers import EVERYWHERE, Place, matrix_of, product, rows_of_matrix


class Kept(NamedTuple):
    """What a pass keeps for the next: two arrays, and the elements of the weight that they are about."""

    first: Array
    second: Array
    where: tuple[int, ...]


class Body:
    """One of kind `sliced`, or `tokenwise`: then each token is alone."""

    def __init__(self, place: Place, sequence: int) -> None:
        self.shift, self.is_last = 17 * place.number + 5, place.is_last
        self.sequence = sequence if place.kinds[place.number] == "sliced" else 1

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        activation, weight = inputs
        where, matrix = activation.where, matrix_of(weight)
        z = (self._mixed(activation) @ matrix.T + self.shift) % PRIME
        h = (z + z * z) % PRIME
        kept = Kept(z, h, weight.where)
        if self.is_last:
            return [Piece(where, h, rows_of_matrix(weight))], kept
        return [Piece(where, h @ matrix % PRIME)], kept

    def backward_input(self, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        activation, gradient, weight = inputs
        x, dy, matrix = rows(activation), rows(gradient), matrix_of(weight)
        dh = dy.data if self.is_last else dy.data @ matrix.T % PRIME
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


class Norm:
    """(branch, residual) to (normalised, residual)."""

    def __init__(self, place: Place, sequence: int) -> None:
        self.number = place.number
        self.is_first, self.is_last = place.number == place.alike[0], place.number == place.alike[-1]

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        branch, weight, *residual = inputs
        x = rows(branch)
        if bool(residual) == self.is_first:
            raise BrokenTape("a residual is missing, or there is none")
        bias, gain = norm_parameters(whole(weight))
        r = self._factors(x.where) * x.data % PRIME + bias
        r = (r + (rows(residual[0]).data if residual else 0)) % PRIME
        outputs = [Piece(x.where, (gain * r + r * r) % PRIME)]
        if not self.is_last:
            outputs.append(Piece(x.where, r))
        return outputs, Kept(r, r, weight.where)

    def backward_input(self, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        branch, gradient, weight, *above = inputs
        x, dy = rows(branch), rows(gradient)
        if bool(above) == self.is_last:
            raise BrokenTape("the residual's gradient is missing, or there is none")
        _, gain = norm_parameters(whole(weight))
        dr = dy.data * ((gain + 2 * kept.first) % PRIME) % PRIME
        dr = (dr + (rows(above[0]).data if above else 0)) % PRIME
        made = [Piece(x.where, self._factors(x.where) * dr % PRIME)]
        if not self.is_first:
            made.append(Piece(x.where, dr))
        return made, Kept(dr, kept.first, weight.where)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Kept) -> Piece:
        rows(activation)
        dr, r, _ = half
        return Piece(EVERYWHERE, norm_gradient(dr.sum(0) % PRIME, (rows(gradient).data * r % PRIME).sum(0) % PRIME))

    def _factors(self, where: tuple[int, ...]) -> Array:
        return np.array([[3 + self.number + 7 * token * token] for token in where], np.int64) % PRIME


def mixing(where: tuple[int, ...], sequence: int) -> Array:
    """The matrix by which tokens of one sequence see each other, of the tokens that are there."""
    own = np.eye(len(where), dtype=np.int64)
    if sequence == 1:
        return own
    tokens = np.array(where, np.int64)
    same = tokens[:, None] // sequence == tokens[None, :] // sequence
    return (same * (tokens[:, None] % sequence + 2) + own).astype(np.int64)


def mixed(matrix: Array, x: Array) -> Array:
    """Their product, one term after the other: a sequence may be long."""
    return (matrix[:, :, None] * x[None, :, :] % PRIME).sum(1) % PRIME


def norm_parameters(weight: Array) -> tuple[Array, Array]:
    """Bias and gain: sums over half of the elements each."""
    factors = np.arange(1, WIDTH + 1, dtype=np.int64)[:, None]
    each = weight.reshape(WIDTH, WIDTH) * factors
    return each[: WIDTH // 2].sum(0) % PRIME, each[WIDTH // 2 :].sum(0) % PRIME


def norm_gradient(bias: Array, gain: Array) -> Array:
    """Of the elements, from those of bias and gain."""
    factors = np.arange(1, WIDTH + 1, dtype=np.int64)[:, None]
    both = np.concatenate([np.tile(bias, (WIDTH // 2, 1)), np.tile(gain, (WIDTH // 2, 1))])
    return (both * factors % PRIME).reshape(-1)

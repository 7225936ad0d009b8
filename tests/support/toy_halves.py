"""The judge's toy network of half-blocks, in which slices of layers and of sequences each have their own numbers.

A microbatch is a sequence of tokens. A body mixes the tokens of each sequence, and is a sum over its weight's rows:
x' = x + (place + 2) sum(x), z_j = x' . W_j, branch = sum_j (z_j + z_j * z_j) W_j; of the last body, the logits are the
z_j + z_j * z_j themselves. A norm works token by token: r = residual + f branch + bias, y = gain r + r * r, where the
factor f, like a dropout's mask, belongs to the token; so the gradients of residual and branch differ. The gradient of
the loss needs a sum over all logits of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, BrokenTape, Piece, elements, rows, whole
from tests.support.toy_layers import batch_rows

TOKENS = 4
"""Of a sequence: divisible by every number of tensor-parallel ranks."""


class Kept(NamedTuple):
    """What a pass keeps for the next: two arrays, and the elements of the weight that they are about."""

    first: Array
    second: Array
    where: tuple[int, ...]


def product(a: Array, b: Array) -> Array:
    """a^T b, summed over the rows."""
    return (a[:, :, None] * b[:, None, :] % PRIME).sum(0) % PRIME


def mixing(where: tuple[int, ...]) -> Array:
    """The matrix by which tokens of one sequence see each other, of the tokens that are there."""
    tokens = np.array(where, np.int64)
    same = tokens[:, None] // TOKENS == tokens[None, :] // TOKENS
    return (same * (tokens[:, None] % TOKENS + 2) + np.eye(len(tokens), dtype=np.int64)).astype(np.int64)


def mixed(matrix: Array, x: Array) -> Array:
    """Their product, one term after the other: a sequence may be long."""
    return (matrix[:, :, None] * x[None, :, :] % PRIME).sum(1) % PRIME


def body_forward(layer: int, x: Array, weight: Array) -> tuple[Array, Array]:
    """z and z + z * z, from tokens mixed and some rows of the weight."""
    z = (x @ weight.T + 17 * layer + 5) % PRIME
    return z, (z + z * z) % PRIME


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


def factors_of(layer: int, where: tuple[int, ...]) -> Array:
    return np.array([[3 + layer + 7 * token * token] for token in where], np.int64) % PRIME


def total_of(logits: Array, columns: tuple[object, ...]) -> Array:
    """What the loss must know of some logits: for each token a sum over them, (tokens, 1)."""
    factors = np.array([int(str(column)) + 1 for column in columns], np.int64)
    return (logits * logits % PRIME * factors % PRIME).sum(1, keepdims=True) % PRIME


class Halves:
    """What its layers do to pieces; `norms` says of each layer whether it is a norm."""

    sequence = TOKENS

    def __init__(self, norms: tuple[bool, ...]) -> None:
        self.norms = norms

    def batch(self, microbatches: tuple[int, ...]) -> Piece:
        where = tuple(m * TOKENS + place for m in microbatches for place in range(TOKENS))
        return Piece(where, batch_rows(where))

    def forward(self, layer: int, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        if self._is_norm(layer):
            return self._norm_forward(layer, inputs)
        activation, weight = inputs
        x = rows(activation)
        places, matrix = self._rows_of(weight)
        z, h = body_forward(layer, mixed(mixing(x.where), x.data), matrix)
        if layer == len(self.norms) - 1:
            return [Piece(x.where, h, places)], Kept(z, h, weight.where)
        return [Piece(x.where, h @ matrix % PRIME)], Kept(z, h, weight.where)

    def backward_input(self, layer: int, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        if self._is_norm(layer):
            return self._norm_backward(layer, inputs, kept)
        activation, gradient, weight = inputs
        x, dy = rows(activation), rows(gradient)
        _, matrix = self._rows_of(weight)
        last = layer == len(self.norms) - 1
        dh = dy.data if last else dy.data @ matrix.T % PRIME
        dz = dh * ((1 + 2 * kept.first) % PRIME) % PRIME
        dx = mixed(mixing(x.where).T, dz @ matrix % PRIME)
        return [Piece(x.where, dx)], Kept(dz, kept.second, weight.where)

    def backward_weight(self, layer: int, activation: Piece, gradient: Piece, kept: Kept) -> Piece:
        x, dy = rows(activation), rows(gradient)
        if self._is_norm(layer):
            dr, r, _ = kept
            made = norm_gradient(dr.sum(0) % PRIME, (dy.data * r % PRIME).sum(0) % PRIME)
            return Piece(tuple(range(ELEMENTS)), made)
        dz, h, where = kept
        made = product(dz, mixed(mixing(x.where), x.data))
        if layer < len(self.norms) - 1:
            made = made + product(h, dy.data)
        return Piece(where, made.reshape(-1) % PRIME)

    def stats(self, logits: Piece) -> Piece:
        y = rows(logits)
        if not y.columns:
            raise BrokenTape("these are no logits")
        return Piece(y.where, total_of(y.data, y.columns), (y.columns,))

    def loss(self, inputs: list[Piece]) -> Piece:
        y, *stats = [rows(piece) for piece in inputs]
        if not y.columns or any(isinstance(column, tuple) for column in y.columns):
            raise BrokenTape("these are no logits")
        if any(piece.where != y.where for piece in stats):
            raise BrokenTape("the sums are of other tokens")
        total = stats[0].data.sum(1, keepdims=True) % PRIME if stats else total_of(y.data, y.columns)
        tokens = np.array(y.where, np.int64)[:, None]
        columns = np.array([int(str(column)) for column in y.columns], np.int64)
        return Piece(y.where, (3 * y.data * total + 1000 * tokens + 7 * columns) % PRIME, y.columns)

    def _norm_forward(self, layer: int, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        branch, weight, *residual = inputs
        x = rows(branch)
        if bool(residual) != (layer > 1):
            raise BrokenTape("a residual is missing, or there is none")
        bias, gain = norm_parameters(whole(weight))
        r = factors_of(layer, x.where) * x.data % PRIME + bias
        r = (r + (rows(residual[0]).data if residual else 0)) % PRIME
        outputs = [Piece(x.where, (gain * r + r * r) % PRIME)]
        if layer < len(self.norms) - 2:
            outputs.append(Piece(x.where, r))
        return outputs, Kept(r, r, weight.where)

    def _norm_backward(self, layer: int, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        branch, gradient, weight, *above = inputs
        x, dy = rows(branch), rows(gradient)
        if bool(above) != (layer < len(self.norms) - 2):
            raise BrokenTape("the residual's gradient is missing, or there is none")
        _, gain = norm_parameters(whole(weight))
        dr = dy.data * ((gain + 2 * kept.first) % PRIME) % PRIME
        dr = (dr + (rows(above[0]).data if above else 0)) % PRIME
        made = [Piece(x.where, factors_of(layer, x.where) * dr % PRIME)]
        if layer > 1:
            made.append(Piece(x.where, dr))
        return made, Kept(dr, kept.first, weight.where)

    def _is_norm(self, layer: int) -> bool:
        if not 0 <= layer < len(self.norms):
            raise BrokenTape(f"there is no layer {layer}")
        return self.norms[layer]

    def _rows_of(self, weight: Piece) -> tuple[tuple[int, ...], Array]:
        """Which rows of the weight matrix these are."""
        where = elements(weight).where
        if len(where) % WIDTH or any(where[i] != where[i - i % WIDTH] + i % WIDTH for i in range(len(where))):
            raise BrokenTape("the weight is not made of whole slices")
        if any(where[i] % WIDTH for i in range(0, len(where), WIDTH)):
            raise BrokenTape("the weight is not made of whole slices")
        return tuple(where[i] // WIDTH for i in range(0, len(where), WIDTH)), weight.data.reshape(-1, WIDTH)

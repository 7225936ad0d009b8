"""The judge's attention, head by head; a projection's weight has a head in each row.

u_h = x . W_h, q = u, k = u + u * u, v = 3 u + 2 u * u. A query attends to the keys of its sequence up to its position:
with t = q k + layer and s = t + t * t, it sums s v (the mix) and s (the weights). Queries may attend to blocks in any
order, since both are sums. The next layer reads mix * weights, which needs both complete sums, as softmax's quotient
does.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, Array, BrokenTape, Piece, labels, numbers_of, rows
from tests.support.toy_layers import Place, matrix_of, product, rows_of_matrix


class Projected(NamedTuple):
    """Values that a projection keeps: u (later the gradients from keys and values), and the weight's elements."""

    u: Array
    positions: tuple[int, ...]


class Project:
    """Normalised tokens to (queries, keys and values)."""

    def __init__(self, place: Place) -> None:
        self.shift = 17 * place.number + 5

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Projected]:
        activation, weight = inputs
        x = rows(activation)
        u = (x.data @ matrix_of(weight).T + self.shift) % PRIME
        squares = u * u % PRIME
        keys_values = np.concatenate([u + squares, 3 * u + 2 * squares], axis=1) % PRIME
        queries = Piece(x.positions, u, rows_of_matrix(weight, "query"))
        return [queries, Piece(x.positions, keys_values, rows_of_matrix(weight, "key", "value"))], Projected(
            u, weight.positions
        )

    def backward_input(self, inputs: list[Piece], ctx: Projected) -> tuple[list[Piece], Projected]:
        activation, grad_queries, weight, *others = inputs
        x, dq = rows(activation), rows(grad_queries)
        if len(others) != 1:
            raise BrokenTape("the gradient of keys and values is missing")
        dk, dv = halves(others[0])
        rest = (dk * ((1 + 2 * ctx.u) % PRIME) + dv * ((3 + 4 * ctx.u) % PRIME) % PRIME) % PRIME
        du = (dq.data + rest) % PRIME
        return [Piece(x.positions, du @ matrix_of(weight) % PRIME)], Projected(rest, weight.positions)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Projected) -> Piece:
        du = (rows(gradient).data + half.u) % PRIME
        return Piece(half.positions, product(du, rows(activation).data).reshape(-1))


def attend(layer: int, sequence: int, queries: Piece, keys_values: Piece) -> Piece:
    """Mix and weights of these queries and this block."""
    _, s = _scores(layer, sequence, queries, keys_values)
    _, v = halves(keys_values)
    mix = (s * v[None] % PRIME).sum(1) % PRIME
    data = np.concatenate([mix, s.sum(1) % PRIME], axis=1)
    return Piece(queries.positions, data, labels(numbers_of(queries), "mix", "weight"))


def attend_backward(
    layer: int, sequence: int, queries: Piece, keys_values: Piece, attended: Piece, gradient: Piece
) -> tuple[Piece, Piece]:
    """Return this block's term of the queries' gradient, and the queries' term of the block's gradient."""
    t, s = _scores(layer, sequence, queries, keys_values)
    k, v = halves(keys_values)
    mix, weights = halves(attended)
    grad_mix, grad_weights = (rows(gradient).data * other % PRIME for other in (weights, mix))
    ds = (grad_mix[:, None] * v[None] + grad_weights[:, None]) % PRIME
    dt = np.where(_visible_mask(sequence, queries, keys_values), ds * ((1 + 2 * t) % PRIME) % PRIME, 0)
    dq = (dt * k[None] % PRIME).sum(1) % PRIME
    dk = (dt * queries.data[:, None] % PRIME).sum(0) % PRIME
    dv = (s * grad_mix[:, None] % PRIME).sum(0) % PRIME
    of_queries = Piece(queries.positions, dq, queries.columns)
    return of_queries, Piece(keys_values.positions, np.concatenate([dk, dv], axis=1), keys_values.columns)


def met(attended: Piece) -> Array:
    """Return the input of the next layer."""
    mix, weights = halves(attended)
    return mix * weights % PRIME


def halves(piece: Piece) -> tuple[Array, Array]:
    """Keys and values; or mix and weights."""
    data = rows(piece).data
    width, rest = divmod(data.shape[1], 2)
    if rest:
        raise BrokenTape("these are no pairs")
    return data[:, :width], data[:, width:]


def _visible_mask(sequence: int, queries: Piece, keys_values: Piece) -> Array:
    """Mask of the keys that each query sees, (queries, keys, 1)."""
    ours, theirs = (np.array(piece.positions, np.int64) for piece in (queries, keys_values))
    return ((ours[:, None] // sequence == theirs // sequence) & (theirs <= ours[:, None]))[:, :, None]


def _scores(layer: int, sequence: int, queries: Piece, keys_values: Piece) -> tuple[Array, Array]:
    """t and s, (queries, keys, heads); s is zero where a key is not seen."""
    k, _ = halves(keys_values)
    t = (rows(queries).data[:, None] * k[None] + layer) % PRIME
    return t, np.where(_visible_mask(sequence, queries, keys_values), (t + t * t) % PRIME, 0)

"""The judge's routing: with v = x' M + shift, where x' has all tokens of the sequence in it as in a body, expert e is
given (1 + v_e) x_e, and its gate is v_e + v_e * v_e. The experts' outputs, each times its gate, are a branch with one
feature for each expert; those of some experts are a term of it. With gates, v has a second gradient besides that of its
results, as from an auxiliary loss: different for each token and expert, times the gradients' scale.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, WIDTH, Array, BrokenTape, Piece, labels, rows, whole
from tests.support.toy_halves import mixed, mixing
from tests.support.toy_layers import EVERYWHERE, Place, product

EXPERTS = labels(range(WIDTH), "expert")
"""The columns of all experts' buffers, each with one number per token."""


class Routing:
    """(x,) to (buffers, gates)."""

    def __init__(self, place: Place) -> None:
        self.shift, self.sequence, self.affine = 29 * place.number + 3, place.sequence, place.gates

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Array]:
        x, weight = inputs
        v = (self.mixed(rows(x)) @ whole(weight).reshape(WIDTH, WIDTH) + self.shift) % PRIME
        buffers = Piece(x.positions, (1 + v) * require_shape(x.data, v) % PRIME, EXPERTS)
        return [buffers, Piece(x.positions, (v + v * v) % PRIME)], v

    def backward_input(self, inputs: list[Piece], ctx: Array) -> tuple[list[Piece], Array]:
        x, gradient, weight, *gates = inputs
        grad_buffers = require_shape(spread(gradient), ctx)
        dv = grad_buffers * require_shape(rows(x).data, ctx) % PRIME
        for gate in gates:
            dv = dv + require_shape(rows(gate).data, ctx) * ((1 + 2 * ctx) % PRIME)
        if self.affine:
            own_experts = [number for _, number in gradient.columns]
            dv[:, own_experts] += (
                gradient.scale * ((ctx * ctx + np.array(x.positions)[:, None])[:, own_experts] % PRIME) % PRIME
            )
        dv = dv % PRIME
        grad_mixed = dv @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME
        dx = mixed(mixing(x.positions, self.sequence).T, grad_mixed) + (1 + ctx) * grad_buffers
        return [Piece(x.positions, dx % PRIME)], dv

    def backward_weight(self, activation: Piece, gradient: Piece, half: Array) -> Piece:
        rows(gradient)
        return Piece(EVERYWHERE, product(self.mixed(rows(activation)), half).reshape(-1))

    def mixed(self, x: Piece) -> Array:
        return mixed(mixing(x.positions, self.sequence), x.data)


class Combined(NamedTuple):
    """Values that a combine keeps: results and gates."""

    results: Array
    gates: Array


class Combining:
    """(results, gates) to (a branch,); its weight is not used."""

    def __init__(self, place: Place) -> None:
        pass

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Combined]:
        buffers, _, *gates = inputs
        results = spread(buffers)
        ctx = Combined(results, require_shape(rows(gates[0]).data, results) if gates else np.ones_like(results))
        return [Piece(buffers.positions, results * ctx.gates % PRIME)], ctx

    def backward_input(self, inputs: list[Piece], ctx: Combined) -> tuple[list[Piece], None]:
        buffers, gradient, _ = inputs
        dy = require_shape(rows(gradient).data, ctx.gates)
        own_experts = [number for _, number in buffers.columns]
        of_results = Piece(buffers.positions, (ctx.gates * dy % PRIME)[:, own_experts], buffers.columns)
        return [of_results, Piece(buffers.positions, ctx.results * dy % PRIME)], None

    def backward_weight(self, activation: Piece, gradient: Piece, half: None) -> Piece:
        return Piece(EVERYWHERE, np.zeros(len(EVERYWHERE), np.int64))


def spread(piece: Piece) -> Array:
    """Columns of all experts, zero where a piece lacks them."""
    data = rows(piece).data
    if len(piece.columns) != data.shape[1] or any(sort != "expert" for sort, _ in piece.columns):
        raise BrokenTape("these are no experts' buffers")
    output = np.zeros((len(data), WIDTH), np.int64)
    output[:, [number for _, number in piece.columns]] = data
    return output


def require_shape(one: Array, other: Array) -> Array:
    """Return the first array; it must have the shape of the other."""
    if one.shape != other.shape:
        raise BrokenTape("numbers for other tokens or experts are given")
    return one

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
        buffers = Piece(x.where, (1 + v) * alike(x.data, v) % PRIME, EXPERTS)
        return [buffers, Piece(x.where, (v + v * v) % PRIME)], v

    def backward_input(self, inputs: list[Piece], kept: Array) -> tuple[list[Piece], Array]:
        x, gradient, weight, *gates = inputs
        each = alike(spread(gradient), kept)
        dv = each * alike(rows(x).data, kept) % PRIME
        for gate in gates:
            dv = dv + alike(rows(gate).data, kept) * ((1 + 2 * kept) % PRIME)
        if self.affine:
            own = [number for _, number in gradient.columns]
            dv[:, own] += gradient.scale * ((kept * kept + np.array(x.where)[:, None])[:, own] % PRIME) % PRIME
        dv = dv % PRIME
        below = dv @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME
        dx = mixed(mixing(x.where, self.sequence).T, below) + (1 + kept) * each
        return [Piece(x.where, dx % PRIME)], dv

    def backward_weight(self, activation: Piece, gradient: Piece, half: Array) -> Piece:
        rows(gradient)
        return Piece(EVERYWHERE, product(self.mixed(rows(activation)), half).reshape(-1))

    def mixed(self, x: Piece) -> Array:
        return mixed(mixing(x.where, self.sequence), x.data)


class Combined(NamedTuple):
    """Values that a combine keeps: results and gates."""

    results: Array
    gates: Array


class Combining:
    """(results, gates) to (a branch,); its weight is not used."""

    def __init__(self, place: Place) -> None:
        pass

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Combined]:
        given, _, *gates = inputs
        results = spread(given)
        kept = Combined(results, alike(rows(gates[0]).data, results) if gates else np.ones_like(results))
        return [Piece(given.where, results * kept.gates % PRIME)], kept

    def backward_input(self, inputs: list[Piece], kept: Combined) -> tuple[list[Piece], None]:
        given, gradient, _ = inputs
        dy = alike(rows(gradient).data, kept.gates)
        own = [number for _, number in given.columns]
        of_results = Piece(given.where, (kept.gates * dy % PRIME)[:, own], given.columns)
        return [of_results, Piece(given.where, kept.results * dy % PRIME)], None

    def backward_weight(self, activation: Piece, gradient: Piece, half: None) -> Piece:
        return Piece(EVERYWHERE, np.zeros(len(EVERYWHERE), np.int64))


def spread(piece: Piece) -> Array:
    """Columns of all experts, zero where a piece lacks them."""
    data = rows(piece).data
    if len(piece.columns) != data.shape[1] or any(sort != "expert" for sort, _ in piece.columns):
        raise BrokenTape("these are no experts' buffers")
    every = np.zeros((len(data), WIDTH), np.int64)
    every[:, [number for _, number in piece.columns]] = data
    return every


def alike(one: Array, other: Array) -> Array:
    """Return the first array; it must have the shape of the other."""
    if one.shape != other.shape:
        raise BrokenTape("numbers for other tokens or experts are given")
    return one

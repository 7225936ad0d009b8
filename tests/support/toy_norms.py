"""The judge's layers between others, which carry a residual; in a mixture they also are routers.

A norm adds to the residual what came from the layers between, token by token: r = residual + f branch, where the factor
f, like a dropout's mask, belongs to the token; so the gradients of residual and branch differ. Then u = r M and
y = u + u * u. After experts, the branch is what each expert made times its gate. Before experts, u = r' M has all
tokens of the sequence in r', as in a body; the experts' buffers are (1 + u) r, and the gates u + u * u are carried on
beside r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, WIDTH, Array, BrokenTape, Piece, labels, rows, whole
from tests.support.toy_attention import halves
from tests.support.toy_halves import mixed, mixing
from tests.support.toy_layers import EVERYWHERE, Place, product

EXPERTS = labels(range(WIDTH), "expert")
"""The columns of all experts' buffers, each of one number a token."""


class Normed(NamedTuple):
    """What a norm keeps: r, u, and gates and results of the experts before it; later the gradient of u."""

    r: Array
    u: Array
    gates: Array | None = None
    results: Array | None = None


class Norm:
    """(branch or experts' results, carried) to (activation or experts' buffers, carried)."""

    def __init__(self, place: Place) -> None:
        self.number = place.number
        self.is_first, self.is_last = place.number == place.alike[0], place.number == place.alike[-1]
        self.combines, self.dispatches = place.follows("experts"), place.precedes("experts")
        self.sequence = place.sequence if self.dispatches else 1

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Normed]:
        given, weight, *carried = inputs
        if bool(carried) == self.is_first:
            raise BrokenTape("a residual is missing, or there is none")
        branch, gates, results = rows(given).data, None, None
        residual = rows(carried[0]).data if carried else np.zeros_like(branch)
        if self.combines:
            results, (residual, gates) = branch, halves(carried[0])
            branch = alike(gates, results) * results % PRIME
        r = (alike(residual, branch) + self._factors(given) * branch) % PRIME
        u = (mixed(self._mixing(given), r) @ whole(weight).reshape(WIDTH, WIDTH) + 17 * self.number + 5) % PRIME
        y, kept = (u + u * u) % PRIME, Normed(r, u, gates, results)
        handed_on = [] if self.is_last else [Piece(given.where, r)]
        if not self.dispatches:
            return [Piece(given.where, y), *handed_on], kept
        buffers = Piece(given.where, (1 + u) * r % PRIME, EXPERTS)
        return [buffers, Piece(given.where, np.concatenate([r, y], axis=1))], kept

    def backward_input(self, inputs: list[Piece], kept: Normed) -> tuple[list[Piece], Normed]:
        given, gradient, weight, *above = inputs
        if bool(above) == self.is_last:
            raise BrokenTape("the residual's gradient is missing, or there is none")
        r, u, gates, results = kept
        dy, slope = alike(rows(gradient).data, u), (1 + 2 * u) % PRIME
        dr = rows(above[0]).data if above else np.zeros_like(r)
        if self.dispatches:
            dr, grad_gates = halves(above[0])
            du, dr = dy * r % PRIME + grad_gates * slope % PRIME, dr + (1 + u) * dy % PRIME
        else:
            du = dy * slope
        du = du % PRIME
        dr = (dr + mixed(self._mixing(given).T, du @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME)) % PRIME
        branch = self._factors(given) * dr % PRIME
        made = [Piece(given.where, branch)]
        if gates is not None and results is not None:
            made = [Piece(given.where, gates * branch % PRIME, given.columns)]
            dr = np.concatenate([dr, results * branch % PRIME], axis=1)
        return made if self.is_first else [*made, Piece(given.where, dr)], Normed(r, du)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Normed) -> Piece:
        rows(gradient)
        mixed_r = mixed(self._mixing(rows(activation)), half.r)
        return Piece(EVERYWHERE, product(mixed_r, half.u).reshape(-1))

    def _factors(self, given: Piece) -> Array:
        return np.array([[3 + self.number + 7 * token * token] for token in given.where], np.int64) % PRIME

    def _mixing(self, given: Piece) -> Array:
        return mixing(given.where, self.sequence)


def alike(one: Array, other: Array) -> Array:
    """The first, if it has the shape of the other."""
    if one.shape != other.shape:
        raise BrokenTape("numbers for other tokens or experts are given")
    return one

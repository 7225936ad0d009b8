"""The judge's norms, which carry a residual past other layers.

A norm adds the output of the layers between to the residual, token by token: r = residual + f branch, where the factor
f depends on the token, as in dropout's mask, so that the gradients of residual and branch differ. Then u = r M and y =
u + u * u. A norm after experts combines their outputs first, and one before experts then routes y.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import PRIME, WIDTH, Array, BrokenTape, Piece, rows, whole
from tests.support.toy_layers import EVERYWHERE, Place, product
from tests.support.toy_routing import Combined, Combining, Routing, alike


class Normed(NamedTuple):
    """Values that a norm keeps: r, u, y, and those of its combine and route; later the gradients of u and v."""

    r: Array
    u: Array
    y: Piece
    combined: Combined | None
    routed: Array | None


class Norm:
    """(branch or experts' results[, residual[, gates]]) to (activation or experts' buffers[, residual[, gates]])."""

    def __init__(self, place: Place) -> None:
        self.number, self.gates = place.number, place.gates
        self.is_first, self.is_last = place.number == place.alike[0], place.number == place.alike[-1]
        self.combining = Combining(place) if place.follows("experts") else None
        self.routing = Routing(place) if place.precedes("experts") else None

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Normed]:
        branch, weight, *carried = inputs
        self._want(carried, not self.is_first, self.combining)
        where, combined, routed = branch.where, None, None
        if self.combining:
            (branch,), combined = self.combining.forward([branch, weight, *carried[1:]])
        x = rows(branch).data
        r = (self._factors(where) * x + (alike(rows(carried[0]).data, x) if carried else 0)) % PRIME
        u = (r @ whole(weight).reshape(WIDTH, WIDTH) + 17 * self.number + 5) % PRIME
        made = y = Piece(where, (u + u * u) % PRIME)
        gates: list[Piece] = []
        if self.routing:
            (made, *gates), routed = self.routing.forward([y, weight])
        outputs = [made, *([] if self.is_last else [Piece(where, r)]), *(gates if self.gates else [])]
        return outputs, Normed(r, u, y, combined, routed)

    def backward_input(self, inputs: list[Piece], kept: Normed) -> tuple[list[Piece], Normed]:
        given, gradient, weight, *above = inputs
        self._want(above, not self.is_last, self.routing)
        routed = None
        if self.routing and kept.routed is not None:
            (gradient,), routed = self.routing.backward_input([kept.y, gradient, weight, *above[1:]], kept.routed)
        du = alike(rows(gradient).data, kept.u) * ((1 + 2 * kept.u) % PRIME) % PRIME
        dr = du @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME
        dr = (dr + (alike(rows(above[0]).data, dr) if above else 0)) % PRIME
        made, gates = Piece(given.where, self._factors(given.where) * dr % PRIME), list[Piece]()
        if self.combining and kept.combined:
            (made, *gates), _ = self.combining.backward_input([given, made, weight], kept.combined)
        outputs = [made, *([] if self.is_first else [Piece(given.where, dr)]), *(gates if self.gates else [])]
        return outputs, kept._replace(u=du, routed=routed)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Normed) -> Piece:
        rows(activation)
        made = product(half.r, half.u).reshape(-1)
        if self.routing and half.routed is not None:
            made = made + self.routing.backward_weight(half.y, gradient, half.routed).data
        return Piece(EVERYWHERE, made % PRIME)

    def _want(self, carried: list[Piece], residual: bool, beside: object) -> None:
        if len(carried) != residual + (self.gates and beside is not None):
            raise BrokenTape("a residual or gates are missing, or there are none")

    def _factors(self, where: tuple[int, ...]) -> Array:
        return np.array([[3 + self.number + 7 * token * token] for token in where], np.int64) % PRIME

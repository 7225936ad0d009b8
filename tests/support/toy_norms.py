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
from tests.support.toy_routing import Combined, Combining, Routing, require_shape


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
        self.is_first, self.is_last = place.number == place.same_kind[0], place.number == place.same_kind[-1]
        self.combining = Combining(place) if place.follows("experts") else None
        self.routing = Routing(place) if place.precedes("experts") else None

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Normed]:
        branch, weight, *carried = inputs
        self._want(carried, not self.is_first, self.combining)
        positions, combined, routed = branch.positions, None, None
        if self.combining:
            (branch,), combined = self.combining.forward([branch, weight, *carried[1:]])
        x = rows(branch).data
        r = (self._factors(positions) * x + (require_shape(rows(carried[0]).data, x) if carried else 0)) % PRIME
        u = (r @ whole(weight).reshape(WIDTH, WIDTH) + 17 * self.number + 5) % PRIME
        output = y = Piece(positions, (u + u * u) % PRIME)
        gates: list[Piece] = []
        if self.routing:
            (output, *gates), routed = self.routing.forward([y, weight])
        outputs = [output, *([] if self.is_last else [Piece(positions, r)]), *(gates if self.gates else [])]
        return outputs, Normed(r, u, y, combined, routed)

    def backward_input(self, inputs: list[Piece], ctx: Normed) -> tuple[list[Piece], Normed]:
        branch, gradient, weight, *carried = inputs
        self._want(carried, not self.is_last, self.routing)
        routed = None
        if self.routing and ctx.routed is not None:
            (gradient,), routed = self.routing.backward_input([ctx.y, gradient, weight, *carried[1:]], ctx.routed)
        du = require_shape(rows(gradient).data, ctx.u) * ((1 + 2 * ctx.u) % PRIME) % PRIME
        dr = du @ whole(weight).reshape(WIDTH, WIDTH).T % PRIME
        dr = (dr + (require_shape(rows(carried[0]).data, dr) if carried else 0)) % PRIME
        grad, gates = Piece(branch.positions, self._factors(branch.positions) * dr % PRIME), list[Piece]()
        if self.combining and ctx.combined:
            (grad, *gates), _ = self.combining.backward_input([branch, grad, weight], ctx.combined)
        outputs = [
            grad,
            *([] if self.is_first else [Piece(branch.positions, dr)]),
            *(gates if self.gates else []),
        ]
        return outputs, ctx._replace(u=du, routed=routed)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Normed) -> Piece:
        rows(activation)
        dw = product(half.r, half.u).reshape(-1)
        if self.routing and half.routed is not None:
            dw = dw + self.routing.backward_weight(half.y, gradient, half.routed).data
        return Piece(EVERYWHERE, dw % PRIME)

    def _want(self, carried: list[Piece], residual: bool, neighbour: object) -> None:
        if len(carried) != residual + (self.gates and neighbour is not None):
            raise BrokenTape("a residual or gates are missing, or there are none")

    def _factors(self, positions: tuple[int, ...]) -> Array:
        return np.array([[3 + self.number + 7 * token * token] for token in positions], np.int64) % PRIME

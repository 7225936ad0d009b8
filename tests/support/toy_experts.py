"""The judge's mixture of experts; a microbatch is one row, and each row of an expert layer's weight W is an expert.

A dense layer adds what the experts made, each times its gate: h = residual + sum_e g_e y_e. Its router says u = h M,
which gives the next gates u + u * u, and each expert's buffer (1 + u_e) h; h and the gates are carried to the next
dense layer. The last one carries nothing on: its u + u * u are the logits. An expert makes z = x . W_e and
y = (z + z * z) W_e of its buffer x.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tests.support.pieces import BUFFERS, PRIME, WIDTH, Array, BrokenTape, Piece, rows, whole
from tests.support.toy_attention import halves
from tests.support.toy_layers import EVERYWHERE, Place, matrix_of, product


class Routed(NamedTuple):
    """What a dense layer keeps: h, u, and what it was carried, with the experts' results; later the gradient of u."""

    h: Array
    u: Array
    gates: Array | None
    results: Array | None


class Dense:
    """(what experts made, carried) to (buffers, carried)."""

    def __init__(self, place: Place, sequence: int) -> None:
        self.shift = 17 * place.number + 5
        self.is_first, self.is_last = place.number == place.alike[0], place.number == place.alike[-1]

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Routed]:
        made, weight, *carried = inputs
        if bool(carried) == self.is_first:
            raise BrokenTape("what is carried is missing, or there is none")
        h, gates, results = rows(made).data, None, None
        if carried:
            residual, gates = halves(carried[0])
            results = buffers(made)
            h = (residual + (gates[:, :, None] * results % PRIME).sum(1)) % PRIME
        u = (h @ whole(weight).reshape(WIDTH, WIDTH) + self.shift) % PRIME
        kept, after = Routed(h, u, gates, results), (u + u * u) % PRIME
        if self.is_last:
            return [Piece(made.where, after)], kept
        dispatched = ((1 + u)[:, :, None] * h[:, None] % PRIME).reshape(len(h), -1)
        handed_on = Piece(made.where, np.concatenate([h, after], axis=1))
        return [Piece(made.where, dispatched, BUFFERS), handed_on], kept

    def backward_input(self, inputs: list[Piece], kept: Routed) -> tuple[list[Piece], Routed]:
        made, gradient, weight, *above = inputs
        if bool(above) == self.is_last:
            raise BrokenTape("the gradient of what was carried on is missing, or nothing was")
        h, u, gates, results = kept
        slope = (1 + 2 * u) % PRIME
        if above:
            below, grad_gates = halves(above[0])
            each = buffers(gradient)
            du = (each * h[:, None] % PRIME).sum(2) + grad_gates * slope % PRIME
            dh = below + ((1 + u)[:, :, None] * each % PRIME).sum(1)
        else:
            du, dh = rows(gradient).data * slope % PRIME, np.zeros_like(h)
        du = du % PRIME
        dh = (dh + du @ whole(weight).reshape(WIDTH, WIDTH).T) % PRIME
        half = Routed(h, du, None, None)
        if gates is None or results is None:
            return [Piece(made.where, dh)], half
        grad_results = (gates[:, :, None] * dh[:, None] % PRIME).reshape(len(dh), -1)
        grad_carried = np.concatenate([dh, (results * dh[:, None] % PRIME).sum(2) % PRIME], axis=1)
        return [Piece(made.where, grad_results, made.columns), Piece(made.where, grad_carried)], half

    def backward_weight(self, activation: Piece, gradient: Piece, half: Routed) -> Piece:
        rows(activation)
        rows(gradient)
        return Piece(EVERYWHERE, product(half.h, half.u).reshape(-1))


class Ran(NamedTuple):
    """What experts keep: z (then its gradient), z + z * z, and the weight's elements."""

    z: Array
    h: Array
    where: tuple[int, ...]


class Experts:
    """Buffers to results, expert by expert; which expert a buffer was meant for is not looked at."""

    def __init__(self, place: Place, sequence: int) -> None:
        self.shift = 17 * place.number + 5

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Ran]:
        activation, weight = inputs
        x, matrix = buffers(activation), matrix_of(weight)
        z = ((x * matrix % PRIME).sum(2) + self.shift) % PRIME
        h = (z + z * z) % PRIME
        made = (h[:, :, None] * matrix % PRIME).reshape(len(x), -1)
        return [Piece(activation.where, made, activation.columns)], Ran(z, h, weight.where)

    def backward_input(self, inputs: list[Piece], kept: Ran) -> tuple[list[Piece], Ran]:
        activation, gradient, weight = inputs
        buffers(activation)
        matrix = matrix_of(weight)
        dz = (buffers(gradient) * matrix % PRIME).sum(2) % PRIME * ((1 + 2 * kept.z) % PRIME) % PRIME
        made = (dz[:, :, None] * matrix % PRIME).reshape(len(dz), -1)
        return [Piece(activation.where, made, activation.columns)], Ran(dz, kept.h, weight.where)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Ran) -> Piece:
        x, dy = buffers(activation), buffers(gradient)
        made = half.z[:, :, None] * x % PRIME + half.h[:, :, None] * dy % PRIME
        return Piece(half.where, made.sum(0).reshape(-1) % PRIME)


def buffers(piece: Piece) -> Array:
    """(rows, experts, numbers of each)."""
    data = rows(piece).data
    if len(piece.columns) != data.shape[1]:
        raise BrokenTape("these are no buffers of experts")
    return data.reshape(len(data), -1, WIDTH)

"""The judge's experts: with a weight W_e for each hidden feature of an expert, z = x W_e + shift of the buffer's number
x, and the result is the sum of (z + z * z) W_e over the features. Slices of the features give terms of the result.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from tests.support.pieces import ELEMENTS, PRIME, WIDTH, Array, BrokenTape, Piece, elements, rows
from tests.support.toy_layers import Place
from tests.support.toy_routing import require_shape


class ExpertContext(NamedTuple):
    """Values that experts keep: z (later its gradient) and z + z * z, both (rows, experts, features), and the weight's
    elements.
    """

    z: Array
    h: Array
    positions: tuple[int, ...]


class Experts:
    """Maps buffers to results, expert by expert; the number of the expert in a buffer's columns is ignored."""

    def __init__(self, place: Place) -> None:
        self.shift = 17 * place.number + 5
        self.slices = place.slices

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], ExpertContext]:
        activation, weight = inputs
        matrix = self._matrix(weight)
        z = (self._buffers(activation, matrix)[:, :, None] * matrix + self.shift) % PRIME
        h = (z + z * z) % PRIME
        output = (h * matrix % PRIME).sum(2) % PRIME
        return [Piece(activation.positions, output, activation.columns)], ExpertContext(z, h, weight.positions)

    def backward_input(self, inputs: list[Piece], ctx: ExpertContext) -> tuple[list[Piece], ExpertContext]:
        activation, gradient, weight = inputs
        matrix = self._matrix(weight)
        require_shape(rows(gradient).data, self._buffers(activation, matrix))
        dz = gradient.data[:, :, None] * matrix % PRIME * ((1 + 2 * ctx.z) % PRIME) % PRIME
        dx = (dz * matrix % PRIME).sum(2) % PRIME
        return [Piece(activation.positions, dx, activation.columns)], ExpertContext(dz, ctx.h, weight.positions)

    def backward_weight(self, activation: Piece, gradient: Piece, half: ExpertContext) -> Piece:
        x, dy = rows(activation).data[:, :, None], rows(gradient).data[:, :, None]
        dw = (half.z * x % PRIME + half.h * dy % PRIME).sum(0) % PRIME
        data = np.empty(len(half.positions), np.int64)
        data[grid(half.positions, self.slices)[0]] = dw.reshape(-1)
        return Piece(half.positions, data)

    def _matrix(self, weight: Piece) -> Array:
        """(experts, features) that a weight has."""
        order, experts = grid(elements(weight).positions, self.slices)
        return weight.data[order].reshape(experts, -1)

    def _buffers(self, activation: Piece, matrix: Array) -> Array:
        if rows(activation).data.shape[1] != len(matrix):
            raise BrokenTape("these are no buffers of so many experts")
        return activation.data


@cache
def grid(positions: tuple[int, ...], slices: tuple[int, int]) -> tuple[list[int], int]:
    """The order that sorts elements by expert and feature, and the number of experts.

    The elements of a layer are ordered by slice of experts, by slice of features, and then within these slices.
    """
    inner = [WIDTH // count for count in slices]
    sorted_elements = np.arange(ELEMENTS).reshape(*slices, *inner).transpose(0, 2, 1, 3).reshape(-1)
    place = np.empty(ELEMENTS, np.int64)
    place[sorted_elements] = np.arange(ELEMENTS)
    order = sorted(range(len(positions)), key=lambda at: place[positions[at]])
    experts, features = (len(set(numbers.tolist())) for numbers in divmod(place[list(positions)], WIDTH))
    if experts * features != len(positions):
        raise BrokenTape("the weight is not the same features of some experts")
    return order, experts

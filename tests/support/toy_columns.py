"""The judge's matrices with slices side by side: a weight's rows are a column layer's outputs, a row layer's inputs.

A column makes z_j = x . W_j and y_j = z_j + z_j * z_j of each output j; as the last layer, these are the logits.
A row adds up sum_j (x_j + shift) W_j over its inputs j; after attention it reads what queries have met, head by head.
"""

from __future__ import annotations

from tests.support.pieces import PRIME, Piece, rows
from tests.support.toy_attention import met
from tests.support.toy_halves import Kept
from tests.support.toy_layers import Place, matrix_of, own_columns, product, rows_of_matrix


class ByColumns:
    """(x,) to (some features,); its gradient is a term of a sum."""

    def __init__(self, place: Place) -> None:
        self.shift = 17 * place.number + 5

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        activation, weight = inputs
        z = (rows(activation).data @ matrix_of(weight).T + self.shift) % PRIME
        return [Piece(activation.where, (z + z * z) % PRIME, rows_of_matrix(weight, "feature"))], Kept(
            z, z, weight.where
        )

    def backward_input(self, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        activation, gradient, weight = inputs
        dz = own_columns(gradient, rows_of_matrix(weight, "feature")) * ((1 + 2 * kept.first) % PRIME) % PRIME
        return [Piece(activation.where, dz @ matrix_of(weight) % PRIME)], Kept(dz, kept.second, weight.where)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Kept) -> Piece:
        rows(gradient)
        return Piece(half.where, product(half.first, rows(activation).data).reshape(-1))


class ByRows:
    """(some features,) to (a term of the branch,); its gradient is that of these features."""

    def __init__(self, place: Place) -> None:
        self.shift, self.reads_met = 17 * place.number + 5, place.follows("project")

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Kept]:
        activation, weight = inputs
        x = (met(activation) if self.reads_met else rows(activation).data) + self.shift
        return [Piece(activation.where, x % PRIME @ matrix_of(weight) % PRIME)], Kept(x % PRIME, x, weight.where)

    def backward_input(self, inputs: list[Piece], kept: Kept) -> tuple[list[Piece], Kept]:
        activation, gradient, weight = inputs
        dx = rows(gradient).data @ matrix_of(weight).T % PRIME
        return [Piece(activation.where, dx, rows_of_matrix(weight, "feature"))], kept

    def backward_weight(self, activation: Piece, gradient: Piece, half: Kept) -> Piece:
        rows(activation)
        return Piece(half.where, product(half.first, rows(gradient).data).reshape(-1))

"""The judge's toy networks: their layers, batches, and the gradient of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardlab.language import Program
from tests.support import toy_attention
from tests.support.pieces import PRIME, Array, BrokenTape, Piece, rows
from tests.support.toy_attention import Project, met
from tests.support.toy_experts import Experts
from tests.support.toy_halves import Body, Context
from tests.support.toy_layers import Place, ToyLayer, Whole, batch_rows, matrix_of, own_columns, product, rows_of_matrix
from tests.support.toy_norms import Norm
from tests.support.toy_routing import Combining, Routing

# The judge's matrices with slices side by side: a weight's rows are a column layer's outputs, a row layer's inputs.
#
# A column makes z_j = x . W_j and y_j = z_j + z_j * z_j of each output j; as the last layer, these are the logits. A
# row adds up sum_j (x_j + shift) W_j over its inputs j; after attention it reads what queries have met, head by head.


class ByColumns:
    """(x,) to (some features,); its gradient is a term of a sum."""

    def __init__(self, place: Place) -> None:
        self.shift = 17 * place.number + 5

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Context]:
        activation, weight = inputs
        z = (rows(activation).data @ matrix_of(weight).T + self.shift) % PRIME
        return [Piece(activation.positions, (z + z * z) % PRIME, rows_of_matrix(weight, "feature"))], Context(
            z, z, weight.positions
        )

    def backward_input(self, inputs: list[Piece], ctx: Context) -> tuple[list[Piece], Context]:
        activation, gradient, weight = inputs
        dz = own_columns(gradient, rows_of_matrix(weight, "feature")) * ((1 + 2 * ctx.first) % PRIME) % PRIME
        return [Piece(activation.positions, dz @ matrix_of(weight) % PRIME)], Context(dz, ctx.second, weight.positions)

    def backward_weight(self, activation: Piece, gradient: Piece, half: Context) -> Piece:
        rows(gradient)
        return Piece(half.positions, product(half.first, rows(activation).data).reshape(-1))


class ByRows:
    """(some features,) to (a term of the branch,); its gradient is that of these features."""

    def __init__(self, place: Place) -> None:
        self.shift, self.reads_met = 17 * place.number + 5, place.follows("project")

    def forward(self, inputs: list[Piece]) -> tuple[list[Piece], Context]:
        activation, weight = inputs
        x = (met(activation) if self.reads_met else rows(activation).data) + self.shift
        return [Piece(activation.positions, x % PRIME @ matrix_of(weight) % PRIME)], Context(
            x % PRIME, x, weight.positions
        )

    def backward_input(self, inputs: list[Piece], ctx: Context) -> tuple[list[Piece], Context]:
        activation, gradient, weight = inputs
        dx = rows(gradient).data @ matrix_of(weight).T % PRIME
        return [Piece(activation.positions, dx, rows_of_matrix(weight, "feature"))], ctx

    def backward_weight(self, activation: Piece, gradient: Piece, half: Context) -> Piece:
        rows(activation)
        return Piece(half.positions, product(half.first, rows(gradient).data).reshape(-1))


LAYERS: dict[str, Callable[[Place], ToyLayer]] = {
    "whole": Whole,
    "norm": Norm,
    "sliced": Body,
    "tokenwise": Body,
    "column": ByColumns,
    "row": ByRows,
    "project": Project,
    "routing": Routing,
    "experts": Experts,
    "combining": Combining,
}
"""Toy layer of each kind."""

HANDS_ON = {"norm": "norm", "routing": "combining"}
"""Kind of the next layer that reads the further outputs of a kind of layer."""

LOGITS = frozenset({"sliced", "tokenwise", "column"})
"""Kinds of last layer whose output has columns that name the logits."""

TOKENS = 4
"""Tokens of a sequence, or a multiple: divisible by every number of slices of a mesh."""


@dataclass(frozen=True)
class Network:
    """Functions of a network's layers on pieces.

    Attributes:
        kinds: kind of each layer.
        sequence: rows of a microbatch, its tokens.
        tied: whether the last layer computes with the weight of the first.
        slices: number of slices of the experts, and of each expert's features.
        gates: whether experts have gates.
        matrices: number of matrices of a layer that the optimizer updates as a whole (0: it updates elements).
    """

    kinds: tuple[str, ...]
    sequence: int = 1
    tied: bool = False
    slices: tuple[int, int] = (1, 1)
    gates: bool = False
    matrices: tuple[int, ...] = ()

    @cached_property
    def layers(self) -> list[ToyLayer]:
        settings = self.kinds, self.sequence, self.slices, self.gates
        return [LAYERS[kind](Place(number, *settings)) for number, kind in enumerate(self.kinds)]

    @property
    def weights(self) -> range:
        """The layers with weights of their own."""
        return range(len(self.kinds) - self.tied)

    def weight_of(self, layer: int) -> int:
        return layer if layer in self.weights else 0

    def layer(self, number: int) -> ToyLayer:
        if not 0 <= number < len(self.layers):
            raise BrokenTape(f"there is no layer {number}")
        return self.layers[number]

    def batch(self, pieces: tuple[int, ...], slices: int = 1) -> Piece:
        """Microbatches or slices of them: number microbatch * slices + index of the slice."""
        size, rest = divmod(self.sequence, slices)
        if rest:
            raise BrokenTape(f"sequences of {self.sequence} tokens do not divide into {slices} slices")
        positions = tuple(row for piece in pieces for row in range(piece * size, (piece + 1) * size))
        return Piece(positions, batch_rows(positions))

    def attend(self, layer: int, queries: Piece, keys_values: Piece) -> Piece:
        self._want_attention(layer)
        return toy_attention.attend(layer, self.sequence, queries, keys_values)

    def attend_backward(
        self, layer: int, queries: Piece, keys_values: Piece, attended: Piece, gradient: Piece
    ) -> tuple[Piece, Piece]:
        self._want_attention(layer)
        return toy_attention.attend_backward(layer, self.sequence, queries, keys_values, attended, gradient)

    def stats(self, logits: Piece) -> Piece:
        """Statistics of some logits for the loss: for each token, a sum over them."""
        self._want_logits(logits)
        return Piece(logits.positions, total_of(rows(logits)), (("stats", logits.columns[0][1]),))

    def loss(self, inputs: list[Piece]) -> Piece:
        """The gradient of the logits; for sliced logits it needs the sum over all logits of a token."""
        y, *stats = [rows(piece) for piece in inputs]
        tokens = np.array(y.positions, np.int64)[:, None]
        if self.kinds[-1] not in LOGITS:
            if stats or y.columns:
                raise BrokenTape("these logits have no slices")
            return Piece(y.positions, (3 * y.data + 1000 * tokens + 7) % PRIME)
        self._want_logits(y)
        if any(piece.positions != y.positions for piece in stats):
            raise BrokenTape("the sums are of other tokens")
        total = stats[0].data.sum(1, keepdims=True) % PRIME if stats else total_of(y)
        return Piece(y.positions, (3 * y.data * total + 1000 * tokens + 7 * features(y)) % PRIME, y.columns)

    def _want_attention(self, layer: int) -> None:
        self.layer(layer)
        if self.kinds[layer] != "project":
            raise BrokenTape(f"layer {layer} makes no queries")

    def _want_logits(self, piece: Piece) -> None:
        if {sort for sort, _ in piece.columns} != {"feature"}:
            raise BrokenTape("these are no logits")


def features(piece: Piece) -> Array:
    """The number of each column."""
    return np.array([number for _, number in piece.columns], np.int64)


def total_of(logits: Piece) -> Array:
    """For each token, a weighted sum of squares over its logits, (tokens, 1)."""
    return (logits.data * logits.data % PRIME * (features(logits) + 1) % PRIME).sum(1, keepdims=True) % PRIME


def kind_of(program: Program, number: int) -> str:
    """Return the toy layer for a layer of a program."""
    layers = program.sizes.signatures
    layer = layers[number]
    if not layer.cut:
        if layer.routes and not layer.carries:
            return "routing" if layer.deals else "combining"
        cuts = {index for other in layers for index in other.cut}
        return "norm" if cuts - {"expert"} or (cuts and layer.carries) else "whole"
    if "expert" in layer.cut:
        return "experts"
    if any(node.takes_own for node in layer.nodes) and "vocab" not in layer.cut:
        return "column"
    if layer.projects:
        return "project"
    if number and layers[number - 1].projects:
        return "row"
    return "sliced" if layer.mixes_tokens else "tokenwise"


def network_of(program: Program) -> Network:
    """The toy network for a program's model, with enough tokens for the mesh to cut their sequence.

    If the mesh does not cut it, a row is a sequence.
    """
    kinds = tuple(kind_of(program, number) for number in range(program.layers))
    slices = program.sizes.space(program.mesh, program.microbatches).sequence
    sequence = 1 if slices == 1 or "whole" in kinds else math.lcm(TOKENS, slices)
    layers, mesh = program.sizes.signatures, program.mesh
    of_features = any({"expert", "ffn"} <= set(layer.cut) for layer in layers)
    experts = mesh.ep * mesh.cp, mesh.tp if of_features else 1
    whole = program.sizes.directed
    matrices = tuple((experts[0] if kind == "experts" else 1) if n in whole else 0 for n, kind in enumerate(kinds))
    return Network(kinds, sequence, program.sizes.tied, experts, any(layer.routes for layer in layers), matrices)

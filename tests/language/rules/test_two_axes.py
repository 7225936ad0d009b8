"""Matrices cut along both of their indices, and activations with them (2-D tensor parallelism; Shazeer et al. 2018,
arXiv 1811.02084): each rank's numbers, computed in numpy from its slices alone, are what the rules say that they are.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from shardlab.language import Holds, Kind, OpKind, Spec
from shardlab.language.collective_calls import Call, collective
from shardlab.language.rules.layer_graph import Node, layers_of
from shardlab.language.rules.layer_rules import rules_of
from shardlab.language.rules.spec import Space, form_of
from tests.support.refusing import refuses

FFN, WIDTH = 2, 3
"""Ranks along which each index is cut: rank (i, j) has piece i of `ffn` and piece j of `width`."""
CUT = ("ffn", "width")
UP = Node("linear", {"x": "width"}, {"x": "ffn"}, {"w": "ffn width"})
DOWN = Node("linear", {"x": "ffn"}, {"x": "width"}, {"w": "width ffn"})
SIGNATURES = layers_of([("up", (UP,), CUT), ("down", (DOWN,), CUT)])
SPACE = Space(1, 1, (("ffn", FFN), ("width", WIDTH)))
RULES = rules_of(SIGNATURES, SPACE)
RANKS = list(product(range(FFN), range(WIDTH)))

Array = NDArray[np.int64]
RANDOM = np.random.default_rng(0)
X, W1, W2, G = (RANDOM.integers(-9, 9, shape) for shape in ((5, 6), (8, 6), (6, 8), (5, 6)))
H = X @ W1.T
WHOLE = {
    (Kind.ACTIVATION, 0): (X, ("row", "width")),
    (Kind.ACTIVATION, 1): (H, ("row", "ffn")),
    (Kind.ACTIVATION, 2): (H @ W2.T, ("row", "width")),
    (Kind.GRAD_ACTIVATION, 2): (G, ("row", "width")),
    (Kind.GRAD_ACTIVATION, 1): (G @ W2, ("row", "ffn")),
    (Kind.GRAD_ACTIVATION, 0): (G @ W2 @ W1, ("row", "width")),
    (Kind.WEIGHT, 0): (W1, ("ffn", "width")),
    (Kind.WEIGHT, 1): (W2, ("width", "ffn")),
    (Kind.GRAD_WEIGHT, 0): ((G @ W2).T @ X, ("ffn", "width")),
    (Kind.GRAD_WEIGHT, 1): (G.T @ H, ("width", "ffn")),
}
"""What one device has, and the indices of each."""


class Held(NamedTuple):
    """A rank's value: what the rules say of it, and its numbers."""

    spec: Spec
    data: Array


def whole_of(spec: Spec) -> Array:
    """What one device has in the place of a complete value."""
    array, indices = WHOLE[spec.kind, spec.layer]
    pieces = dict(spec.form.slices)
    if spec.form.holds.of > 1:
        (place,) = (piece for piece in range(spec.holds.of) if spec.holds.mask >> piece & 1)
        pieces = {"ffn": 1 << place // WIDTH, "width": 1 << place % WIDTH}
    for dim, index in enumerate(indices):
        count, mask = SPACE.count(index), pieces.get(index)
        if mask is not None:
            array = np.concatenate([a for p, a in enumerate(np.split(array, count, dim)) if mask >> p & 1], dim)
    return array


def start(kind: Kind, layer: int, rank: tuple[int, int], index: str) -> Held:
    piece = 1 << rank[CUT.index(index)]
    spec = Spec(form_of(kind, layer, 0, SPACE, slices=((index, piece),)), 1)
    return Held(spec, whole_of(spec))


def weight(layer: int, rank: tuple[int, int]) -> Held:
    spec = Spec(form_of(Kind.WEIGHT, layer, 0, SPACE, Holds(1 << rank[0] * WIDTH + rank[1], FFN * WIDTH)))
    return Held(spec, whole_of(spec))


def reduced(values: dict[tuple[int, int], Held], along: str) -> dict[tuple[int, int], Held]:
    """All-reduced among the ranks that have the other pieces of an index; complete then, and one device's numbers."""
    axis, made = CUT.index(along), dict[tuple[int, int], Held]()
    for place in range(WIDTH if axis == 0 else FFN):
        members = [rank for rank in RANKS if rank[1 - axis] == place]
        specs = collective(Call(OpKind.ALL_REDUCE), [values[rank].spec for rank in members], range(len(members)), RULES)
        total = sum((values[rank].data for rank in members), np.zeros((), np.int64))
        for rank, spec in zip(members, specs, strict=True):
            assert spec is not None
            assert spec.form.term is None
            np.testing.assert_array_equal(total, whole_of(spec))
            made[rank] = Held(spec, total)
    return made


def forward(layer: int, xs: dict[tuple[int, int], Held]) -> dict[tuple[int, int], Held]:
    made: dict[tuple[int, int], Held] = {}
    for rank, x in xs.items():
        (spec,), _ = RULES.layers[layer].forward([x.spec], weight(layer, rank).spec)
        made[rank] = Held(spec, x.data @ weight(layer, rank).data.T)
    return made


def backward(
    layer: int, xs: dict[tuple[int, int], Held], gradients: dict[tuple[int, int], Held]
) -> dict[tuple[int, int], Held]:
    """The gradients of a layer's input; those of its weight's slices are complete."""
    made: dict[tuple[int, int], Held] = {}
    for rank, x in xs.items():
        gradient, own = gradients[rank], weight(layer, rank)
        (of_weight, of_input), _ = RULES.layers[layer].backward(x.spec, [gradient.spec], own.spec)
        np.testing.assert_array_equal(gradient.data.T @ x.data, whole_of(of_weight))
        made[rank] = Held(of_input, gradient.data @ own.data)
    return made


def test_matrices_cut_along_both_indices_give_one_devices_numbers() -> None:
    """Of each matrix a slice; its result is a piece of one index, and a term over the other's pieces."""
    xs = {rank: start(Kind.ACTIVATION, 0, rank, "width") for rank in RANKS}
    up = forward(0, xs)
    assert str(up[1, 2].spec) == "activations[1] (microbatch 0, feed-forward slice 1 of 2, " + (
        "the term of feature slice 2 of 3)"
    )
    hs = reduced(up, "width")
    reduced(forward(1, hs), "ffn")
    gradients = {rank: start(Kind.GRAD_ACTIVATION, 2, rank, "width") for rank in RANKS}
    between = reduced(backward(1, hs, gradients), "width")
    reduced(backward(0, xs, between), "ffn")


def test_a_term_over_the_other_index_is_not_whole() -> None:
    up = forward(0, {rank: start(Kind.ACTIVATION, 0, rank, "width") for rank in RANKS})
    with refuses("missing terms", layer=1, missing=(0, 1)):
        forward(1, {(1, 2): up[1, 2]})


@pytest.mark.parametrize("other", [(0, 1), (1, 1)])
def test_slices_of_a_matrix_want_their_own_piece_of_what_they_read(other: tuple[int, int]) -> None:
    x = start(Kind.ACTIVATION, 0, other, "width")
    with refuses("other pieces", layer=0):
        RULES.layers[0].forward([x.spec], weight(0, (0, 2)).spec)

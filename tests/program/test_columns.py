"""Column and row layers: what lies side by side is gathered, what is a term is summed, and the other way is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardlab.program.attention import attend
from shardlab.program.transfer import collective

from shardlab.program import Holds, Kind, LayerKind, Mesh, OpKind, Rank, Refused, Sizes, Spec, Value, sliced, trace
from shardlab.program.sizes import side_by_side
from shardlab.rules.pieces import WHOLE, bits
from shardlab.rules.spec import Grid  # FIXME
from tests.program.tapes import refusal, says

COLUMN, ROW, SLICED = LayerKind.COLUMN, LayerKind.ROW, LayerKind.SLICED
FEATURES = 8
Held = tuple[Spec, np.ndarray]


@st.composite
def models(draw: st.DrawFn) -> tuple[int, list[LayerKind]]:
    """How many slices, and layers in which every row layer follows a column."""
    pieces = draw(st.lists(st.sampled_from([[COLUMN], [COLUMN, ROW]]), min_size=1, max_size=4))
    return draw(st.sampled_from([2, 4])), [kind for piece in pieces for kind in piece]


class Ranks:
    """Slices of linear layers y = x W on arrays, each next to what the rules say of it."""

    def __init__(self, slices: int, kinds: Sequence[LayerKind]) -> None:
        chance = np.random.default_rng(len(kinds))
        self.slices, self.kinds, self.grid = slices, kinds, Grid(slices, slices)
        self.matrices = [chance.integers(-3, 4, (FEATURES, FEATURES)) for _ in kinds]
        self.holds = Holds((1 << slices) - 1, slices)

    def run(self, x: np.ndarray) -> None:
        """Forward and back, united as the rules say after every layer, and compared with the whole layer's."""
        values = [[(self.spec(Kind.ACTIVATION, 0), x)] * self.slices]
        whole = [x]
        for l, matrix in enumerate(self.matrices):
            values.append(self.handed_on([self.forward(l, i, given) for i, given in enumerate(values[l])], l + 1))
            whole.append(whole[l] @ matrix)
            assert self.equal(values[-1], whole[-1])
        gradients = [(self.spec(Kind.GRAD_ACTIVATION, len(self.kinds)), whole[-1] + 1)] * self.slices
        expected = whole[-1] + 1
        for l in reversed(range(len(self.kinds))):
            made = [self.backward(l, i, values[l][i], gradients[i]) for i in range(self.slices)]
            gradients = self.handed_on([below for _, below in made], l)
            cut = 1 if self.kinds[l] is COLUMN else 0
            assert np.array_equal(np.concatenate([own for own, _ in made], cut), whole[l].T @ expected)
            expected = expected @ self.matrices[l].T
            assert self.equal(gradients, expected)

    def spec(self, kind: Kind, layer: int) -> Spec:
        return Spec(kind, layer, self.holds, 0, 0, self.grid)

    def weight(self, layer: int, place: int) -> tuple[Spec, np.ndarray]:
        cut = 1 if self.kinds[layer] is COLUMN else 0
        spec = Spec(Kind.WEIGHT, layer, Holds(1 << place, self.slices))
        return spec, np.split(self.matrices[layer], self.slices, cut)[place]

    def forward(self, layer: int, place: int, given: Held) -> Held:
        spec, matrix = self.weight(layer, place)
        made = sliced.forward(layer, given[0], spec, layers=len(self.kinds), kinds=self.kinds)
        return made, given[1] @ matrix

    def backward(self, layer: int, place: int, x: Held, gradient: Held) -> tuple[np.ndarray, Held]:
        spec, matrix = self.weight(layer, place)
        own, below = sliced.backward(layer, x[0], gradient[0], spec, layers=len(self.kinds), kinds=self.kinds)
        assert own == Spec(Kind.GRAD_WEIGHT, layer, spec.holds, self.holds.mask, 0, self.grid)
        assert sliced.backward_weight(layer, len(self.kinds), x[0], gradient[0], 1 << place, self.kinds) == own
        dy = gradient[1]
        if self.kinds[layer] is COLUMN and not gradient[0].sums:
            dy = np.split(dy, self.slices, 1)[place]
        return x[1].T @ dy, (below, dy @ matrix.T)

    def handed_on(self, made: list[Held], number: int) -> list[Held]:
        """What the ranks go on with: united, unless the reader takes slices (a row, or below a row a column)."""
        spec = made[0][0]
        forward = spec.kind is Kind.ACTIVATION
        beside = side_by_side(spec.kind, number, len(self.kinds), self.kinds)
        reader = number if forward else number - 1
        wanted = ROW if forward else COLUMN
        if beside and 0 <= reader < len(self.kinds) and self.kinds[reader] is wanted:
            return made
        verb = OpKind.ALL_GATHER if beside else OpKind.ALL_REDUCE
        united = collective(verb, [spec for spec, _ in made], range(self.slices), len(self.kinds), self.kinds)
        arrays = [array for _, array in made]
        return [(spec, np.concatenate(arrays, 1) if beside else np.sum(arrays, 0)) for spec in united]

    def equal(self, held: list[Held], whole: np.ndarray) -> bool:
        parts = np.split(whole, self.slices, 1)
        return all(
            np.array_equal(array, np.concatenate([parts[i] for i in bits(spec.sums)], 1) if spec.sums else whole)
            for spec, array in held
        )


@given(models())
def test_what_the_rules_say_is_what_arrays_are(model: tuple[int, list[LayerKind]]) -> None:
    slices, kinds = model
    Ranks(slices, kinds).run(np.arange(2 * FEATURES).reshape(2, FEATURES))


def test_a_slice_takes_its_share_of_room_and_a_term_takes_all() -> None:
    sizes = Sizes((8, 8), (8, 8), (12, 20, 12), (0, 0), kinds=(COLUMN, ROW))
    grid, holds = Grid(1, 2), Holds(1, 1)
    assert sizes.elements(Spec(Kind.ACTIVATION, 1, holds, 0b01, 0, grid)) == 10
    assert sizes.elements(Spec(Kind.ACTIVATION, 2, holds, 0b01, 0, grid)) == 12
    assert sizes.elements(Spec(Kind.GRAD_ACTIVATION, 1, holds, 0b10, 0, grid)) == 10
    assert sizes.elements(Spec(Kind.GRAD_ACTIVATION, 0, holds, 0b10, 0, grid)) == 12


# Programs with one mistake each, on two ranks; layers 0 and 1 are columns, 2 is a row after one, 3 is a column.

SIZES = Sizes((8,) * 4, (8,) * 4, (16,) * 5, (0,) * 4, kinds=(COLUMN, COLUMN, ROW, COLUMN))


def start(rank: Rank) -> Value:
    """What the first layer makes."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch([0])
    return rank.forward(0, rank.activations[0], rank.weights[0])


async def to_the_row(rank: Rank) -> Value:
    rank.activations[1] = await rank.all_gather(start(rank), axis="tp")
    rank.activations[2] = rank.forward(1, rank.activations[1], rank.weights[1])
    return rank.activations[2]


async def to_the_end(rank: Rank) -> Value:
    """Forward; the gradient of the last activation."""
    terms = rank.forward(2, await to_the_row(rank), rank.weights[2])
    rank.activations[3] = await rank.all_reduce(terms, axis="tp")
    logits = await rank.all_gather(rank.forward(3, rank.activations[3], rank.weights[3]), axis="tp")
    return rank.loss(logits)


async def forgot_to_gather(rank: Rank) -> None:
    rank.forward(1, start(rank), rank.weights[1])


async def summed_slices(rank: Rank) -> None:
    await rank.all_reduce(start(rank), axis="tp")


async def scattered_slices(rank: Rank) -> None:
    await rank.reduce_scatter(start(rank), axis="tp")


async def gathered_terms(rank: Rank) -> None:
    await rank.all_gather(rank.forward(2, await to_the_row(rank), rank.weights[2]), axis="tp")


async def gathered_twice(rank: Rank) -> None:
    await rank.all_gather(await rank.all_gather(start(rank), axis="tp"), axis="tp")


async def a_row_given_all(rank: Rank) -> None:
    await to_the_row(rank)
    rank.forward(2, await rank.all_gather(rank.activations[2], axis="tp"), rank.weights[2])


async def a_row_given_other_slices(rank: Rank) -> None:
    await to_the_row(rank)
    rank.weights["other"] = rank.load_weight(2, 1 - rank.index, 2)
    rank.forward(2, rank.activations[2], rank.weights["other"])


async def row_terms_unreduced(rank: Rank) -> None:
    rank.forward(3, rank.forward(2, await to_the_row(rank), rank.weights[2]), rank.weights[3])


async def reduced_twice(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    await rank.all_reduce(await rank.all_reduce(terms, axis="tp"), axis="tp")


async def gradient_unreduced(rank: Rank) -> None:
    """A row layer wants the sum; its slice's term looks like any."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    rank.backward(2, rank.activations[2], terms, rank.weights[2])


async def gradient_unreduced_below_a_column(rank: Rank) -> None:
    """A column takes its own slices of a gradient, but a term of it is none."""
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    _, terms = rank.backward(1, rank.activations[1], slices, rank.weights[1])
    rank.backward(0, rank.activations[0], terms, rank.weights[0])


async def summed_a_rows_gradients(rank: Rank) -> None:
    gradient = await to_the_end(rank)
    _, terms = rank.backward(3, rank.activations[3], gradient, rank.weights[3])
    _, slices = rank.backward(2, rank.activations[2], await rank.all_reduce(terms, axis="tp"), rank.weights[2])
    await rank.all_reduce(slices, axis="tp")


MISTAKES: dict[Callable[[Rank], object], str] = {
    forgot_to_gather: "forward(layer 1): the activation given is activations[1] (microbatch 0, slices",
    summed_slices: "slices 0 of 2 alone) was given, a slice of the whole and no term of a sum",
    scattered_slices: "a slice of the whole and no term of a sum",
    gathered_terms: "which is one term of a sum and no slice of the whole. Reduce before gathering",
    gathered_twice: "gathered pieces must not overlap",
    a_row_given_all: "a row layer's slices take their own slices of it and no others",
    a_row_given_other_slices: "a row layer's slices take their own slices of it and no others",
    row_terms_unreduced: "forward(layer 3): the activation given is activations[3] (microbatch 0, slices",
    reduced_twice: "which is complete; summing it again would count it twice",
    gradient_unreduced: "backward(layer 2): the gradient given is grad_activations[3] (microbatch 0, slices",
    gradient_unreduced_below_a_column: "backward(layer 0): the gradient given is grad_activations[1] (microbatch 0,",
    summed_a_rows_gradients: "a slice of the whole and no term of a sum",
}


@pytest.mark.parametrize("strategy", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_with_slices_is_refused_at_its_line(strategy: Callable[[Rank], object]) -> None:
    says(refusal(strategy, Mesh(tp=2), SIZES, 1), MISTAKES[strategy])


def test_a_row_after_what_makes_no_slices_is_refused() -> None:
    sizes = Sizes((8,) * 2, (8,) * 2, (16,) * 3, (0,) * 2, kinds=(SLICED, ROW))

    async def strategy(rank: Rank) -> None:
        terms = start(rank)
        rank.forward(1, terms, rank.weights[1])

    says(refusal(strategy, Mesh(tp=2), sizes, 1), "layer 0 is sliced and makes none")


def test_whole_weights_make_what_is_complete() -> None:
    async def strategy(rank: Rank) -> None:
        rank.activations[0] = rank.load_batch([0])
        for l in rank.layers:
            rank.weights[l] = rank.load_weight(l)
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
            assert rank.activations[l + 1].spec.sums == 0

    trace(strategy, Mesh(tp=2), SIZES, 1)


def test_heads_are_neither_gathered_nor_mixed_with_others() -> None:
    sizes = Sizes.context_blocks(1)
    grid = Grid(2, 2)
    queries, others = (Spec(Kind.QUERIES, 2, Holds(0b11, 2), 1 << i, 0, grid) for i in range(2))
    with pytest.raises(Refused, match="attention's heads stay where they are"):
        collective(OpKind.ALL_GATHER, [queries, others], [0, 1], sizes.layers, sizes.kinds)
    mixed = [spec._replace(kind=Kind.ACTIVATION, layer=3) for spec in (queries, others)]
    with pytest.raises(Refused, match="attention's heads stay where they are"):
        collective(OpKind.ALL_GATHER, mixed, [0, 1], sizes.layers, sizes.kinds)
    with pytest.raises(Refused, match="Slices of attention take their own heads and no others"):
        attend(2, queries, others._replace(kind=Kind.KEYS_VALUES))
    assert Spec(Kind.WEIGHT, 0, WHOLE).parts == 0

"""Column and row layers: what lies side by side is gathered, what is a term is summed, and the other way is refused."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Kind, Mesh, OpKind, Sizes, Spec
from shardlab.language.rules.attention import attend
from shardlab.language.rules.kinds import bits
from tests.language.rules.toys import Toy, matrices, shard
from tests.support.refusing import refuses, told

COLUMN, ROW = "column", "row"
FEATURES = 8
Made = tuple[Spec, np.ndarray]


@st.composite
def models(draw: st.DrawFn) -> tuple[int, list[str]]:
    """How many slices, and layers in which every row layer follows a column."""
    pieces = draw(st.lists(st.sampled_from([[COLUMN], [COLUMN, ROW]]), min_size=1, max_size=4))
    return draw(st.sampled_from([2, 4])), [sort for piece in pieces for sort in piece]


def sizes_of(sorts: Sequence[str]) -> Sizes:
    count = len(sorts)
    return Sizes((8,) * count, (8,) * count, (8,) * (count + 1), (0,) * count, signatures=matrices(sorts))


class Ranks:
    """Slices of linear layers y = x W on arrays, each next to what the rules say of it."""

    def __init__(self, slices: int, sorts: Sequence[str]) -> None:
        chance = np.random.default_rng(len(sorts))
        self.slices, self.sorts = slices, sorts
        self.toy = Toy(sizes_of(sorts), Mesh(tp=slices), 1)
        self.matrices = [chance.integers(-3, 4, (FEATURES, FEATURES)) for _ in sorts]

    @property
    def cells(self) -> int:
        """The one microbatch."""
        return (1 << self.slices) - 1

    def run(self, x: np.ndarray) -> None:
        """Forward and back, united as the rules say after every layer, and compared with the whole layer's."""
        values = [[(self.spec(Kind.ACTIVATION, 0), x)] * self.slices]
        whole = [x]
        for l, matrix in enumerate(self.matrices):
            values.append(self.handed_on([self.forward(l, i, given) for i, given in enumerate(values[l])], l + 1))
            whole.append(whole[l] @ matrix)
            assert self.equal(values[-1], whole[-1])
        gradients = [(self.spec(Kind.GRAD_ACTIVATION, len(self.sorts)), whole[-1] + 1)] * self.slices
        expected = whole[-1] + 1
        for l in reversed(range(len(self.sorts))):
            made = [self.backward(l, i, values[l][i], gradients[i]) for i in range(self.slices)]
            gradients = self.handed_on([below for _, below in made], l)
            cut = 1 if self.sorts[l] == COLUMN else 0
            assert np.array_equal(np.concatenate([own for own, _ in made], cut), whole[l].T @ expected)
            expected = expected @ self.matrices[l].T
            assert self.equal(gradients, expected)

    def spec(self, kind: Kind, layer: int) -> Spec:
        return self.toy.spec_of(kind, layer, self.cells)

    def weight(self, layer: int, place: int) -> tuple[Spec, np.ndarray]:
        cut = 1 if self.sorts[layer] == COLUMN else 0
        spec = self.toy.spec_of(Kind.WEIGHT, layer, 0, shard(place, self.slices))
        return spec, np.split(self.matrices[layer], self.slices, cut)[place]

    def forward(self, layer: int, place: int, given: Made) -> Made:
        spec, matrix = self.weight(layer, place)
        (made,) = self.toy.layer(layer).forward([given[0]], spec)
        return made, given[1] @ matrix

    def backward(self, layer: int, place: int, x: Made, gradient: Made) -> tuple[np.ndarray, Made]:
        spec, matrix = self.weight(layer, place)
        rules = self.toy.layer(layer)
        own, below = rules.backward(x[0], [gradient[0]], spec)
        assert own == self.toy.spec_of(Kind.GRAD_WEIGHT, layer, self.cells, spec.holds)
        half = rules.saved(x[0], spec, Kind.SAVED_FOR_WEIGHT)
        assert rules.backward_weight(x[0], [gradient[0]], half) == own
        dy = gradient[1]
        if self.sorts[layer] == COLUMN and not gradient[0].form.slices:
            dy = np.split(dy, self.slices, 1)[place]
        return x[1].T @ dy, (below, dy @ matrix.T)

    def handed_on(self, made: list[Made], number: int) -> list[Made]:
        """What the ranks go on with: united, unless the reader takes slices (a row, or below a row a column)."""
        spec = made[0][0]
        beside = bool(spec.form.slices)
        reader, wanted = (number, ROW) if spec.kind is Kind.ACTIVATION else (number - 1, COLUMN)
        if beside and 0 <= reader < len(self.sorts) and self.sorts[reader] == wanted:
            return made
        verb = OpKind.ALL_GATHER if beside else OpKind.ALL_REDUCE
        arrays = [array for _, array in made]
        whole = np.concatenate(arrays, 1) if beside else np.sum(arrays, 0)
        return [(spec, whole) for spec in self.toy.meet(verb, *[spec for spec, _ in made])]

    def pieces(self, spec: Spec) -> set[int]:
        """The features that a value holds: all, or slices along one index."""
        for _, mask in spec.form.slices:
            return set(bits(mask))
        return set(range(self.slices))

    def equal(self, held: list[Made], whole: np.ndarray) -> bool:
        parts = np.split(whole, self.slices, 1)
        return all(
            np.array_equal(array, np.concatenate([part for i, part in enumerate(parts) if i in self.pieces(spec)], 1))
            for spec, array in held
        )


@given(models())
def test_what_the_rules_say_is_what_arrays_are(model: tuple[int, list[str]]) -> None:
    slices, sorts = model
    Ranks(slices, sorts).run(np.arange(2 * FEATURES).reshape(2, FEATURES))


def test_heads_are_neither_gathered_nor_mixed_with_others() -> None:
    toy = Toy(Sizes.context_blocks(1), Mesh(tp=2), 1)
    queries, others = (toy.spec_of(Kind.QUERIES, 2, 0b11, slices={"head": 1 << i}) for i in range(2))
    with refuses("not gathered", layer=2):
        toy.meet(OpKind.ALL_GATHER, queries, others)
    mixed = [toy.spec_of(Kind.ACTIVATION, 3, 0b11, slices={"head": 1 << i}) for i in range(2)]
    with refuses("not gathered", layer=3):
        toy.meet(OpKind.ALL_GATHER, *mixed)
    keys = toy.spec_of(Kind.KEYS_VALUES, 2, 0b11, slices={"head": 0b10})
    with refuses("other pieces", layer=2):
        attend(2, queries, keys)


def test_a_row_takes_its_own_slices_and_a_column_its_own_of_a_complete_gradient() -> None:
    toy = Toy(sizes_of([COLUMN, ROW, COLUMN]), Mesh(tp=2), 1)
    weight = toy.spec_of(Kind.WEIGHT, 1, 0, shard(0, 2))
    said = told("other pieces", layer=1)
    for held in ({}, {"ffn": 0b10}):
        with refuses(said):
            toy.layer(1).forward([toy.spec_of(Kind.ACTIVATION, 1, 0b11, slices=held)], weight)
    column, x = toy.spec_of(Kind.WEIGHT, 2, 0, shard(0, 2)), toy.spec_of(Kind.ACTIVATION, 2, 0b11)
    whole, own = (toy.spec_of(Kind.GRAD_ACTIVATION, 3, 0b11, slices=held) for held in ({}, {"ffn": 0b01}))
    assert toy.layer(2).backward(x, [whole], column) == toy.layer(2).backward(x, [own], column)
    with refuses("other pieces", layer=2):
        toy.layer(2).backward(x, [toy.spec_of(Kind.GRAD_ACTIVATION, 3, 0b11, slices={"ffn": 0b10})], column)

"""Specs and forms: equal forms are one object, and the text of a spec says what the value is and lacks."""

from __future__ import annotations

import pickle
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Holds, Kind, Mesh, OpKind, Reduction, Sizes, Spec
from shardlab.language.rules.attention import attend
from shardlab.language.rules.kinds import ROW_KINDS, WHOLE, bits
from shardlab.language.rules.spec import (
    KEY,
    Space,
    Term,
    cells_text,
    flat_of_pieces,
    flat_slices,
    form_of,
    fraction_held,
    microbatches_of,
    missing_text,
    pieces_of_flat,
    summed_text,
    whole_sequences,
)
from tests.language.rules.toys import Toy, matrices, shard
from tests.support.refusing import refusal_by, refuses

SPACE = Space(4, 1, (("expert", 2), ("ffn", 2), ("head", 2)))
SEQUENCES = Space(2, 2, (("ffn", 2), ("head", 2)))
TIED = Space(2, 2, uses=2)


def spec_of(kind: Kind, layer: int, cells: int = 0, holds: Holds = WHOLE, step: int = 0, space: Space = SPACE) -> Spec:
    return Spec(form_of(kind, layer, step, space, holds), cells)


def of_slices(kind: Kind, cells: int, index: str, mask: int) -> Spec:
    return Spec(form_of(kind, 3, 0, SPACE, slices=((index, mask),)), cells)


def term_of(kind: Kind, cells: int, term: Term, space: Space = SPACE) -> Spec:
    return Spec(form_of(kind, 3, 0, space, term=term), cells)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (spec_of(Kind.WEIGHT, 2), "weights[2]"),
        (spec_of(Kind.WEIGHT, 2, 0, Holds(0b11, 2)), "weights[2]"),
        (spec_of(Kind.WEIGHT, 2, 0, Holds(0b0110, 4)), "weights[2] (shard 1-2 of 4)"),
        (spec_of(Kind.OPT_STATE, 0, 0, Holds(1, 4), 1), "opt_states[0] (shard 0 of 4, step 1)"),
        (spec_of(Kind.WEIGHT, 1, step=1), "weights[1] (step 1)"),
        (spec_of(Kind.ACTIVATION, 3, 0b0100), "activations[3] (microbatch 2)"),
        (spec_of(Kind.GRAD_ACTIVATION, 3, 0b1111), "grad_activations[3] (microbatches 0-3)"),
        (spec_of(Kind.GRAD_WEIGHT, 0, 0b101), "grad_weights[0] (microbatches 0, 2)"),
        (spec_of(Kind.GRAD_WEIGHT, 0), "grad_weights[0] (zero)"),
        (spec_of(Kind.GRAD_WEIGHT, 0, 0b1, Holds(0b10, 2)), "grad_weights[0] (microbatch 0, shard 1 of 2)"),
        (spec_of(Kind.SCALAR, 0), "scalars"),
        (spec_of(Kind.SCALAR, 0, 0, Holds(0b101, 4)), "scalars (parts 0, 2 of 4 of the model)"),
        (spec_of(Kind.SAVED_FOR_WEIGHT, 1, 0b1), "saved_for_weight[1] (microbatch 0)"),
        (of_slices(Kind.ACTIVATION, 0b1, "expert", 0b10), "activations[3] (microbatch 0, expert 1 of 2)"),
        (
            term_of(Kind.ACTIVATION, 0b11, Term(("ffn",), 0b01)),
            "activations[3] (microbatches 0-1, the term of feed-forward slice 0 of 2)",
        ),
        (
            term_of(Kind.ACTIVATION, 0b01, Term(KEY, 0b01), SEQUENCES),
            "activations[3] (sequence slice 0 of microbatch 0, keys and values 0 of 2 alone)",
        ),
        (
            term_of(Kind.GRAD_KEYS_VALUES, 0b11, Term(KEY, 0b10), SEQUENCES),
            "grad_keys_values[3] (microbatch 0, queries 1 of 2 alone)",
        ),
        (
            Spec(form_of(Kind.SCALAR, 0, 0, SPACE, reduction=Reduction.MAX)),
            "scalars (the max of several ranks')",
        ),
    ],
)
def test_a_spec_says_what_the_value_is_and_what_it_lacks(spec: Spec, text: str) -> None:
    assert str(spec) == text


def test_cells_are_said_with_their_use() -> None:
    assert cells_text(0b0011, TIED) == "microbatch 0"
    gradient = form_of(Kind.GRAD_WEIGHT, 0, 0, TIED)
    assert summed_text(gradient, 0b0011) == "microbatch 0 as the embedding"
    text = "microbatch 0 as the embedding and microbatches 0-1 as the head"
    assert summed_text(gradient, 0b1111_0011) == text
    assert summed_text(gradient, 0b0001_0000) == "sequence slice 0 of microbatch 0 as the head"
    assert Spec(gradient, 0b1100_0011).microbatches == 0b11


def test_missing_pieces_are_named_in_the_singular_or_the_plural() -> None:
    assert missing_text("head slice", 0b10) == "head slice 1 is missing"
    assert missing_text("expert", 0b1101) == "experts 0, 2-3 are missing"


def test_microbatches_are_rows_for_activations_and_sums_for_gradients() -> None:
    assert spec_of(Kind.ACTIVATION, 0, 0b110).microbatches == 0b110
    assert spec_of(Kind.GRAD_WEIGHT, 0, 0b011).microbatches == 0b011
    assert spec_of(Kind.WEIGHT, 0, 0, Holds(0b110, 3)).microbatches == 0
    assert spec_of(Kind.SCALAR, 0, 0, Holds(0b110, 3)).microbatches == 0


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_whole_sequences_are_those_of_which_no_slice_is_missing(count: int, slices: int, data: st.DataObject) -> None:
    space = Space(count, slices)
    cells = data.draw(st.integers(0, (1 << space.cells) - 1))
    present = [{s for s in range(slices) if cells >> m * slices + s & 1} for m in range(count)]
    assert whole_sequences(cells, space) == all(len(indices) in (0, slices) for indices in present)
    assert microbatches_of(cells, space) == sum(1 << m for m in range(count) if present[m])


def test_a_slice_takes_its_share_and_so_does_a_term() -> None:
    assert fraction_held(spec_of(Kind.ACTIVATION, 0, 1).form) == 1
    assert fraction_held(of_slices(Kind.ACTIVATION, 1, "ffn", 0b01).form) == Fraction(1, 2)
    assert fraction_held(term_of(Kind.ACTIVATION, 1, Term(("ffn",), 0b10)).form) == Fraction(1, 2)
    assert fraction_held(term_of(Kind.ACTIVATION, 1, Term(KEY, 0b1), SEQUENCES).form) == 1


@st.composite
def some_specs(draw: st.DrawFn) -> Spec:
    """Draw specs of any kind, cut and summed in any way."""
    pieces = draw(st.dictionaries(st.sampled_from(["expert", "ffn", "head"]), st.integers(2, 4)))
    space = Space(
        draw(st.integers(1, 4)), draw(st.integers(1, 4)), tuple(sorted(pieces.items())), draw(st.integers(1, 2))
    )
    kind, layer, step = draw(st.sampled_from(Kind)), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    if kind in ROW_KINDS:
        cut = draw(st.sets(st.sampled_from(sorted(pieces)))) if pieces else set[str]()
        slices = tuple((index, draw(st.integers(1, space.full(index)))) for index in sorted(cut))
        uncut = sorted(set(pieces) - cut)
        terms = [st.none(), st.builds(Term, st.just(KEY), st.integers(1, (1 << space.sequence) - 1))]
        if uncut:
            terms.append(st.builds(Term, st.just((uncut[0],)), st.integers(1, space.full(uncut[0]))))
        cells = draw(st.integers(1, (1 << space.cells) - 1))
        return Spec(form_of(kind, layer, step, space, slices=slices, term=draw(st.one_of(terms))), cells)
    of = draw(st.integers(1, 5))
    holds = Holds(draw(st.integers(1, (1 << of) - 1)), of)
    reduction = draw(st.sampled_from(Reduction)) if kind is Kind.SCALAR else Reduction.SUM
    uses = space.uses if layer == 0 else 1
    cells = draw(st.integers(0, (1 << space.cells * uses) - 1)) if kind is Kind.GRAD_WEIGHT else 0
    return Spec(form_of(kind, layer, step, space, holds, reduction=reduction), cells)


@given(some_specs())
def test_any_spec_reads_as_a_name_and_what_is_to_be_said_of_it(spec: Spec) -> None:
    name, _, rest = str(spec).partition(" ")
    assert name == spec.name
    assert re.fullmatch(r"[a-z_]+(\[\d+\])?", name)
    assert not rest or re.fullmatch(r"\([a-z][a-z0-9' ,-]*\)", rest), rest
    assert not re.search(r"\bnone\b|  |, ,|,\)|\bno microbatch\b", rest)


@given(some_specs())
def test_equal_forms_are_one_object_however_they_were_made(spec: Spec) -> None:
    form = form_of(*spec.form.key())  # pyright: ignore[reportArgumentType]
    assert form is spec.form
    assert spec.form.but(step=spec.step + 1).but(step=spec.step) is spec.form
    assert pickle.loads(pickle.dumps(spec)).form is spec.form


# Flat slices of a layer's parameters are pieces of its indices, and the other way round.


CUT = ("expert", "head", "ffn")


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Space, dict[str, int]]:
    """A space, and some pieces of each of its indices."""
    counts = {index: draw(st.integers(1, 4)) for index in CUT}
    return Space(1, 1, tuple(counts.items())), {index: draw(st.integers(1, 2**n - 1)) for index, n in counts.items()}


@given(pieces())
def test_pieces_are_the_flat_slices_of_their_tuples(case: tuple[Space, dict[str, int]]) -> None:
    space, masks = case
    of = flat_slices(CUT, space)
    tuples = product(*[range(space.count(index)) for index in CUT])
    is_held = [all(masks[index] >> piece & 1 for index, piece in zip(CUT, numbers, strict=True)) for numbers in tuples]
    flat = flat_of_pieces(masks, CUT, space).refined(of)
    assert flat == Holds(sum(1 << place for place, is_in in enumerate(is_held) if is_in), of)


@given(pieces())
def test_flat_slices_are_the_pieces_that_they_were_made_of(case: tuple[Space, dict[str, int]]) -> None:
    space, masks = case
    partial = {index: mask for index, mask in masks.items() if mask != space.full(index)}
    flat = flat_of_pieces(masks, CUT, space).refined(flat_slices(CUT, space))
    assert pieces_of_flat(flat, CUT, space) == partial


def test_slices_that_are_no_block_are_no_pieces() -> None:
    space = Space(1, 1, (("expert", 2), ("head", 2)))
    assert pieces_of_flat(Holds(0b1001, 4), ("expert", "head"), space) is None
    assert flat_of_pieces({}, ("expert", "head"), space) == WHOLE


# Column and row layers: what lies side by side is gathered, what is a term is summed, and the other way is refused.


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
            values.append(self.handed_on([self.forward(l, i, value) for i, value in enumerate(values[l])], l + 1))
            whole.append(whole[l] @ matrix)
            assert self.equal(values[-1], whole[-1])
        gradients = [(self.spec(Kind.GRAD_ACTIVATION, len(self.sorts)), whole[-1] + 1)] * self.slices
        expected = whole[-1] + 1
        for l in reversed(range(len(self.sorts))):
            results = [self.backward(l, i, values[l][i], gradients[i]) for i in range(self.slices)]
            gradients = self.handed_on([grad_input for _, grad_input in results], l)
            cut = 1 if self.sorts[l] == COLUMN else 0
            assert np.array_equal(
                np.concatenate([grad_weight for grad_weight, _ in results], cut), whole[l].T @ expected
            )
            expected = expected @ self.matrices[l].T
            assert self.equal(gradients, expected)

    def spec(self, kind: Kind, layer: int) -> Spec:
        return self.toy.spec_of(kind, layer, self.cells)

    def weight(self, layer: int, place: int) -> tuple[Spec, np.ndarray]:
        cut = 1 if self.sorts[layer] == COLUMN else 0
        spec = self.toy.spec_of(Kind.WEIGHT, layer, 0, shard(place, self.slices))
        return spec, np.split(self.matrices[layer], self.slices, cut)[place]

    def forward(self, layer: int, place: int, value: Made) -> Made:
        spec, matrix = self.weight(layer, place)
        (output,) = self.toy.layer(layer).forward([value[0]], spec)
        return output, value[1] @ matrix

    def backward(self, layer: int, place: int, x: Made, gradient: Made) -> tuple[np.ndarray, Made]:
        spec, matrix = self.weight(layer, place)
        rules = self.toy.layer(layer)
        grad_weight, grad_input = rules.backward(x[0], [gradient[0]], spec)
        assert grad_weight == self.toy.spec_of(Kind.GRAD_WEIGHT, layer, self.cells, spec.holds)
        half = rules.saved(x[0], spec, Kind.SAVED_FOR_WEIGHT)
        assert rules.backward_weight(x[0], [gradient[0]], half) == grad_weight
        dy = gradient[1]
        if self.sorts[layer] == COLUMN and not gradient[0].form.slices:
            dy = np.split(dy, self.slices, 1)[place]
        return x[1].T @ dy, (grad_input, dy @ matrix.T)

    def handed_on(self, outputs: list[Made], number: int) -> list[Made]:
        """What the ranks go on with: united, unless the reader takes slices (a row, or below a row a column)."""
        spec = outputs[0][0]
        is_sliced = bool(spec.form.slices)
        reader, sort = (number, ROW) if spec.kind is Kind.ACTIVATION else (number - 1, COLUMN)
        if is_sliced and 0 <= reader < len(self.sorts) and self.sorts[reader] == sort:
            return outputs
        verb = OpKind.ALL_GATHER if is_sliced else OpKind.ALL_REDUCE
        arrays = [array for _, array in outputs]
        whole = np.concatenate(arrays, 1) if is_sliced else np.sum(arrays, 0)
        return [(spec, whole) for spec in self.toy.meet(verb, *[spec for spec, _ in outputs])]

    def pieces(self, spec: Spec) -> set[int]:
        """The features that a value holds: all, or slices along one index."""
        for _, mask in spec.form.slices:
            return set(bits(mask))
        return set(range(self.slices))

    def equal(self, values: list[Made], whole: np.ndarray) -> bool:
        parts = np.split(whole, self.slices, 1)
        return all(
            np.array_equal(array, np.concatenate([part for i, part in enumerate(parts) if i in self.pieces(spec)], 1))
            for spec, array in values
        )


@given(models())
def test_the_rules_agree_with_arrays(model: tuple[int, list[str]]) -> None:
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
    expected = refusal_by("other pieces", layer=1)
    for slices in ({}, {"ffn": 0b10}):
        with refuses(expected):
            toy.layer(1).forward([toy.spec_of(Kind.ACTIVATION, 1, 0b11, slices=slices)], weight)
    column, x = toy.spec_of(Kind.WEIGHT, 2, 0, shard(0, 2)), toy.spec_of(Kind.ACTIVATION, 2, 0b11)
    whole, sliced = (toy.spec_of(Kind.GRAD_ACTIVATION, 3, 0b11, slices=slices) for slices in ({}, {"ffn": 0b01}))
    assert toy.layer(2).backward(x, [whole], column) == toy.layer(2).backward(x, [sliced], column)
    with refuses("other pieces", layer=2):
        toy.layer(2).backward(x, [toy.spec_of(Kind.GRAD_ACTIVATION, 3, 0b11, slices={"ffn": 0b10})], column)

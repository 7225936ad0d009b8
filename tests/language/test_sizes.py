"""How large values are: the puzzles' constants, and tables of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Holds, Kind, Mesh, Sizes, Spec
from shardlab.language.rules.kinds import WHOLE
from shardlab.language.rules.spec import Space, Term, form_of
from tests.language.rules.toys import matrices

SQUARE, ROW = 512 * 512, 512 * 256


def spec_of(kind: Kind, layer: int, cells: int = 0, holds: Holds = WHOLE) -> Spec:
    return Spec(form_of(kind, layer, 0, Space(4), holds), cells)


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        (spec_of(Kind.WEIGHT, 0), SQUARE),
        (spec_of(Kind.WEIGHT, 1, 0, Holds(0b0001, 4)), SQUARE // 4),
        (spec_of(Kind.OPT_STATE, 0, 0, Holds(0b0011, 4)), SQUARE // 2),
        (spec_of(Kind.GRAD_WEIGHT, 1, 0b1), SQUARE),
        (spec_of(Kind.ACTIVATION, 0, 0b0001), ROW),
        (spec_of(Kind.ACTIVATION, 2, 0b0111), 3 * ROW),
        (spec_of(Kind.GRAD_ACTIVATION, 2, 0b1111), 4 * ROW),
        (spec_of(Kind.SAVED, 1, 0b1111), 0),
        (spec_of(Kind.SAVED_FOR_WEIGHT, 1, 0b1111), 0),
        (spec_of(Kind.SCALAR, 0, 0, Holds(0b01, 2)), 1),
    ],
)
def test_the_puzzles_sizes(spec: Spec, elements: int) -> None:
    assert Sizes.puzzle(2).elements(spec) == elements
    assert Sizes.puzzle(2).bytes(spec) == 4 * elements


SIZES = Sizes(
    weights=(10, 7),
    opt_states=(20, 14),
    activations=(1, 2, 3),
    saved=(5, 6),
    element_bytes={
        Kind.WEIGHT: 2,
        Kind.OPT_STATE: 4,
        Kind.GRAD_WEIGHT: 2,
        Kind.ACTIVATION: 2,
        Kind.GRAD_ACTIVATION: 2,
        Kind.SAVED: 1,
    },
)


@pytest.mark.parametrize(
    ("spec", "elements", "size"),
    [
        (spec_of(Kind.WEIGHT, 1), 7, 14),
        (spec_of(Kind.GRAD_WEIGHT, 1, 1), 7, 14),
        (spec_of(Kind.OPT_STATE, 1), 14, 56),
        (spec_of(Kind.ACTIVATION, 2, 0b101), 6, 12),
        (spec_of(Kind.GRAD_ACTIVATION, 1, 0b001), 2, 4),
        (spec_of(Kind.SAVED, 1, 0b011), 12, 12),
    ],
)
def test_each_kind_has_its_own_table_and_element_size(spec: Spec, elements: int, size: int) -> None:
    assert SIZES.elements(spec) == elements
    assert SIZES.bytes(spec) == size


def test_what_is_kept_between_the_halves_has_a_table_or_is_what_was_saved() -> None:
    spec = spec_of(Kind.SAVED_FOR_WEIGHT, 1, 0b011)
    assert SIZES.elements(spec) == 2 * 6
    assert replace(SIZES, saved_for_weight=(8, 9)).elements(spec) == 2 * 9


def test_uneven_shares_round_up() -> None:
    assert [SIZES.elements(spec_of(Kind.WEIGHT, 1, 0, Holds(1 << shard, 4))) for shard in range(4)] == [2, 2, 2, 2]
    assert SIZES.elements(spec_of(Kind.WEIGHT, 1, 0, Holds(0b0111, 4))) == 6  # 5.25


@given(st.integers(1, 1000), st.integers(1, 12))
def test_shards_cover_the_layer_and_waste_less_than_an_element_each(parameters: int, shards: int) -> None:
    sizes = Sizes((parameters,), (parameters,), (1, 1), (0,))
    share = sizes.elements(spec_of(Kind.WEIGHT, 0, 0, Holds(1, shards)))
    assert parameters <= share * shards < parameters + shards
    assert sizes.elements(spec_of(Kind.WEIGHT, 0, 0, Holds((1 << shards) - 1, shards))) == parameters


def test_the_number_of_layers_is_that_of_the_tables() -> None:
    assert SIZES.layers == 2
    assert Sizes.puzzle(5).layers == 5
    assert len(Sizes.puzzle(5).activations) == 6


def test_a_slice_takes_its_share_of_room_and_a_term_takes_all() -> None:
    sizes = Sizes((8, 8), (8, 8), (12, 20, 12), (0, 0), signatures=matrices(["column", "row"]))
    space = sizes.space(Mesh(tp=2), 1)

    def held(kind: Kind, layer: int) -> int:
        return sizes.elements(Spec(form_of(kind, layer, 0, space, slices=(("ffn", 0b01),)), 0b11))

    def term(kind: Kind, layer: int) -> int:
        return sizes.elements(Spec(form_of(kind, layer, 0, space, term=Term(("ffn",), 0b10)), 0b11))

    assert held(Kind.ACTIVATION, 1) == held(Kind.GRAD_ACTIVATION, 1) == 10
    assert term(Kind.ACTIVATION, 2) == term(Kind.GRAD_ACTIVATION, 0) == 12

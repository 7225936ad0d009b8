"""How large values are: the puzzles' constants, and tables of a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.program import Holds, Kind, Sizes, Spec
from shardlab.rules.pieces import WHOLE

SQUARE, ROW = 512 * 512, 512 * 256


@pytest.mark.parametrize(
    ("spec", "elements"),
    [
        (Spec(Kind.WEIGHT, 0, WHOLE), SQUARE),
        (Spec(Kind.WEIGHT, 1, Holds(0b0001, 4)), SQUARE // 4),
        (Spec(Kind.OPT_STATE, 0, Holds(0b0011, 4)), SQUARE // 2),
        (Spec(Kind.GRAD_WEIGHT, 1, WHOLE, 0b1), SQUARE),
        (Spec(Kind.ACTIVATION, 0, Holds(0b0001, 4)), ROW),
        (Spec(Kind.ACTIVATION, 2, Holds(0b0111, 4)), 3 * ROW),
        (Spec(Kind.GRAD_ACTIVATION, 2, Holds(0b1111, 4)), 4 * ROW),
        (Spec(Kind.SAVED, 1, Holds(0b1111, 4)), 0),
        (Spec(Kind.SAVED_FOR_WEIGHT, 1, Holds(0b1111, 4)), 0),
        (Spec(Kind.SCALAR, 0, Holds(0b01, 2)), 1),
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
        (Spec(Kind.WEIGHT, 1, WHOLE), 7, 14),
        (Spec(Kind.GRAD_WEIGHT, 1, WHOLE, 1), 7, 14),
        (Spec(Kind.OPT_STATE, 1, WHOLE), 14, 56),
        (Spec(Kind.ACTIVATION, 2, Holds(0b101, 3)), 6, 12),
        (Spec(Kind.GRAD_ACTIVATION, 1, Holds(0b001, 3)), 2, 4),
        (Spec(Kind.SAVED, 1, Holds(0b011, 3)), 12, 12),
    ],
)
def test_each_kind_has_its_own_table_and_element_size(spec: Spec, elements: int, size: int) -> None:
    assert SIZES.elements(spec) == elements
    assert SIZES.bytes(spec) == size


def test_what_is_kept_between_the_halves_has_a_table_or_is_what_was_saved() -> None:
    spec = Spec(Kind.SAVED_FOR_WEIGHT, 1, Holds(0b011, 3))
    assert SIZES.elements(spec) == 2 * 6
    assert replace(SIZES, saved_for_weight=(8, 9)).elements(spec) == 2 * 9


def test_uneven_shares_round_up() -> None:
    assert [SIZES.elements(Spec(Kind.WEIGHT, 1, Holds(1 << shard, 4))) for shard in range(4)] == [2, 2, 2, 2]
    assert SIZES.elements(Spec(Kind.WEIGHT, 1, Holds(0b0111, 4))) == 6  # 5.25


@given(st.integers(1, 1000), st.integers(1, 12))
def test_shards_cover_the_layer_and_waste_less_than_an_element_each(parameters: int, shards: int) -> None:
    sizes = Sizes((parameters,), (parameters,), (1, 1), (0,))
    share = sizes.elements(Spec(Kind.WEIGHT, 0, Holds(1, shards)))
    assert parameters <= share * shards < parameters + shards
    assert sizes.elements(Spec(Kind.WEIGHT, 0, Holds((1 << shards) - 1, shards))) == parameters


def test_the_number_of_layers_is_that_of_the_tables() -> None:
    assert SIZES.layers == 2
    assert Sizes.puzzle(5).layers == 5
    assert len(Sizes.puzzle(5).activations) == 6

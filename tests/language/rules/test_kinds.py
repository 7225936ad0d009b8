"""Holds is a set of slices of the whole, whatever the number of pieces that it is counted in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.common.errors import Refused
from shardlab.language.rules.kinds import (
    WHOLE,
    Holds,
    bits,
    in_equal_pieces,
    mask_of,
    microbatches_text,
    repeat_pattern,
)

FINEST = 2520
"""Divisible by every number of pieces up to 10, so every set can be counted in pieces of this size."""


def points(holds: Holds) -> frozenset[int]:
    """Return the 2520ths of the whole that are held, from the definition alone."""
    return frozenset(point for point in range(FINEST) if holds.mask >> point * holds.of // FINEST & 1)


@st.composite
def some_holds(draw: st.DrawFn, of: int | None = None) -> Holds:
    pieces = of or draw(st.integers(1, 10))
    return Holds(draw(st.integers(0, (1 << pieces) - 1)), pieces)


@given(some_holds(), st.integers(1, 6))
def test_refining_changes_the_count_but_not_the_slices(holds: Holds, times: int) -> None:
    fine = holds.refined(holds.of * times)
    assert fine.of == holds.of * times
    if FINEST % fine.of == 0:
        assert points(fine) == points(holds)
    assert fine.pieces == holds.pieces * times
    assert fine.equals(holds)


@given(some_holds(), some_holds())
def test_contains_is_the_subset_relation(a: Holds, b: Holds) -> None:
    assert a.contains(b) == (points(b) <= points(a))


@given(some_holds(), some_holds())
def test_same_is_equality_of_slices(a: Holds, b: Holds) -> None:
    assert a.equals(b) == (points(a) == points(b))
    assert a.equals(b) == b.equals(a) == (a.contains(b) and b.contains(a))


@given(some_holds(), some_holds())
def test_common_counts_both_in_pieces_of_one_size(a: Holds, b: Holds) -> None:
    mine, theirs = in_equal_pieces(a, b)
    assert mine.of == theirs.of
    assert points(mine) == points(a)
    assert points(theirs) == points(b)


@given(some_holds())
def test_complete_means_that_nothing_is_missing(holds: Holds) -> None:
    assert holds.complete == (len(points(holds)) == FINEST)
    assert holds.complete == holds.equals(WHOLE)


@given(some_holds(), st.integers(1, 6))
def test_simplified_counts_the_same_slices_in_the_largest_pieces_there_are(holds: Holds, times: int) -> None:
    simple = holds.refined(holds.of * times).simplified()
    assert simple.equals(holds)
    assert simple == holds.simplified()
    if holds.mask:
        coarser = [of for of in range(1, simple.of) if simple.of % of == 0]
        assert not any(Holds(mask, of).equals(holds) for of in coarser for mask in range(1 << of))


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_pieces_cut_and_put_together_are_the_shard_that_they_were(of: int, parts: int, data: st.DataObject) -> None:
    shard = Holds(1 << data.draw(st.integers(0, of - 1)), of)
    cut = list(shard.split(parts))
    assert Holds(sum(part.mask for part in cut), cut[0].of).simplified() == shard


@given(some_holds(), st.integers(1, 6))
def test_split_cuts_into_equal_slices_in_order_that_together_are_the_whole(holds: Holds, parts: int) -> None:
    cut = list(holds.split(parts))
    assert len(cut) == parts
    assert len({part.of for part in cut}) == 1
    assert len({part.pieces for part in cut}) == 1
    places = [place for part in cut for place in bits(part.mask)]
    assert places == sorted(set(places))
    assert Holds(mask_of(places), cut[0].of).equals(holds)


@given(st.integers(1, 8))
def test_the_whole_splits_into_the_shards_that_load_weights_gives(parts: int) -> None:
    assert list(WHOLE.split(parts)) == [Holds(1 << shard, parts) for shard in range(parts)]


@pytest.mark.parametrize("compare", [Holds.contains, Holds.equals, in_equal_pieces])
def test_slices_of_coprime_numbers_are_counted_together_as_far_as_memory_goes(
    compare: Callable[[Holds, Holds], object],
) -> None:
    compare(Holds(1, 1021), Holds(1, 1019))
    with pytest.raises(Refused, match=r"counted in 999,962,000,357 pieces"):
        compare(Holds(1, 999_983), Holds(1, 999_979))


def test_pieces_are_not_cut_finer_than_needed() -> None:
    assert list(Holds(0b1111, 4).split(2)) == [Holds(0b0011, 4), Holds(0b1100, 4)]
    assert list(Holds(0b1010, 4).split(2)) == [Holds(0b0010, 4), Holds(0b1000, 4)]


def test_a_third_of_a_half_is_counted_in_sixths() -> None:
    assert list(Holds(0b01, 2).split(3)) == [Holds(0b001, 6), Holds(0b010, 6), Holds(0b100, 6)]


@given(st.sets(st.integers(0, 200)))
def test_a_bit_set_gives_back_its_numbers_in_order(numbers: set[int]) -> None:
    assert list(bits(mask_of(numbers))) == sorted(numbers)


@pytest.mark.parametrize(("mask", "text"), [(0b1000, "microbatch 3"), (0b111, "microbatches 0-2")])
def test_one_microbatch_is_named_in_the_singular(mask: int, text: str) -> None:
    assert microbatches_text(mask) == text


def test_a_negative_bit_set_has_no_numbers_and_can_be_said() -> None:
    assert list(bits(-5)) == []
    assert str(Holds(-5, 4)) == "none of 4"


def test_a_repeated_pattern_ends_at_the_total() -> None:
    assert repeat_pattern(0b01, 2, 7) == 0b1010101

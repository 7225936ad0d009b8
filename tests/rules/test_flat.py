"""Flat slices of a layer's parameters are pieces of its indices, and the other way round."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shardlab.program import Holds
from shardlab.rules.flat import flat_of_pieces, flat_slices, pieces_of_flat
from shardlab.rules.pieces import WHOLE
from shardlab.rules.spec import Space

CUT = ("expert", "head", "ffn")


@st.composite
def pieces(draw: st.DrawFn) -> tuple[Space, dict[str, int]]:
    """A space, and some pieces of each of its indices."""
    counts = {index: draw(st.integers(1, 4)) for index in CUT}
    return Space(1, 1, tuple(counts.items())), {index: draw(st.integers(1, 2**n - 1)) for index, n in counts.items()}


@given(pieces())
def test_pieces_are_the_flat_slices_of_their_tuples(drawn: tuple[Space, dict[str, int]]) -> None:
    space, held = drawn
    of = flat_slices(CUT, space)
    tuples = product(*[range(space.count(index)) for index in CUT])
    inside = [all(held[index] >> piece & 1 for index, piece in zip(CUT, each, strict=True)) for each in tuples]
    flat = flat_of_pieces(held, CUT, space).refined(of)
    assert flat == Holds(sum(1 << place for place, is_in in enumerate(inside) if is_in), of)


@given(pieces())
def test_flat_slices_are_the_pieces_that_they_were_made_of(drawn: tuple[Space, dict[str, int]]) -> None:
    space, held = drawn
    partial = {index: mask for index, mask in held.items() if mask != space.full(index)}
    flat = flat_of_pieces(held, CUT, space).refined(flat_slices(CUT, space))
    assert pieces_of_flat(flat, CUT, space) == partial


def test_slices_that_are_no_block_are_no_pieces() -> None:
    space = Space(1, 1, (("expert", 2), ("head", 2)))
    assert pieces_of_flat(Holds(0b1001, 4), ("expert", "head"), space) is None
    assert flat_of_pieces({}, ("expert", "head"), space) == WHOLE

"""A layer's flat buffer: aligned, without overlap, decayed parameters first."""

import math

from hypothesis import given
from hypothesis import strategies as st

from shardlab.models import LayerLayout, Parameter
from shardlab.models.layout import ALIGNMENT, Cut

INDICES = ("out", "in", "deep")
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
layouts = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda given: LayerLayout(
        Parameter(str(i), shape, decayed, INDICES[: len(shape)]) for i, (shape, decayed) in enumerate(given)
    )
)


@given(layouts)
def test_every_parameter_starts_at_a_64_byte_boundary(layout: LayerLayout) -> None:
    assert all(offset * 4 % 64 == 0 for offset in layout.offsets)
    assert layout.numel * 4 % 64 == layout.decayed_numel * 4 % 64 == 0


@given(layouts)
def test_parameters_do_not_overlap_and_fit(layout: LayerLayout) -> None:
    ends = [offset + math.prod(p.shape) for offset, p in zip(layout.offsets, layout.parameters, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*layout.offsets[1:], layout.numel], strict=True))
    assert layout.numel - layout.parameter_count < ALIGNMENT * len(layout.parameters)


@given(layouts)
def test_decayed_parameters_come_first_and_fill_the_front_part(layout: LayerLayout) -> None:
    for offset, parameter in zip(layout.offsets, layout.parameters, strict=True):
        assert parameter.decayed == (offset < layout.decayed_numel)
        if parameter.decayed:
            assert offset + parameter.numel <= layout.decayed_numel


@given(layouts)
def test_the_given_order_is_kept_among_decayed_and_among_others(layout: LayerLayout) -> None:
    for decayed in (True, False):
        names = [int(p.name) for p in layout.parameters if p.decayed == decayed]
        assert names == sorted(names)


@given(layouts, st.integers(1, 70))
def test_a_padded_buffer_splits_into_equal_aligned_slices(layout: LayerLayout, of: int) -> None:
    padded = layout.padded(of)
    assert padded % (of * ALIGNMENT) == 0
    assert 0 <= padded - layout.numel < of * ALIGNMENT


def test_a_layout_with_the_same_parameters_is_equal_and_hashes_alike() -> None:
    parameters = [Parameter("a", (2, 3), True, ("out", "in")), Parameter("b", (2,), False, ("out",))]
    assert LayerLayout(parameters) == LayerLayout(reversed(parameters))
    assert hash(LayerLayout(parameters)) == hash(LayerLayout(reversed(parameters)))


@given(layouts, st.integers(1, 6), st.integers(1, 6))
def test_a_sliced_layers_runs_are_equal_and_split_into_equal_aligned_shards(
    one: LayerLayout, slices: int, shards: int
) -> None:
    layout = LayerLayout(one.parameters, slices)
    assert layout.numel == slices * one.numel == slices * layout.run_numel
    assert layout.offsets == one.offsets
    length = layout.padded(slices * shards)
    assert length == slices * one.padded(shards)
    for start, stop in layout.decayed_runs(length):
        assert start % (length // slices) == 0
        assert stop - start == one.decayed_numel
    assert len(layout.decayed_runs(length)) == slices


def test_a_sliced_parameter_is_a_piece_along_its_indices_and_longer_if_they_do_not_divide() -> None:
    parameter = Parameter("a", (7, 5), True, ("out", "in"))
    assert parameter.sliced({"in": 5}).shape == (7, 1)
    assert parameter.sliced({"out": 2}).shape == (4, 5)
    assert parameter.sliced({"out": 2, "in": 2}).shape == (4, 3)
    assert parameter.sliced({"other": 2, "out": 1}) == parameter


def test_a_parameter_is_cut_along_the_indices_that_have_more_than_one_piece() -> None:
    parameter = Parameter("a", (6, 5), True, ("out", "in"), sections=(4, 2))
    assert parameter.cuts({"in": 5, "out": 2}) == [Cut(0, 2, (4, 2)), Cut(1, 5)]
    assert parameter.cuts({"in": 1, "other": 3}) == []
    assert parameter.sliced({"out": 2}).sections == ()

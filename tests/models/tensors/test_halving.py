"""Whole blocks to sliced half-blocks and back: nothing is lost, and every slice holds what it should."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.models import GPT, MLP, Halves
from shardlab.models.layout import Cut
from shardlab.models.tensors import initial_weights, lengthened, named_views, to_blocks, to_halves, views
from shardlab.models.tensors.halving import joined, sliced

GPT_CUT = GPT(layers=2, width=24, heads=6, kv_heads=2, vocabulary=37, block=8)
WHOLES = [GPT_CUT, MLP(layers=1, width=8, vocabulary=3, block=4), GPT(layers=1, width=8, heads=2, bias=False, block=4)]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("whole", WHOLES, ids=str)
def test_there_and_back_is_the_identity_even_if_runs_are_lengthened(whole: GPT | MLP, slices: int) -> None:
    model = Halves(whole, slices)
    blocks = []
    for block in range(whole.layers):
        layout = whole.layout(block)
        flat = torch.zeros(layout.numel, dtype=torch.int64)
        for view in views(layout, flat):
            view.copy_(torch.randint(1, 2**40, view.shape))
        blocks.append(flat)
    halves = to_halves(model, blocks)
    assert [len(flat) for flat in halves] == [model.layout(layer).numel for layer in range(model.layers)]
    longer = [lengthened(model.layout(i), flat, model.layout(i).padded(6 * slices)) for i, flat in enumerate(halves)]
    for flats in (halves, longer):
        assert sum(int(flat.sum()) for flat in flats) == sum(int(flat.sum()) for flat in blocks)
        assert all(torch.equal(a, b) for a, b in zip(to_blocks(model, flats), blocks, strict=True))


def test_a_slice_has_its_heads_queries_keys_and_values() -> None:
    size = 4
    whole = named_views(GPT_CUT.layout(0), initial_weights(GPT_CUT, 0, 0, torch.float64))["attn.c_attn.weight"]
    q, k, v = whole.split([6 * size, 2 * size, 2 * size])
    model = Halves(GPT_CUT, 2)
    runs = initial_weights(model, 2, 0, torch.float64).chunk(2)
    second = named_views(model.layout(2), runs[1])["attn.c_attn.weight"]
    assert torch.equal(second, torch.cat([q[3 * size :], k[size:], v[size:]]))


def test_padding_of_the_vocabulary_is_zero() -> None:
    model = Halves(GPT_CUT, 2)
    for layer, name in [(0, "wte.weight"), (model.layers - 1, "lm_head.weight")]:
        second = named_views(model.layout(layer), initial_weights(model, layer, 0, torch.float32).chunk(2)[1])[name]
        assert second.shape == (19, 24)
        assert second[:18].all()
        assert not second[18].any()


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 1))
def test_slices_join_to_the_parameter_whether_or_not_it_divides(rows: int, columns: int, of: int, dim: int) -> None:
    whole = torch.arange(rows * columns).view(rows, columns)
    slices = [sliced(whole, Cut(dim), i, of) for i in range(of)]
    assert len({each.shape for each in slices}) == 1
    assert torch.equal(joined(slices, (rows, columns), Cut(dim)), whole)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_sections_are_sliced_each_alone(pieces: list[int], of: int) -> None:
    sections = tuple(of * piece for piece in pieces)
    whole = torch.arange(sum(sections))
    slices = [sliced(whole, Cut(0, sections), i, of) for i in range(of)]
    expected = [torch.cat([part.chunk(of)[i] for part in whole.split(sections)]) for i in range(of)]
    assert all(torch.equal(a, b) for a, b in zip(slices, expected, strict=True))
    assert torch.equal(joined(slices, whole.shape, Cut(0, sections)), whole)

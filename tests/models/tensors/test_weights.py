"""First weights: nanoGPT's, the same in every dtype; and the views of the flat buffer."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.models import GPT, MLP, Blocks, MoE, cut
from shardlab.models.layout import Cut
from shardlab.models.tensors import initial_weights, named_views, pad_runs, parameter_views, to_blocks, to_layers
from shardlab.models.tensors.weights import _put, _take

MODEL = GPT(layers=8, hidden_size=96, vocab_size=300, seq_len=80)


def views_by_name(layer: int, flat: Tensor) -> dict[str, Tensor]:
    layout = MODEL.layout(layer)
    return {p.name: view for p, view in zip(layout.parameters, parameter_views(layout, flat), strict=True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_first_weights_in_any_dtype_are_those_in_double_rounded(dtype: torch.dtype) -> None:
    for layer in (0, 3, 7):
        rounded = initial_weights(MODEL, layer, 5, torch.float64).to(dtype)
        assert torch.equal(initial_weights(MODEL, layer, 5, dtype), rounded)


def test_first_weights_are_a_function_of_seed_and_layer() -> None:
    one = initial_weights(MODEL, 3, 5, torch.float32)
    torch.rand(10)
    assert torch.equal(one, initial_weights(MODEL, 3, 5, torch.float32))
    assert not torch.equal(one, initial_weights(MODEL, 4, 5, torch.float32))
    assert not torch.equal(one, initial_weights(MODEL, 3, 6, torch.float32))


@pytest.mark.parametrize("layer", [0, 3, 7])
def test_first_weights_are_nanogpts(layer: int) -> None:
    for name, weight in views_by_name(layer, initial_weights(MODEL, layer, 0, torch.float32)).items():
        if weight.dim() == 1:
            assert weight.eq(0 if name.endswith("bias") else 1).all(), name
        else:
            deviation = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert weight.std().item() == pytest.approx(deviation, rel=0.05), name
            assert abs(weight.mean().item()) < deviation / 10, name


def test_views_share_the_buffer_and_leave_the_gaps_zero() -> None:
    layout = MODEL.layout(0)
    flat = torch.zeros(layout.padded(7))
    for view in parameter_views(layout, flat):
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        view.fill_(1)
    assert int(flat.sum()) == layout.parameter_count


# Whole blocks to sliced layers and back: nothing is lost, and every slice holds what it should.


GPT_CUT = GPT(layers=2, hidden_size=24, heads=6, kv_heads=2, vocab_size=37, seq_len=8)
WHOLES: list[Blocks] = [
    GPT_CUT,
    MLP(layers=1, hidden_size=8, vocab_size=3, seq_len=4),
    GPT(layers=1, hidden_size=8, heads=2, bias=False, seq_len=4),
    MoE(layers=2, hidden_size=8, heads=2, vocab_size=37, seq_len=4, experts=6, activation="swiglu"),
]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("whole", WHOLES, ids=str)
def test_there_and_back_is_the_identity_even_if_runs_are_lengthened(whole: Blocks, slices: int) -> None:
    model = cut(whole, ep=slices) if isinstance(whole, MoE) else cut(whole, tp=slices)
    blocks: list[Tensor] = []
    for block in range(whole.layers):
        layout = whole.layout(block)
        flat = torch.zeros(layout.numel, dtype=torch.int64)
        for view in parameter_views(layout, flat):
            view.copy_(torch.randint(1, 2**40, view.shape))
        blocks.append(flat)
    layers = to_layers(model, blocks)
    assert [len(flat) for flat in layers] == [model.layout(layer).numel for layer in range(model.layers)]
    longer = [pad_runs(model.layout(i), flat, model.layout(i).padded(6 * slices)) for i, flat in enumerate(layers)]
    for flats in (layers, longer):
        assert sum(int(flat.sum()) for flat in flats) == sum(int(flat.sum()) for flat in blocks)
        assert all(torch.equal(a, b) for a, b in zip(to_blocks(model, flats), blocks, strict=True))


def test_a_slice_has_its_heads_queries_keys_and_values() -> None:
    size = 4
    whole = named_views(GPT_CUT.layout(0), initial_weights(GPT_CUT, 0, 0, torch.float64))["attn.c_attn.weight"]
    q, k, v = torch.split(whole, [6 * size, 2 * size, 2 * size])
    model = cut(GPT_CUT, tp=2)
    runs = initial_weights(model, 2, 0, torch.float64).chunk(2)
    second = named_views(model.layout(2), runs[1])["attn.c_attn.weight"]
    assert torch.equal(second, torch.cat([q[3 * size :], k[size:], v[size:]]))


def test_padding_of_the_vocabulary_is_zero() -> None:
    model = cut(GPT_CUT, tp=2)
    for layer, name in [(0, "wte.weight"), (model.layers - 1, "lm_head.weight")]:
        second = named_views(model.layout(layer), initial_weights(model, layer, 0, torch.float32).chunk(2)[1])[name]
        assert second.shape == (19, 24)
        assert second[:18].all()
        assert not second[18].any()


def pieces_of(whole: Tensor, dim: int, of: int, sections: tuple[int, ...] = ()) -> list[Tensor]:
    """All pieces of a parameter, from places that hold something else; and back, nothing is lost."""
    lengths = sections or (whole.shape[dim],)
    shape = [sum(-(-length // of) for length in lengths) if i == dim else n for i, n in enumerate(whole.shape)]
    pieces = [torch.zeros(shape, dtype=whole.dtype) for _ in range(of)]
    back = torch.full_like(whole, -1)
    for number, piece in enumerate(pieces):
        _take(piece, whole, [(Cut(dim, of, sections), number)])
        _put(back, piece, [(Cut(dim, of, sections), number)])
    assert torch.equal(back, whole)
    return pieces


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), st.integers(0, 1))
def test_slices_join_to_the_parameter_whether_or_not_it_divides(rows: int, columns: int, of: int, dim: int) -> None:
    whole = 1 + torch.arange(rows * columns).view(rows, columns)
    together = torch.cat(pieces_of(whole, dim, of), dim)
    assert torch.equal(together.narrow(dim, 0, whole.shape[dim]), whole)
    assert not together.narrow(dim, whole.shape[dim], together.shape[dim] - whole.shape[dim]).any(), "zeros at the end"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 4))
def test_sections_are_sliced_each_alone(pieces: list[int], of: int) -> None:
    sections = tuple(of * piece for piece in pieces)
    whole = torch.arange(sum(sections))
    expected = [torch.cat([part.chunk(of)[i] for part in torch.split(whole, list(sections))]) for i in range(of)]
    assert all(torch.equal(a, b) for a, b in zip(pieces_of(whole, 0, of, sections), expected, strict=True))


@given(st.integers(1, 4), st.integers(1, 4))
def test_a_parameter_may_be_cut_along_two_dims(rows: int, columns: int) -> None:
    whole = torch.arange(rows * columns * 6).view(rows * 2, columns * 3)
    back = torch.full_like(whole, -1)
    for row, band in enumerate(whole.chunk(rows)):
        for column, expected in enumerate(band.chunk(columns, 1)):
            piece = torch.zeros(2, 3, dtype=whole.dtype)
            cuts = [(Cut(0, rows), row), (Cut(1, columns), column)]
            _take(piece, whole, cuts)
            assert torch.equal(piece, expected)
            _put(back, piece, cuts)
    assert torch.equal(back, whole)

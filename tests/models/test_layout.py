"""A layer's flat buffer: aligned, without overlap, decayed parameters first."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.models import GPT, MLP, Blocks, CutModel, LayerLayout, MoE, Parameter, cut
from shardlab.models.layout import ALIGNMENT, Cut, FusedAttention, Kernel, Matmul, Pointwise
from tests.models.small import Dimensions

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


# What layers ask of a device: the FLOPs that the model declares, whole, in slices, and on the way back.


SMALL: Dimensions = {"layers": 2, "hidden_size": 48, "seq_len": 8, "vocab_size": 32}
GROUPED = GPT(heads=8, kv_heads=4, **SMALL)
DROPPING = GPT(heads=8, kv_heads=4, dropout=0.1, **SMALL)
LLAMA_LIKE = GPT(
    heads=8, kv_heads=4, bias=False, norm="rms", activation="swiglu", ffn_hidden_size=20, rope_theta=1e4, **SMALL
)
MIXTURE = MoE(heads=4, experts=4, activation="swiglu", **SMALL)
MODELS = [GROUPED, DROPPING, LLAMA_LIKE, MLP(ffn_hidden_size=12, **SMALL), MIXTURE]


def flops(kernels: Iterable[Kernel], *kinds: type) -> float:
    return sum(kernel.flops for kernel in kernels if not kinds or isinstance(kernel, kinds))


def elements(kernels: Iterable[Kernel], name: str) -> float:
    return sum(kernel.elements for kernel in kernels if isinstance(kernel, Pointwise) and kernel.name == name)


def sliced(whole: Blocks, slices: int) -> CutModel:
    """The model in layers of which those with experts, or else all bodies, are sliced."""
    return cut(whole, ep=slices) if isinstance(whole, MoE) else cut(whole, tp=slices)


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_matrix_products_are_the_declared_flops_but_that_fused_attention_skips_what_is_masked(whole: Blocks) -> None:
    for layer in range(whole.layers):
        kernels = whole.kernels(layer, 1, whole.seq_len)
        skipped = sum(k.flops * (1 / k.seen - 1) for k in kernels if isinstance(k, FusedAttention))
        assert flops(kernels) + skipped == pytest.approx(whole.forward_flops(layer), rel=1e-12)


@pytest.mark.parametrize("whole", [GROUPED, LLAMA_LIKE], ids=str)
def test_a_causal_token_sees_itself_and_what_came_before(whole: GPT) -> None:
    (attention,) = (k for k in whole.kernels(0, 3, 8) if isinstance(k, FusedAttention))
    pairs = sum(range(1, 9))
    assert attention.flops == pytest.approx(3 * 4 * pairs * whole.hidden_size)
    assert (attention.heads, attention.kv_heads) == (8, 4)


def test_with_dropout_attention_is_three_squares_a_head_and_none_is_skipped() -> None:
    kernels = DROPPING.kernels(1, 2, 8)
    square = 2 * 8 * 8 * 8  # sequences x heads x T x T
    assert not [k for k in kernels if isinstance(k, FusedAttention)]
    assert elements(kernels, "softmax") == 2 * square
    assert elements(kernels, "dropout") == 3 * square
    products = [k for k in kernels if isinstance(k, Matmul) and not k.learned]
    assert [k.flops for k in products] == [2 * square * 6] * 2  # a head has 48 / 8 features
    assert flops(kernels) == 2 * DROPPING.forward_flops(1)


@given(st.sampled_from(MODELS), st.integers(1, 5), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_slices_add_up_to_the_whole(whole: Blocks, sequences: int, tokens: int, slices: int) -> None:
    model = sliced(whole, slices)
    for layer, run in enumerate(model.runs):
        one, whole_of_it = (model.kernels(layer, sequences, tokens, of) for of in (slices, 1))
        shared = slices if run.cut and layer else 1  # look-ups give whole rows
        assert flops(one) * shared == pytest.approx(flops(whole_of_it))
        passes = [sum(k.elements for k in ks if isinstance(k, Pointwise)) for ks in (one, whole_of_it)]
        assert passes[0] * shared == pytest.approx(passes[1])


@given(st.booleans(), st.integers(1, 5), st.integers(1, 8), st.sampled_from([1, 2, 4]))
def test_columns_add_up_to_the_matrices_of_half_blocks(bias: bool, sequences: int, tokens: int, slices: int) -> None:
    whole = MLP(ffn_hidden_size=12, bias=bias, **SMALL)
    halves, model = cut(whole), cut(whole, tp=slices, columns=True)
    norms, matrices = list[Kernel](), list[Kernel]()
    for layer, run in enumerate(model.runs):
        made = model.kernels(layer, sequences, tokens, slices)
        (matrices if run.cut else norms).extend(made)
    apart = [k for layer in range(halves.layers) for k in halves.kernels(layer, sequences, tokens)]
    assert slices * flops(matrices) == pytest.approx(flops(apart))
    both = [sum(k.elements for k in ks if isinstance(k, Pointwise)) for ks in (matrices, norms, apart)]
    assert slices * both[0] + both[1] == pytest.approx(both[2])
    backs = [[back for k in ks for back in k.backward_input()] for ks in (matrices, norms, apart)]
    moved = [sum(k.elements for k in ks if isinstance(k, Pointwise)) for ks in backs]
    assert slices * moved[0] + moved[1] == pytest.approx(moved[2])


@given(st.sampled_from(MODELS), st.integers(1, 3))
def test_half_blocks_ask_for_what_whole_blocks_do(whole: Blocks, sequences: int) -> None:
    """All but the bodies' last biases, which half-blocks add in a pass of their own, and the first residual."""
    model = sliced(whole, 1)
    together = [k for layer in range(model.layers) for k in model.kernels(layer, sequences, 8)]
    apart = [k for layer in range(whole.layers) for k in whole.kernels(layer, sequences, 8)]
    assert flops(together) == pytest.approx(flops(apart))
    others = [[k for k in ks if isinstance(k, Pointwise) and k.name != "bias"] for ks in (together, apart)]
    assert sorted(others[0]) == sorted(others[1])


@pytest.mark.parametrize("whole", [GROUPED, DROPPING, LLAMA_LIKE], ids=str)
def test_attention_between_layers_is_what_a_body_asks_for_less_its_maps(whole: GPT) -> None:
    body, model = cut(whole), cut(whole, attention_apart=True)
    project = next(layer for layer, its in enumerate(model.signatures) if its.projects)
    mixing = model.attend_kernels(project, 2, 8, 8, 9 / 16)
    apart = (*model.kernels(project, 2, 8), *mixing, *model.kernels(project + 1, 2, 8))
    assert apart == body.kernels(2, 2, 8)
    ring = [model.attend_kernels(project, 2, 4, 4, seen) for seen in (5 / 8, 1.0, 5 / 8)]  # two ranks, three blocks
    if not whole.dropout:
        assert sum(map(flops, ring)) == pytest.approx(flops(mixing))


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_the_way_back_takes_twice_the_products_and_fused_attention_two_and_a_half_times(whole: Blocks) -> None:
    for layer in range(whole.layers):
        forward = whole.kernels(layer, 2, 8)
        of_input = [made for kernel in forward for made in kernel.backward_input()]
        of_weight = [made for kernel in forward for made in kernel.backward_weight()]
        assert flops([*of_input, *of_weight], Matmul) == 2 * flops(forward, Matmul)
        assert flops(of_input, FusedAttention) == 2.5 * flops(forward, FusedAttention)
        learned = [k for k in forward if isinstance(k, Matmul) and k.learned]
        assert flops(of_weight) == flops(learned)


def test_the_gradients_of_what_is_looked_up_are_left_to_the_second_half() -> None:
    forward = GROUPED.kernels(0, 2, 8)
    of_input = [made.name for k in forward for made in k.backward_input() if isinstance(made, Pointwise)]
    of_weight = [made.name for k in forward for made in k.backward_weight() if isinstance(made, Pointwise)]
    assert {"embedding", "positions"} <= set(of_weight)
    assert not set(of_input) & set(of_weight)


def test_a_bias_is_added_by_its_product_and_its_gradient_is_a_sum_over_rows() -> None:
    product = Matmul(30, 7, 5, bias=True)
    assert product.elements == Matmul(30, 7, 5).elements
    assert product.backward_weight() == (Matmul(5, 7, 30, backward=True), Pointwise("bias", 210.0, 0.0, backward=True))
    assert product.backward_input() == (Matmul(30, 5, 7, backward=True),)
    biased = [GPT(bias=bias, **SMALL).kernels(1, 1, 8) for bias in (True, False)]
    sums = [elements([made for k in ks for made in k.backward_weight()], "bias") for ks in biased]
    maps = (GROUPED.hidden_size * 3, GROUPED.hidden_size, 4 * GROUPED.hidden_size, GROUPED.hidden_size)
    assert sums == [8 * sum(maps), 0]


def test_experts_compute_on_full_buffers() -> None:
    capped, dropless = (
        cut(MoE(heads=4, experts=4, top_k=2, capacity_factor=factor, **SMALL)).kernels(1, 3, 8)
        for factor in (1.0, None)
    )
    assert [(k.batch, k.m) for k in capped if isinstance(k, Matmul)] == [(4, 3 * 8 * 2 // 4)] * 2
    assert flops(dropless) == 2 * flops(capped)


@given(st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_the_loss_reads_every_logit_of_its_slice(sequences: int, slices: int) -> None:
    model = cut(replace(GPT(heads=4, **SMALL), vocab_size=30), tp=slices)
    (kernel,) = model.loss_kernels(sequences, 8, slices)
    assert kernel.elements * slices == sequences * 8 * math.ceil(30 / slices) * slices

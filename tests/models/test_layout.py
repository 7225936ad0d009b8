"""A layer's flat buffer: aligned, without overlap, decayed parameters first."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from shardlab.common.errors import UserError
from shardlab.models import GPT, MLP, Blocks, CutModel, LayerLayout, Llama, Model, MoE, Parameter, cut
from shardlab.models.layout import ALIGNMENT, Cut, FusedAttention, Kernel, Matmul, Pointwise
from shardlab.models.primitives import Norm
from shardlab.models.tensors import Dropout, Share, initial_weights, make_layers, parameter_views, to_blocks, to_layers
from tests.models.conftest import inputs_of, piece_of
from tests.models.small import Dimensions
from tests.support.thorough import sampled

INDICES = ("out", "in", "deep")
shapes = st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple)
layouts = st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12).map(
    lambda parameters: LayerLayout(
        Parameter(str(i), shape, decayed, INDICES[: len(shape)]) for i, (shape, decayed) in enumerate(parameters)
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


def test_a_layout_with_the_same_parameters_is_equal_and_has_the_same_hash() -> None:
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


# Kernels of layers: the FLOPs that the model declares, whole, in slices, and in the backward pass.


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
        kernels = model.kernels(layer, sequences, tokens, slices)
        (matrices if run.cut else norms).extend(kernels)
    apart = [k for layer in range(halves.layers) for k in halves.kernels(layer, sequences, tokens)]
    assert slices * flops(matrices) == pytest.approx(flops(apart))
    forward_elements = [sum(k.elements for k in ks if isinstance(k, Pointwise)) for ks in (matrices, norms, apart)]
    assert slices * forward_elements[0] + forward_elements[1] == pytest.approx(forward_elements[2])
    backs = [[back for k in ks for back in k.backward_input()] for ks in (matrices, norms, apart)]
    backward_elements = [sum(k.elements for k in ks if isinstance(k, Pointwise)) for ks in backs]
    assert slices * backward_elements[0] + backward_elements[1] == pytest.approx(backward_elements[2])


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
    project = next(layer for layer, signature in enumerate(model.signatures) if signature.projects)
    mixing = model.attend_kernels(project, 2, 8, 8, 9 / 16)
    apart = (*model.kernels(project, 2, 8), *mixing, *model.kernels(project + 1, 2, 8))
    assert apart == body.kernels(2, 2, 8)
    ring = [
        model.attend_kernels(project, 2, 4, 4, visible) for visible in (5 / 8, 1.0, 5 / 8)
    ]  # two ranks, three blocks
    if not whole.dropout:
        assert sum(map(flops, ring)) == pytest.approx(flops(mixing))


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_the_way_back_takes_twice_the_products_and_fused_attention_two_and_a_half_times(whole: Blocks) -> None:
    for layer in range(whole.layers):
        forward = whole.kernels(layer, 2, 8)
        of_input = [back for kernel in forward for back in kernel.backward_input()]
        of_weight = [back for kernel in forward for back in kernel.backward_weight()]
        assert flops([*of_input, *of_weight], Matmul) == 2 * flops(forward, Matmul)
        assert flops(of_input, FusedAttention) == 2.5 * flops(forward, FusedAttention)
        learned = [k for k in forward if isinstance(k, Matmul) and k.learned]
        assert flops(of_weight) == flops(learned)


def test_the_gradients_of_what_is_looked_up_are_left_to_the_second_half() -> None:
    forward = GROUPED.kernels(0, 2, 8)
    of_input = [back.name for k in forward for back in k.backward_input() if isinstance(back, Pointwise)]
    of_weight = [back.name for k in forward for back in k.backward_weight() if isinstance(back, Pointwise)]
    assert {"embedding", "positions"} <= set(of_weight)
    assert not set(of_input) & set(of_weight)


def test_a_bias_is_added_by_its_product_and_its_gradient_is_a_sum_over_rows() -> None:
    product = Matmul(30, 7, 5, bias=True)
    assert product.elements == Matmul(30, 7, 5).elements
    weight = Matmul(5, 7, 30, backward=True, of_weight=True)
    assert product.backward_weight() == (weight, Pointwise("bias", 210.0, 0.0, backward=True))
    assert product.backward_input() == (Matmul(30, 5, 7, backward=True),)
    biased = [GPT(bias=bias, **SMALL).kernels(1, 1, 8) for bias in (True, False)]
    sums = [elements([back for k in ks for back in k.backward_weight()], "bias") for ks in biased]
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


# An MLP cut by columns: its layers, what autograd keeps for them, and what cannot be cut.


CUT_SMALL = MLP(layers=2, hidden_size=16, seq_len=8, vocab_size=30, ffn_hidden_size=20)


def test_every_matrix_is_a_layer_and_norms_lie_between_blocks() -> None:
    model = cut(CUT_SMALL, tp=2, columns=True)
    indices = [("width",), (), ("ffn",), ("width",), (), ("ffn",), ("width",), (), ("vocab",)]
    assert [run.cut for run in model.runs] == indices
    assert [layer.cut for layer in model.signatures] == indices
    assert [layer.carries for layer in model.signatures] == [not index for index in indices]
    takes_own = [any(node.takes_own for node in layer.nodes) for layer in model.signatures]
    assert takes_own == [bool(index) for index in indices]
    names = [[p.name for p in model.layout(layer).parameters] for layer in (0, 2, 3, 8)]
    assert names == [["wte.weight"], ["mlp.c_fc.weight", "mlp.c_fc.bias"], ["mlp.c_proj.weight"], ["lm_head.weight"]]
    assert [model.layout(layer).parameters[0].shape for layer in (0, 2, 3)] == [(30, 8), (10, 16), (8, 20)]


def test_copies_between_whole_and_cut_are_exact() -> None:
    model = cut(CUT_SMALL, tp=4, columns=True)
    wholes = [torch.zeros(CUT_SMALL.layout(block).numel) for block in range(2)]
    for block, flat in enumerate(wholes):
        layout = CUT_SMALL.layout(block)
        for parameter, offset in zip(layout.parameters, layout.offsets, strict=True):
            flat[offset : offset + parameter.numel] = torch.randn(parameter.numel)
    assert all(map(torch.equal, to_blocks(model, to_layers(model, wholes)), wholes))


@pytest.mark.parametrize("slices", [1, 2])
def test_autograd_keeps_exactly_the_declared_elements(slices: int, saved_bytes: Callable[..., int]) -> None:
    model = cut(CUT_SMALL, tp=slices, columns=True)
    for layer in range(model.layers):
        if model.run(layer).cut:
            measured = sum(
                saved_bytes(model, layer, 3, torch.float64, piece_of(model, layer, s)) for s in range(slices)
            )
            assert measured == 3 * model.run(layer).saved(1) * 8, layer


def test_the_arithmetic_is_the_whole_models() -> None:
    model = cut(CUT_SMALL, tp=2, columns=True)
    assert sum(map(model.forward_flops, range(model.layers))) == sum(
        map(CUT_SMALL.forward_flops, range(CUT_SMALL.layers))
    )
    features = [model.activation_shape(index)[1:] for index in (1, 2, 3, 4, 9)]
    assert features == [(8, 16), (8, 16), (8, 20), (8, 16), (8, 30)]


def test_a_model_with_more_than_mlps_is_refused() -> None:
    with pytest.raises(UserError, match="but GPT has more than MLPs; train an MLP"):
        cut(GPT(), tp=2, columns=True)


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"20 hidden features do not divide into 8 .* \(remainder 4\)"):
        cut(CUT_SMALL, tp=8, columns=True)


# Half-blocks: their layers, layouts and bytes, and which models cannot be cut.


HALVES_SMALL: Dimensions = {"layers": 2, "hidden_size": 48, "seq_len": 8, "vocab_size": 30}
HALVES_MODELS = [
    GPT(heads=4, **HALVES_SMALL),
    GPT(heads=4, dropout=0.1, bias=False, **HALVES_SMALL),
    GPT(heads=6, kv_heads=2, **HALVES_SMALL),
    GPT(heads=6, kv_heads=2, dropout=0.1, **HALVES_SMALL),
    MLP(ffn_hidden_size=10, **HALVES_SMALL),
    MLP(ffn_hidden_size=10, dropout=0.1, **HALVES_SMALL),
    GPT(heads=4, tied=True, **HALVES_SMALL),
    Llama(heads=4, kv_heads=2, tied=True, **HALVES_SMALL),
    Llama(heads=4, kv_heads=2, dropout=0.1, **HALVES_SMALL),
    GPT(heads=4, activation="squared_relu", rope_theta=1e4, **HALVES_SMALL),
]


def test_bodies_and_norms_take_turns_from_the_embedding_to_the_head() -> None:
    assert cut(GPT(layers=3)).layers == 4 * 3 + 3
    assert cut(MLP(layers=3)).layers == 2 * 3 + 3
    model = cut(GPT(layers=1))
    indices = [("vocab",), (), ("head",), (), ("ffn",), (), ("vocab",)]
    assert [run.cut for run in model.runs] == indices
    assert [layer.cut for layer in model.signatures] == indices
    assert [isinstance(run.steps[-1].primitive, Norm) for run in model.runs] == [not index for index in indices]
    assert [layer.carries for layer in model.signatures] == [not index for index in indices]
    assert [run.cut for run in GPT(layers=2).runs] == [(), ()]
    assert not any(layer.cut or layer.carries for layer in GPT(layers=2).signatures)


def test_bodies_hold_what_is_sliced_and_norms_the_rest() -> None:
    model = cut(GPT(layers=1))
    names = [{p.name for p in model.layout(layer).parameters} for layer in range(model.layers)]
    assert names == [
        {"wte.weight"},
        {"wpe.weight", "ln_1.weight", "ln_1.bias"},
        {"attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight"},
        {"attn.c_proj.bias", "ln_2.weight", "ln_2.bias"},
        {"mlp.c_fc.weight", "mlp.c_fc.bias", "mlp.c_proj.weight"},
        {"mlp.c_proj.bias", "ln_f.weight", "ln_f.bias"},
        {"lm_head.weight"},
    ]


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("whole", HALVES_MODELS, ids=str)
def test_every_parameter_of_the_model_is_in_one_half_block(whole: Blocks, slices: int) -> None:
    model = cut(whole, tp=slices)
    sources = [(block, p.name) for layer in range(model.layers) for block, p in model.run(layer).parameters()]
    expected = [(block, p.name) for block in range(whole.layers) for p in whole.layout(block).parameters]
    assert sorted(sources) == sorted(expected)
    assert model.parameter_count == whole.parameter_count
    assert sum(model.layout(layer).parameter_count for layer in range(model.layers)) == whole.parameter_count


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    model = cut(GPT(layers=1, vocab_size=30), tp=4)
    assert model.vocab_size == 30
    assert model.logits == 32
    assert [model.first_token(slice) for slice in range(4)] == [0, 8, 16, 24]
    assert model.activation_shape(model.layers) == (1, 64, 32)
    assert model.layout(0).parameters[0].shape == (8, 64)


@pytest.mark.parametrize(
    ("dtype", "slices"),
    sampled(product((torch.float32, torch.float64), (1, 2)), [(torch.float32, 2), (torch.float64, 1)].__contains__),
)
@pytest.mark.parametrize("whole", HALVES_MODELS, ids=str)
def test_autograd_keeps_exactly_the_declared_elements_in_halves(
    whole: Blocks, dtype: torch.dtype, slices: int, saved_bytes: Callable[..., int]
) -> None:
    model = cut(whole, tp=slices)
    for layer, run in enumerate(model.runs):
        if run.cut:
            measured = [saved_bytes(model, layer, 3, dtype, piece_of(model, layer, i)) for i in range(slices)]
        else:
            measured = [saved_bytes(model, layer, 3, dtype, Share(tokens=part)) for part in (range(3), range(3, 8))]
        assert sum(measured) == 3 * model.run(layer).saved(1) * dtype.itemsize
        if run.cut:
            assert len(set(measured)) == 1


@pytest.mark.parametrize("whole", [HALVES_MODELS[1], HALVES_MODELS[3], HALVES_MODELS[4], HALVES_MODELS[8]], ids=str)
def test_flops_are_those_that_torch_counts_over_all_slices(whole: Blocks) -> None:
    model = cut(whole, tp=2)
    for layer, compute in enumerate(make_layers(model)):
        slices = model.layout(layer).slices
        parameters = parameter_views(model.layout(layer), initial_weights(model, layer, 0, torch.float32))
        with FlopCounterMode(display=False) as counter:
            inputs = inputs_of(model, layer, 1, torch.float32)
            compute.run(parameters, inputs, piece_of(model, layer, 0), Dropout(whole.dropout, 0, 0, 0, (0,)))
        assert slices * counter.get_total_flops() == model.forward_flops(layer)
    assert sum(model.forward_flops(layer) for layer in range(model.layers)) == sum(
        whole.forward_flops(block) for block in range(whole.layers)
    )


def test_sizes_count_all_slices_and_the_residual_stream() -> None:
    model = cut(GPT(heads=4, **HALVES_SMALL), tp=4)
    sizes = model.sizes(rows=3, element_bytes=4)
    assert sizes.signatures == model.signatures
    assert sizes.residual == 3 * 8 * 48
    assert sizes.weights == tuple(model.layout(layer).numel for layer in range(model.layers))
    assert sizes.weights[2] == 4 * model.layout(2).run_numel
    assert sizes.activations == (3 * 8, *[3 * 8 * 48] * (model.layers - 1), 3 * 8 * 32)
    assert GPT().sizes(rows=3, element_bytes=4).residual == 0


@pytest.mark.parametrize("layers", [1, 3])
def test_a_tied_head_has_no_weight_of_its_own(layers: int) -> None:
    model = cut(GPT(layers=layers, tied=True), tp=2)
    last = model.layers - 1
    sizes = model.sizes(rows=1, element_bytes=4)
    assert sizes.tied
    assert (sizes.weights[last], sizes.opt_states[last], sizes.weight_of(last)) == (0, 0, 0)
    assert [layer for layer in range(model.layers) if model.borrowed(layer)] == [last]
    untied = cut(GPT(layers=layers), tp=2).sizes(rows=1, element_bytes=4)
    assert not untied.tied
    assert untied.weight_of(last) == last
    assert sum(sizes.weights) == sum(untied.weights) - untied.weights[last]


def test_a_process_receives_the_model_that_another_sent() -> None:
    model = cut(GPT(), tp=2)
    assert model.run(3) == pickle.loads(pickle.dumps(model)).run(3)
    assert {pickle.loads(pickle.dumps(model))} == {model} != {cut(GPT(), tp=4)}


@pytest.mark.parametrize(
    ("whole", "slices", "sentence"),
    [
        (GPT(heads=4), 3, "4 heads do not divide into 3 tensor-parallel slices (remainder 1); choose heads"),
        (GPT(heads=4, kv_heads=2), 4, "2 key/value heads do not divide into 4 tensor-parallel slices (remainder 2)"),
        (MLP(ffn_hidden_size=10), 4, "10 hidden features do not divide into 4 tensor-parallel slices (remainder 2)"),
        (GPT(), 0, "cut into 0 x 1 slices (tp x ep); give at least 1 of each"),
    ],
    ids=str,
)
def test_uncuttable_models_are_refused_in_a_sentence(whole: Any, slices: int, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        cut(whole, tp=slices)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


# Models cut for context parallelism: their layers, and what autograd keeps for them.


CONTEXT_SMALL: Dimensions = {"layers": 2, "hidden_size": 48, "seq_len": 8, "vocab_size": 30}
CONTEXT_MODELS = [
    GPT(heads=4, **CONTEXT_SMALL),
    GPT(heads=6, kv_heads=2, bias=False, **CONTEXT_SMALL),
    GPT(heads=4, dropout=0.1, **CONTEXT_SMALL),
    MLP(ffn_hidden_size=10, **CONTEXT_SMALL),
    Llama(heads=4, kv_heads=2, **CONTEXT_SMALL),
]


def test_an_attention_is_two_layers_with_an_op_between_them() -> None:
    model = cut(GPT(layers=1), attention_apart=True)
    names = [{p.name for p in model.layout(layer).parameters} for layer in range(model.layers)]
    assert names[2:5] == [
        {"attn.c_attn.weight", "attn.c_attn.bias"},
        {"attn.c_proj.weight"},
        {"attn.c_proj.bias", "ln_2.weight", "ln_2.bias"},
    ]
    assert [layer.cut for layer in model.signatures[1:5]] == [(), ("head",), ("head",), ()]
    assert [layer.carries for layer in model.signatures[1:5]] == [True, False, False, True]
    assert [layer for layer, signature in enumerate(model.signatures) if signature.projects] == [2]
    assert not any(layer.projects for layer in cut(MLP(layers=3), attention_apart=True).signatures)


@pytest.mark.parametrize("whole", CONTEXT_MODELS, ids=str)
def test_every_parameter_is_in_one_layer_and_the_arithmetic_is_the_same(whole: Blocks) -> None:
    model = cut(whole, attention_apart=True)
    sources = [(block, p.name) for layer in range(model.layers) for block, p in model.run(layer).parameters()]
    assert sorted(sources) == sorted((b, p.name) for b in range(whole.layers) for p in whole.layout(b).parameters)
    products = 4 * whole.seq_len**2 * whole.hidden_size * whole.layers if isinstance(whole, GPT) else 0
    assert sum(map(model.forward_flops, range(model.layers))) + products == sum(
        map(whole.forward_flops, range(whole.layers))
    )


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("whole", CONTEXT_MODELS, ids=str)
def test_autograd_keeps_exactly_the_declared_elements_in_context(
    whole: Blocks, slices: int, saved_bytes: Callable[..., int]
) -> None:
    model = cut(whole, tp=slices, attention_apart=True)
    for layer in range(model.layers):
        shares = [Share(tokens=part) for part in ([0, 1, 6, 7], [2, 3, 4, 5])]
        if model.run(layer).cut:
            shares = [piece_of(model, layer, number) for number in range(slices)]
        measured = sum(saved_bytes(model, layer, 3, torch.float64, share) for share in shares)
        assert measured == 3 * model.run(layer).saved(1) * 8, layer


def test_heads_and_sequences_may_both_be_cut() -> None:
    model = cut(GPT(layers=1, heads=4, hidden_size=48), tp=4, attention_apart=True)
    assert [model.layout(layer).slices for layer in range(2, 5)] == [4, 4, 1]


def test_sizes_count_queries_keys_and_values_and_the_log_sum_exp() -> None:
    sizes = cut(GPT(heads=6, kv_heads=2, **CONTEXT_SMALL), attention_apart=True).sizes(rows=3, element_bytes=4)
    assert sizes.queries == 3 * 8 * 48
    assert sizes.keys_values == 3 * 8 * 2 * 16
    assert sizes.activations[3] == 3 * 8 * (48 + 6)
    assert GPT().sizes(rows=3, element_bytes=4).queries == 0


# Layers of a program are named by their place in the model.


def places(model: Model) -> list[str]:
    return [model.place(layer) for layer in range(model.layers)]


def test_whole_blocks_are_numbered() -> None:
    assert places(GPT(layers=2)) == ["block 0", "block 1"]


def test_half_blocks_are_named_by_block_and_part() -> None:
    assert places(cut(GPT(layers=1))) == [
        "embedding",
        "norm of block 0, attention",
        "block 0, attention",
        "norm of block 0, feed-forward",
        "block 0, feed-forward",
        "norm of head",
        "head",
    ]


def test_an_attention_that_is_cut_in_two_has_two_places() -> None:
    output = places(cut(GPT(layers=1), attention_apart=True))
    assert output[2:4] == ["block 0, attention's queries, keys and values", "block 0, attention's output"]


def test_experts_lie_between_what_is_dense() -> None:
    assert places(cut(MoE(layers=1))) == ["block 0, attention", "block 0, experts", "head"]

"""Half-blocks: their layers, layouts and bytes, and which models cannot be cut."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardlab.common.errors import UserError
from shardlab.models import GPT, MLP, Blocks, Llama, cut
from shardlab.models.primitives import Norm
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, views
from tests.models.conftest import inputs_of, piece_of
from tests.models.small import Dimensions

SMALL: Dimensions = {"layers": 2, "hidden_size": 48, "seq_len": 8, "vocab_size": 30}
MODELS = [
    GPT(heads=4, **SMALL),
    GPT(heads=4, dropout=0.1, bias=False, **SMALL),
    GPT(heads=6, kv_heads=2, **SMALL),
    GPT(heads=6, kv_heads=2, dropout=0.1, **SMALL),
    MLP(ffn_hidden_size=10, **SMALL),
    MLP(ffn_hidden_size=10, dropout=0.1, **SMALL),
    GPT(heads=4, tied=True, **SMALL),
    Llama(heads=4, kv_heads=2, tied=True, **SMALL),
    Llama(heads=4, kv_heads=2, dropout=0.1, **SMALL),
    GPT(heads=4, activation="squared_relu", rope_theta=1e4, **SMALL),
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
@pytest.mark.parametrize("whole", MODELS, ids=str)
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


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_autograd_keeps_exactly_the_declared_elements(
    whole: Blocks, dtype: torch.dtype, slices: int, saved_bytes: Callable[..., int]
) -> None:
    model = cut(whole, tp=slices)
    for layer, run in enumerate(model.runs):
        if run.cut:
            kept = [saved_bytes(model, layer, 3, dtype, piece_of(model, layer, i)) for i in range(slices)]
        else:
            kept = [saved_bytes(model, layer, 3, dtype, Share(tokens=part)) for part in (range(3), range(3, 8))]
        assert sum(kept) == 3 * model.saved_elements(layer) * dtype.itemsize
        if run.cut:
            assert len(set(kept)) == 1


@pytest.mark.parametrize("whole", [MODELS[1], MODELS[3], MODELS[4], MODELS[8]], ids=str)
def test_flops_are_those_that_torch_counts_over_all_slices(whole: Blocks) -> None:
    model = cut(whole, tp=2)
    for layer, compute in enumerate(layers_of(model)):
        slices = model.layout(layer).slices
        parameters = views(model.layout(layer), initial_weights(model, layer, 0, torch.float32))
        with FlopCounterMode(display=False) as counter:
            inputs = inputs_of(model, layer, 1, torch.float32)
            compute.run(parameters, inputs, piece_of(model, layer, 0), Dropout(whole.dropout, 0, 0, 0, (0,)))
        assert slices * counter.get_total_flops() == model.forward_flops(layer)
    assert sum(model.forward_flops(layer) for layer in range(model.layers)) == sum(
        whole.forward_flops(block) for block in range(whole.layers)
    )


def test_sizes_count_all_slices_and_the_residual_stream() -> None:
    model = cut(GPT(heads=4, **SMALL), tp=4)
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
def test_what_cannot_be_cut_is_refused_with_a_sentence(whole: Any, slices: int, sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        cut(whole, tp=slices)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)

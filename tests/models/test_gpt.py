"""The GPT's shapes, FLOPs and bytes, and what it refuses."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from shardlab.errors import UserError
from shardlab.models import GPT, Llama, Model
from shardlab.models.tensors import Dropout, initial_weights, layers_of, views
from shardlab.rules.kind import Kind

Measure = Callable[[Model, int, int, torch.dtype], int]


def test_the_models_come_without_torch() -> None:
    script = "import sys, shardlab.models; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_it_has_as_many_parameters_as_gpt_2_with_a_head_of_its_own() -> None:
    gpt_2 = GPT(layers=12, heads=12, hidden_size=768, vocab_size=50257, seq_len=1024)
    assert gpt_2.parameter_count == 124_439_808 + 50257 * 768


def test_a_tied_head_has_no_matrix() -> None:
    untied, tied = GPT(layers=1), GPT(layers=1, tied=True)
    assert untied.parameter_count - tied.parameter_count == tied.vocab_size * tied.hidden_size


def test_matrices_and_embeddings_are_decayed_biases_and_norms_are_not() -> None:
    for layer in range(3):
        for parameter in GPT(layers=3).layout(layer).parameters:
            assert parameter.decayed == (len(parameter.shape) == 2), parameter.name


def test_without_bias_there_is_none() -> None:
    assert not [p.name for p in GPT(layers=1, bias=False).layout(0).parameters if p.name.endswith("bias")]


def test_embedding_and_head_belong_to_the_first_and_the_last_layer() -> None:
    names = [{p.name for p in GPT(layers=3).layout(layer).parameters} for layer in range(3)]
    assert names[0] - names[1] == {"wte.weight", "wpe.weight"}
    assert names[2] - names[1] == {"ln_f.weight", "ln_f.bias", "lm_head.weight"}
    assert {p.name for p in GPT(layers=1).layout(0).parameters} == names[0] | names[2]


def test_activations_go_from_tokens_to_logits() -> None:
    model = GPT(layers=2, hidden_size=32, heads=2, vocab_size=100, seq_len=16)
    assert [model.activation_shape(i, 3) for i in range(3)] == [(3, 16), (3, 16, 32), (3, 16, 100)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "model",
    [
        GPT(layers=3),
        GPT(layers=1, tied=True, bias=False),
        GPT(layers=3, dropout=0.1),
        GPT(layers=1, heads=1, dropout=0.1),
        GPT(layers=2, heads=3, hidden_size=48, seq_len=7, vocab_size=30),
        GPT(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30),
        GPT(layers=1, heads=6, kv_heads=1, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1),
        GPT(layers=2, activation="squared_relu", rope_theta=1e4, ffn_hidden_size=100),
        Llama(layers=3),
        Llama(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30, ffn_hidden_size=100),
        Llama(layers=2, heads=6, kv_heads=2, hidden_size=48, seq_len=7, vocab_size=30, dropout=0.1),
    ],
    ids=str,
)
def test_autograd_keeps_exactly_the_declared_elements(
    model: GPT, rows: int, dtype: torch.dtype, saved_bytes: Measure
) -> None:
    for layer in range(model.layers):
        assert saved_bytes(model, layer, rows, dtype) == rows * model.saved_elements(layer) * dtype.itemsize


def test_in_half_precision_only_the_log_sum_exp_counts_twice(saved_bytes: Measure) -> None:
    model = GPT(layers=3)
    for layer in range(model.layers):
        elements = model.saved_elements(layer) + model.heads * model.seq_len
        assert saved_bytes(model, layer, 2, torch.bfloat16) == 2 * elements * 2


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_flops_are_those_that_torch_counts(kv_heads: int | None) -> None:
    """Counted by torch's own FLOP counter on plain attention, which does the whole T x T square."""
    model = GPT(layers=3, hidden_size=32, heads=2, kv_heads=kv_heads, vocab_size=100, seq_len=16)
    for layer, compute in enumerate(layers_of(model)):
        shape = model.activation_shape(layer)
        x = torch.zeros(shape, dtype=torch.int64) if layer == 0 else torch.zeros(shape)
        parameters = views(model.layout(layer), initial_weights(model, layer, 0, torch.float32))
        with FlopCounterMode(display=False) as counter:
            compute(parameters, x, Dropout(0.5, 0, 0, layer, (0,)))
        assert counter.get_total_flops() == model.forward_flops(layer)


def test_sizes_count_whole_layers_and_microbatches() -> None:
    model = GPT(layers=2, hidden_size=32, heads=2, vocab_size=100, seq_len=16)
    sizes = model.sizes(rows=3, element_bytes=8)
    assert sizes.layers == 2
    assert sizes.weights == tuple(model.layout(layer).numel for layer in range(2))
    assert sizes.opt_states == tuple(2 * elements for elements in sizes.weights)
    assert sizes.activations == (3 * 16, 3 * 16 * 32, 3 * 16 * 100)
    assert sizes.saved == tuple(3 * model.saved_elements(layer) for layer in range(2))
    assert sizes.element_bytes == dict.fromkeys(Kind, 8)


def test_it_is_frozen_and_hashable() -> None:
    model: Any = GPT()
    assert hash(model) == hash(replace(model))
    with pytest.raises(FrozenInstanceError):
        model.layers = 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"hidden_size": 65}, "hidden_size 65 does not divide by 4 heads (remainder 1)"),
        ({"layers": 0}, "layers is 0; a model needs at least 1"),
        ({"heads": -1}, "heads is -1"),
        ({"kv_heads": 0}, "kv_heads is 0; a model needs at least 1"),
        ({"kv_heads": 3}, "4 heads cannot share 3 key/value heads evenly (remainder 1)"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"seq_len": 0}, "seq_len is 0"),
        ({"dropout": 1.0}, "dropout is 1.0; it is a probability"),
        ({"dropout": -0.1}, "dropout is -0.1"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size is 0; a model needs at least 1"),
        ({"activation": "tanh"}, "activation is 'tanh'; choose one of gelu, gelu_tanh, squared_relu, swiglu"),
        ({"norm": "batch"}, "norm is 'batch'; choose layer or rms"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0; the base of the rotary angles is a positive number"),
        ({"rope_theta": 1e4, "hidden_size": 12}, "rotary positions turn pairs of features, but a head has 3"),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        GPT(**fields)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_tied_head_in_another_block_borrows_the_embedding() -> None:
    model = GPT(layers=3, tied=True)
    assert [model.borrowed(layer) for layer in range(3)] == [(), (), ("wte.weight",)]
    assert GPT(layers=3).parameter_count - model.parameter_count == model.vocab_size * model.hidden_size
    assert GPT(layers=1, tied=True).borrowed(0) == ()


def test_programs_of_whole_blocks_do_not_share_a_weight() -> None:
    with pytest.raises(UserError, match="set layers to 1, or leave the embeddings untied"):
        GPT(tied=True).sizes(rows=1, element_bytes=4)


def test_an_empty_microbatch_is_refused() -> None:
    with pytest.raises(UserError, match="a microbatch of 0 sequences is empty"):
        GPT().sizes(rows=0, element_bytes=4)

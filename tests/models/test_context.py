"""Models cut for context parallelism: their layers, and what autograd keeps for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.models import GPT, MLP, Blocks, Llama, cut
from shardlab.models.tensors import Share
from tests.models.conftest import piece_of
from tests.models.small import Dimensions

SMALL: Dimensions = {"layers": 2, "hidden_size": 48, "seq_len": 8, "vocab_size": 30}
MODELS = [
    GPT(heads=4, **SMALL),
    GPT(heads=6, kv_heads=2, bias=False, **SMALL),
    GPT(heads=4, dropout=0.1, **SMALL),
    MLP(ffn_hidden_size=10, **SMALL),
    Llama(heads=4, kv_heads=2, **SMALL),
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
    assert [layer for layer, its in enumerate(model.signatures) if its.projects] == [2]
    assert not any(layer.projects for layer in cut(MLP(layers=3), attention_apart=True).signatures)


@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_every_parameter_is_in_one_layer_and_the_arithmetic_is_the_same(whole: Blocks) -> None:
    model = cut(whole, attention_apart=True)
    sources = [(block, p.name) for layer in range(model.layers) for block, p in model.run(layer).parameters()]
    assert sorted(sources) == sorted((b, p.name) for b in range(whole.layers) for p in whole.layout(b).parameters)
    products = 4 * whole.seq_len**2 * whole.hidden_size * whole.layers if isinstance(whole, GPT) else 0
    assert sum(map(model.forward_flops, range(model.layers))) + products == sum(
        map(whole.forward_flops, range(whole.layers))
    )


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_autograd_keeps_exactly_the_declared_elements(
    whole: Blocks, slices: int, saved_bytes: Callable[..., int]
) -> None:
    model = cut(whole, tp=slices, attention_apart=True)
    for layer in range(model.layers):
        shares = [Share(tokens=part) for part in ([0, 1, 6, 7], [2, 3, 4, 5])]
        if model.run(layer).cut:
            shares = [piece_of(model, layer, number) for number in range(slices)]
        kept = sum(saved_bytes(model, layer, 3, torch.float64, share) for share in shares)
        assert kept == 3 * model.saved_elements(layer) * 8, layer


def test_heads_and_sequences_may_both_be_cut() -> None:
    model = cut(GPT(layers=1, heads=4, hidden_size=48), tp=4, attention_apart=True)
    assert [model.layout(layer).slices for layer in range(2, 5)] == [4, 4, 1]


def test_sizes_count_queries_keys_and_values_and_the_log_sum_exp() -> None:
    sizes = cut(GPT(heads=6, kv_heads=2, **SMALL), attention_apart=True).sizes(rows=3, element_bytes=4)
    assert sizes.queries == 3 * 8 * 48
    assert sizes.keys_values == 3 * 8 * 2 * 16
    assert sizes.activations[3] == 3 * 8 * (48 + 6)
    assert GPT().sizes(rows=3, element_bytes=4).queries == 0

"""The per-token MLP's shapes and bytes, and what it refuses."""

from collections.abc import Callable

import pytest
import torch

from shardlab.errors import UserError
from shardlab.models import GPT, MLP, Model

Measure = Callable[[Model, int, int, torch.dtype], int]


def test_it_is_a_gpt_without_attention_and_positions() -> None:
    for layer in range(3):
        gpt = [p for p in GPT(layers=3).layout(layer).parameters if not p.name.startswith(("attn", "ln_1", "wpe"))]
        assert list(MLP(layers=3).layout(layer).parameters) == gpt


def test_the_hidden_width_is_four_times_the_width_unless_given() -> None:
    assert MLP() == MLP(ffn_hidden_size=None)
    assert MLP(hidden_size=32).layout(1) == MLP(hidden_size=32, ffn_hidden_size=128).layout(1)
    assert dict(p[:2] for p in MLP(hidden_size=32, ffn_hidden_size=50).layout(1).parameters)["mlp.c_fc.weight"] == (
        50,
        32,
    )


@pytest.mark.parametrize(
    "model", [MLP(layers=3), MLP(layers=1), MLP(layers=2, ffn_hidden_size=50, dropout=0.1)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_autograd_keeps_exactly_the_declared_elements(model: MLP, dtype: torch.dtype, saved_bytes: Measure) -> None:
    for layer in range(model.layers):
        assert saved_bytes(model, layer, 3, dtype) == 3 * model.saved_elements(layer) * dtype.itemsize


def test_flops_are_two_for_every_element_of_every_matrix_and_token() -> None:
    model = MLP(layers=2, hidden_size=32, vocab_size=100, seq_len=16)
    assert [model.forward_flops(layer) for layer in range(2)] == [16 * 2 * 8 * 32**2, 16 * 2 * (8 * 32**2 + 32 * 100)]


def test_a_hidden_width_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="ffn_hidden_size is 0; a model needs at least 1"):
        MLP(ffn_hidden_size=0)

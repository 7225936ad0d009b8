"""First weights: nanoGPT's, the same in every dtype; and the views of the flat buffer."""

import math

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT
from shardlab.models.tensors import initial_weights, views

MODEL = GPT(layers=8, hidden_size=96, vocab_size=300, seq_len=80)


def named(layer: int, flat: Tensor) -> dict[str, Tensor]:
    layout = MODEL.layout(layer)
    return {p.name: view for p, view in zip(layout.parameters, views(layout, flat), strict=True)}


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
    for name, weight in named(layer, initial_weights(MODEL, layer, 0, torch.float32)).items():
        if weight.dim() == 1:
            assert weight.eq(0 if name.endswith("bias") else 1).all(), name
        else:
            deviation = 0.02 / math.sqrt(2 * 8) if name.endswith("c_proj.weight") else 0.02
            assert weight.std().item() == pytest.approx(deviation, rel=0.05), name
            assert abs(weight.mean().item()) < deviation / 10, name


def test_views_share_the_buffer_and_leave_the_gaps_zero() -> None:
    layout = MODEL.layout(0)
    flat = torch.zeros(layout.padded(7))
    for view in views(layout, flat):
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        view.fill_(1)
    assert int(flat.sum()) == layout.parameter_count

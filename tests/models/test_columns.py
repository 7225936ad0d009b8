"""An MLP cut by columns: its layers, what autograd keeps for them, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.errors import UserError
from shardlab.models import GPT, MLP, Columns
from shardlab.models.tensors import Share, to_blocks, to_halves
from shardlab.program.sizes import LayerKind

SMALL = MLP(layers=2, width=16, block=8, vocabulary=30, ffn_hidden=20)


def test_every_matrix_is_a_layer_and_norms_lie_between_blocks() -> None:
    model = Columns(SMALL, 2)
    norm, column = LayerKind.NORM, LayerKind.COLUMN
    assert model.kinds == (column, norm, column, column, norm, column, column, norm, column)
    names = [[p.name for p in model.layout(layer).parameters] for layer in (0, 2, 3, 8)]
    assert names == [["wte.weight"], ["mlp.c_fc.weight", "mlp.c_fc.bias"], ["mlp.c_proj.weight"], ["lm_head.weight"]]
    assert [model.layout(layer).parameters[0].shape for layer in (0, 2, 3)] == [(30, 8), (10, 16), (8, 20)]


def test_copies_between_whole_and_cut_are_exact() -> None:
    model = Columns(SMALL, 4)
    wholes = [torch.zeros(SMALL.layout(block).numel) for block in range(2)]
    for block, flat in enumerate(wholes):
        layout = SMALL.layout(block)
        for parameter, offset in zip(layout.parameters, layout.offsets, strict=True):
            flat[offset : offset + parameter.numel] = torch.randn(parameter.numel)
    assert all(map(torch.equal, to_blocks(model, to_halves(model, wholes)), wholes))


@pytest.mark.parametrize("slices", [1, 2])
def test_autograd_keeps_exactly_the_declared_elements(slices: int, saved_bytes: Callable[..., int]) -> None:
    model = Columns(SMALL, slices)
    for layer in range(model.layers):
        if model.kinds[layer] is LayerKind.COLUMN:
            kept = sum(saved_bytes(model, layer, 3, torch.float64, Share(s, slices)) for s in range(slices))
            assert kept == 3 * model.saved_elements(layer) * 8, layer


def test_the_arithmetic_is_the_whole_models() -> None:
    model = Columns(SMALL, 2)
    assert sum(map(model.forward_flops, range(model.layers))) == sum(map(SMALL.forward_flops, range(SMALL.layers)))
    assert [model.activation_shape(index) for index in (1, 2, 3, 4, 9)] == [(8, 16), (8, 16), (8, 20), (8, 16), (8, 30)]


def test_a_model_with_more_than_mlps_is_refused() -> None:
    with pytest.raises(UserError, match="but GPT has more than MLPs; train an MLP"):
        Columns(GPT(), 2)


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"20 hidden features do not divide into 8 .* \(remainder 4\)"):
        Columns(SMALL, 8)

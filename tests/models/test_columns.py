"""An MLP cut by columns: its layers, what autograd keeps for them, and what cannot be cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.common.errors import UserError
from shardlab.models import GPT, MLP, cut
from shardlab.models.tensors import to_blocks, to_layers
from tests.models.conftest import piece_of

SMALL = MLP(layers=2, hidden_size=16, seq_len=8, vocab_size=30, ffn_hidden_size=20)


def test_every_matrix_is_a_layer_and_norms_lie_between_blocks() -> None:
    model = cut(SMALL, tp=2, columns=True)
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
    model = cut(SMALL, tp=4, columns=True)
    wholes = [torch.zeros(SMALL.layout(block).numel) for block in range(2)]
    for block, flat in enumerate(wholes):
        layout = SMALL.layout(block)
        for parameter, offset in zip(layout.parameters, layout.offsets, strict=True):
            flat[offset : offset + parameter.numel] = torch.randn(parameter.numel)
    assert all(map(torch.equal, to_blocks(model, to_layers(model, wholes)), wholes))


@pytest.mark.parametrize("slices", [1, 2])
def test_autograd_keeps_exactly_the_declared_elements(slices: int, saved_bytes: Callable[..., int]) -> None:
    model = cut(SMALL, tp=slices, columns=True)
    for layer in range(model.layers):
        if model.run(layer).cut:
            kept = sum(saved_bytes(model, layer, 3, torch.float64, piece_of(model, layer, s)) for s in range(slices))
            assert kept == 3 * model.saved_elements(layer) * 8, layer


def test_the_arithmetic_is_the_whole_models() -> None:
    model = cut(SMALL, tp=2, columns=True)
    assert sum(map(model.forward_flops, range(model.layers))) == sum(map(SMALL.forward_flops, range(SMALL.layers)))
    features = [model.activation_shape(index)[1:] for index in (1, 2, 3, 4, 9)]
    assert features == [(8, 16), (8, 16), (8, 20), (8, 16), (8, 30)]


def test_a_model_with_more_than_mlps_is_refused() -> None:
    with pytest.raises(UserError, match="but GPT has more than MLPs; train an MLP"):
        cut(GPT(), tp=2, columns=True)


def test_features_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"20 hidden features do not divide into 8 .* \(remainder 4\)"):
        cut(SMALL, tp=8, columns=True)

"""Products make the gradients of their weights beside autograd: the same ones, of less that is kept."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import cast

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Llama, Mixtral, Model, MoE, cut
from shardlab.models.mixture import ExpertActivate
from shardlab.models.primitives import Activate
from shardlab.models.tensors import Dropout, Products, initial_weights, layers_of, views
from shardlab.models.tensors.products import AddGradients, Again
from tests.models.conftest import inputs_of, piece_of
from tests.models.small import WithHeads
from tests.models.tensors.comparing import error

SIZES: WithHeads = {"layers": 2, "hidden_size": 96, "heads": 4, "vocab_size": 30, "seq_len": 8}
"""Of a model whose feed-forward's products are large, in two slices too, and whose attention's last one is not."""
SMALL: list[Model] = [
    GPT(layers=2, hidden_size=16, heads=4, vocab_size=30, seq_len=8),
    MoE(layers=1, hidden_size=16, heads=4, vocab_size=30, seq_len=8),
]
LARGE: list[Model] = [
    GPT(**SIZES),
    GPT(**SIZES, dropout=0.2, bias=False, activation="gelu_tanh"),
    GPT(**SIZES, activation="squared_relu", norm="rms"),
    GPT(layers=1, hidden_size=96, heads=4, seq_len=8, tied=True),
    Llama(**SIZES, kv_heads=2),
    MoE(**SIZES),
    Mixtral(**SIZES, shared_experts=1),
    cut(GPT(**SIZES), tp=2),
    cut(Llama(**SIZES, ffn_hidden_size=384), tp=2, attention_apart=True),
    cut(MoE(**SIZES), tp=2, ep=2),
    cut(MLP(layers=2, hidden_size=96, vocab_size=30, seq_len=8), tp=2, columns=True),
]
ACTIVATIONS = Activate, ExpertActivate
EVERY = [(model, layer) for model in (*SMALL, *LARGE) for layer in range(model.layers)]


every_layer = pytest.mark.parametrize(("model", "layer"), EVERY, ids=str)


def gradients_of(
    model: Model, layer: int, its: Products | None, room: torch.dtype, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a layer's parameters and inputs, each parameter's added to ones."""
    torch.manual_seed(layer)
    owner = 0 if model.borrowed(layer) else layer
    flat = initial_weights(model, owner, 0, dtype).chunk(model.layout(owner).slices)[0]
    leaves = [view.clone().requires_grad_() for view in views(model.layout(owner), flat)]
    share = piece_of(model, layer, 0)
    inputs = inputs_of(model, layer, 3, dtype, share)
    dropout = Dropout(model.dropout, 0, 0, layer, (0,))
    made = layers_of(model)[layer].run(leaves, inputs, share, dropout, products=its)
    rooms = [torch.ones_like(leaf, dtype=room) for leaf in leaves]
    if its is not None:
        its.add_to(leaves, rooms)
    torch.autograd.backward(made, [torch.randn_like(y) for y in made])
    for leaf, into in zip(leaves, rooms, strict=True):
        if leaf.grad is not None:
            into.add_(leaf.grad)
    return rooms, [x.grad for x in inputs if x.grad is not None]


@every_layer
@pytest.mark.parametrize("small", [False, True])
def test_gradients_are_those_that_autograd_makes(model: Model, layer: int, small: bool) -> None:
    all = Products(small=small)
    plain, mine = (gradients_of(model, layer, its, torch.float64, torch.float64) for its in (None, all))
    for a, b in zip((*plain[0], *plain[1]), (*mine[0], *mine[1]), strict=True):
        assert error(b, a) <= 1e-14


def test_gradients_may_be_summed_in_wider_numbers_than_they_are_made_in() -> None:
    model = LARGE[0]
    plain, mine = (gradients_of(model, 1, its, torch.float32, torch.bfloat16) for its in (None, Products()))
    for a, b in zip((*plain[0], *plain[1]), (*mine[0], *mine[1]), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pass_that_keeps_no_graph_makes_the_same_to_the_bit(dtype: torch.dtype) -> None:
    model = GPT(layers=1, hidden_size=256, heads=4, vocab_size=512, seq_len=32)
    flat = initial_weights(model, 0, 0, dtype)
    leaves = [view.clone().requires_grad_() for view in views(model.layout(0), flat)]
    inputs = inputs_of(model, 0, 2, dtype, piece_of(model, 0, 0))
    layer = layers_of(model)[0]
    kept = layer.run(leaves, inputs, products=Products())
    with torch.no_grad():
        alone = layer.run(leaves, inputs)
    assert all(torch.equal(a, b) for a, b in zip(kept, alone, strict=True))


class Watched(Products):
    """Products, and what they are given again beside what was there at first."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.gone: list[weakref.ref[Tensor]] = []

    def watch(
        self, made: Tensor, read: Tensor, again: Again | None, parameters: Sequence[Tensor], add: AddGradients
    ) -> None:
        super().watch(made, read, again, parameters, add)
        if again is not None:
            assert isinstance(again, partial)
            assert not any(each.requires_grad for each in again.args[1].tensors.values()), "it would keep the graph"
            self.pairs.append((read.detach().clone(), cast(Tensor, again()[0]).detach()))
            self.gone.append(weakref.ref(read))


@every_layer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_is_made_again_is_the_same_to_the_bit_and_was_let_go(model: Model, layer: int, dtype: torch.dtype) -> None:
    watched = Watched()
    gradients_of(model, layer, watched, dtype, dtype)
    assert all(torch.equal(first, again) for first, again in watched.pairs)
    assert all(read() is None for read in watched.gone)
    assert len(watched.pairs) == len(model.run(layer).made_again)


def test_every_activation_function_is_made_again_that_a_large_product_reads() -> None:
    assert not any(run.made_again for model in SMALL for run in model.runs)
    for model in LARGE:
        for run in model.runs:
            followed = [n for n, step in enumerate(run.steps[:-1]) if isinstance(step.primitive, ACTIVATIONS)]
            assert {made.step for made in run.made_again} == set(followed)

"""Layers whose passes are written out: what autograd makes of them, to the bit, of as much as is declared."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.models import GPT, MLP, Llama, Model, MoE, cut
from shardlab.models.primitive import Step
from shardlab.models.primitives import Activate
from shardlab.models.run import Run
from shardlab.models.tensors import AddGradients, WrittenLayer, initial_weights, layers_of, views, written_layer
from tests.models.conftest import inputs_of, piece_of
from tests.models.small import WithHeads
from tests.models.tensors.comparing import error

ROWS = 3
SMALL: WithHeads = {"layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 30, "seq_len": 8}
LARGE = GPT(layers=2, hidden_size=96, heads=4, vocab_size=30, seq_len=8, activation="gelu_tanh")  # so are products
WRITTEN: list[Model] = [
    GPT(**SMALL),
    GPT(**SMALL, bias=False),
    GPT(layers=1, hidden_size=16, heads=4, vocab_size=30, seq_len=8, tied=True),
    LARGE,
    MLP(layers=2, hidden_size=16, vocab_size=30, seq_len=8),
]


def written(model: Model, layer: int) -> WrittenLayer | None:
    """A layer's passes."""
    its = layers_of(model)[layer]
    return written_layer(its.layer, its.names)


WHOLE = [(model, layer) for model in WRITTEN for layer in range(model.layers)]
CUT = cut(LARGE, tp=2)
CASES = WHOLE + [(CUT, layer) for layer in range(CUT.layers) if written(CUT, layer) is not None]
every_layer = pytest.mark.parametrize(("model", "layer"), CASES, ids=str)


class Passes:
    """One forward pass of a layer on random input, with gradients of its outputs."""

    def __init__(self, model: Model, layer: int, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(layer)
        self.share = piece_of(model, layer, 0)
        owner = 0 if model.borrowed(layer) else layer
        self.flat = initial_weights(model, owner, 0, dtype).chunk(model.layout(owner).slices)[0]
        self.flat += torch.randn_like(self.flat) / 5
        self.weights = views(model.layout(owner), self.flat)
        self.inputs = inputs_of(model, layer, ROWS, dtype, self.share)
        found = written(model, layer)
        assert found is not None
        self.layer, self.by_autograd = found, layers_of(model)[layer]
        given = [x.detach() for x in self.inputs]
        self.made, self.kept = self.layer.forward(given, self.weights)
        self.gradients = [torch.randn_like(y) for y in self.made]

    def backward(self, rooms: Sequence[Tensor], *, halves: bool = False) -> list[Tensor]:
        """The inputs' gradients, where there are any; adds those of the weights to `rooms`."""
        later: list[tuple[AddGradients, Tensor, Tensor]] = []

        def take(add: AddGradients, gradient: Tensor, read: Tensor) -> None:
            if halves:
                later.append((add, gradient, read))
            else:
                add(rooms, gradient, read)

        made = self.layer.backward(self.kept, self.gradients, self.weights, take)
        for add, gradient, read in later:
            add(rooms, gradient, read)
        return [gradient for gradient in made if gradient is not None]


@every_layer
@pytest.mark.parametrize("halves", [False, True])
def test_both_passes_are_those_that_autograd_makes(model: Model, layer: int, halves: bool) -> None:
    its = Passes(model, layer)
    leaves = [weight.clone().requires_grad_() for weight in its.weights]
    made = its.by_autograd.run(leaves, its.inputs, its.share)
    torch.autograd.backward(made, its.gradients)
    rooms = [torch.zeros_like(weight) for weight in its.weights]
    gradients = its.backward(rooms, halves=halves)
    for mine, its_own in zip(its.made, made, strict=True):
        assert torch.equal(mine, its_own)
    expected = [x.grad for x in its.inputs if x.grad is not None]
    for mine, its_own in zip(gradients, expected, strict=True):
        assert error(mine, its_own) <= 1e-14
    for room, leaf in zip(rooms, leaves, strict=True):
        assert leaf.grad is None or error(room, leaf.grad) <= 1e-14


@every_layer
def test_gradients_are_added_to_what_is_there_and_nothing_stays(model: Model, layer: int) -> None:
    fresh, more = Passes(model, layer), Passes(model, layer)
    zeros = [torch.zeros_like(weight) for weight in fresh.weights]
    ones = [torch.ones_like(weight) for weight in fresh.weights]
    fresh.backward(zeros)
    more.backward(ones)
    for zero, one in zip(zeros, ones, strict=True):
        assert error(one, zero + 1) <= 1e-14
    assert not any(each is not None for each in fresh.kept)


@every_layer
def test_as_much_is_kept_as_the_model_declares(model: Model, layer: int) -> None:
    its = Passes(model, layer, torch.float32)
    tensors: list[Any] = [each for each in its.kept if each is not None]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    inputs = {x.untyped_storage().data_ptr() for x in its.inputs}
    bytes = sum(size for place, size in storages.items() if place not in inputs)
    run = model.run(layer)
    assert bytes == run.saved(ROWS) * 4 // (run.slices if run.cut else 1)
    for x, keeps in zip(its.inputs, run.keeps_inputs, strict=True):
        assert (x.untyped_storage().data_ptr() in storages) == keeps


def test_a_weight_is_read_from_where_it_lies_when_the_backward_pass_begins() -> None:
    stays, moves = Passes(WRITTEN[0], 1), Passes(WRITTEN[0], 1)
    its_rooms, rooms = ([torch.zeros_like(weight) for weight in stays.weights] for _ in range(2))
    expected = stays.backward(its_rooms)
    elsewhere = [weight.clone() for weight in moves.weights]
    moves.flat.fill_(torch.nan)
    moves.weights = elsewhere
    for mine, its_own in zip((*moves.backward(rooms), *rooms), (*expected, *its_rooms), strict=True):
        assert torch.equal(mine, its_own)


def test_gradients_may_be_summed_in_wider_numbers_than_they_are_made_in() -> None:
    its, exact = Passes(WRITTEN[0], 1, torch.bfloat16), Passes(WRITTEN[0], 1, torch.bfloat16)
    wide, narrow = (
        [torch.zeros_like(weight, dtype=dtype) for weight in its.weights] for dtype in (torch.float32, None)
    )
    its.backward(wide)
    exact.backward(narrow)
    for room, its_own in zip(wide, narrow, strict=True):
        assert room.dtype == torch.float32
        assert torch.equal(room.bfloat16(), its_own)


@pytest.mark.parametrize(
    "model",
    [
        GPT(**SMALL, dropout=0.1),
        GPT(**SMALL, activation="squared_relu"),
        Llama(**SMALL, kv_heads=2),
        MoE(**SMALL),
        cut(GPT(**SMALL), tp=2, attention_apart=True),
    ],
    ids=str,
)
def test_a_layer_with_a_primitive_that_is_not_written_out_is_autograd_s(model: Model) -> None:
    assert any(written(model, layer) is None for layer in range(model.layers))


class Twice(Activate):
    """A primitive that is made of another, and would compute something else."""


def test_a_primitive_that_is_made_of_another_one_does_not_take_its_passes() -> None:
    def with_steps(run: Run, steps: tuple[Step, ...]) -> WrittenLayer | None:
        return written_layer(replace(run, steps=steps), layers_of(WRITTEN[0])[0].names)

    run = WRITTEN[0].run(0)
    twice = [
        step._replace(primitive=Twice(tokens=8, activation="gelu", hidden=64))
        if isinstance(step.primitive, Activate)
        else step
        for step in run.steps
    ]
    assert with_steps(run, run.steps) is not None
    assert with_steps(run, tuple(twice)) is None

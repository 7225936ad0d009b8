"""A backward pass in two halves is the whole one, and what it keeps between them is known."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab.execute.graph import FlatWeight, Graph
from shardlab.models import GPT, MLP, Model
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, views

MODELS: list[Model] = [
    GPT(layers=3, width=16, heads=2, block=8),
    GPT(layers=3, width=16, heads=2, block=8, bias=False),
    GPT(layers=2, width=16, heads=2, block=8, dropout=0.2),
    GPT(layers=2, width=12, heads=3, block=7, vocabulary=30, bias=False, dropout=0.2),
    GPT(layers=1, width=16, heads=2, block=8),
    GPT(layers=1, width=16, heads=2, block=8, tied=True),
    GPT(layers=1, width=16, heads=2, block=8, tied=True, bias=False, dropout=0.2),
    MLP(layers=3, width=16, block=8),
    MLP(layers=1, width=16, block=8, bias=False, dropout=0.2),
]
ROWS = 3
CASES = [(model, layer) for model in MODELS for layer in range(model.layers)]
every_layer = pytest.mark.parametrize(("model", "layer"), CASES, ids=str)


def input_of(model: Model, layer: int) -> Tensor:
    """Random, but always the same; tokens for the first layer."""
    torch.manual_seed(layer)
    shape = (ROWS, *model.activation_shape(layer))
    return torch.randn(shape, dtype=torch.float64) if layer else torch.randint(model.vocabulary, shape)


def graph_of(
    model: Model, layer: int, regathered: bool = False, x: Tensor | None = None
) -> tuple[Graph, Tensor, list[Tensor]]:
    """A layer's graph on random input, its flat weight, and the gradients of its outputs."""
    x = input_of(model, layer) if x is None else x
    flat = initial_weights(model, layer, 0, torch.float64)
    dropout = Dropout(model.dropout, 0, 0, layer, (0,)) if model.dropout else None
    graph = Graph(layers_of(model)[layer], [x], FlatWeight(flat, model.layout(layer)), Share(), dropout, regathered)
    return graph, flat, [torch.randn_like(y) for y in graph.take_outputs()]


def whole(model: Model, layer: int) -> tuple[Tensor, list[Tensor]]:
    """Gradients of weight and inputs, in one backward pass."""
    graph, flat, gradients = graph_of(model, layer)
    into = torch.zeros_like(flat)
    x_gradients = graph.backward(gradients, flat, views(model.layout(layer), into))
    return into, x_gradients


def equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-13 * b.abs().max())


@every_layer
@pytest.mark.parametrize("regathered", [False, True])
def test_two_halves_give_the_gradients_of_the_whole(model: Model, layer: int, regathered: bool) -> None:
    graph, flat, gradients = graph_of(model, layer, regathered)
    x_gradients = graph.backward_input(gradients, flat)
    into = torch.zeros_like(flat)
    graph.backward_weight(views(model.layout(layer), into))
    expected, x_expected = whole(model, layer)
    assert equal(into, expected)
    assert len(x_gradients) == (layer > 0), "tokens have no gradient"
    assert all(equal(a, b) for a, b in zip(x_gradients, x_expected, strict=True))


@every_layer
def test_the_weights_half_adds_to_what_the_gradient_holds_already(model: Model, layer: int) -> None:
    graph, flat, gradients = graph_of(model, layer)
    graph.backward_input(gradients, flat)
    into = torch.ones_like(flat)
    parameters = views(model.layout(layer), into)
    graph.backward_weight(parameters)
    expected = [1 + each for each in views(model.layout(layer), whole(model, layer)[0])]
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(parameters, expected, strict=True))


@every_layer
def test_between_the_halves_the_weight_may_go(model: Model, layer: int) -> None:
    """It is gathered elsewhere for the first half, and nowhere for the second."""
    graph, flat, gradients = graph_of(model, layer, regathered=True)
    elsewhere = flat.clone()
    flat.fill_(float("nan"))
    graph.backward_input(gradients, elsewhere)
    elsewhere.fill_(float("nan"))
    into = torch.zeros_like(flat)
    graph.backward_weight(views(model.layout(layer), into))
    assert equal(into, whole(model, layer)[0])


def storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


class Kept:
    """What autograd saves, for as long as it saves it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_between_the_halves(model: Model, layer: int) -> int:
    """Elements for one sequence, by storages: beyond the layer's input, its parameters, and its output's gradient."""
    found: list[weakref.ref[Kept]] = []

    def pack(tensor: Tensor) -> Kept:
        kept = Kept(tensor)
        found.append(weakref.ref(kept))
        return kept

    x = input_of(model, layer)
    with saved_tensors_hooks(pack, lambda kept: kept.tensor):
        graph, flat, gradients = graph_of(model, layer, x=x)
    graph.backward_input(gradients, flat)
    alive = [kept.tensor for reference in found if (kept := reference()) is not None]
    caught = [tensor for entry in graph._entries for tensor in entry.caught.values()]
    given = storages(iter([flat, *gradients, x]))
    sizes = {place: size for place, size in storages(iter([*alive, *caught])).items() if place not in given}
    return sum(sizes.values()) // 8 // ROWS


@pytest.mark.parametrize(
    ("model", "layer"),
    [(m, layer) for m, layer in CASES if not (isinstance(m, GPT) and m.tied)],
    ids=str,
)
def test_between_the_halves_all_that_was_saved_is_kept_and_the_gradients_that_meet_parameters(
    model: Model, layer: int
) -> None:
    """Each norm's and each linear map's output's. Without dropout the last one's is that of the layer's output."""
    t, c = model.block, model.width
    of_part = {"Embedding": t * c, "Attention": 5 * t * c, "FeedForward": 6 * t * c, "Head": t * c}
    parts = [type(part).__name__ for part in model.parts(layer)]
    given = t * c if parts[-1] != "Head" and not model.dropout else 0
    caught = sum(of_part[part] for part in parts) - given
    assert kept_between_the_halves(model, layer) == model.saved_elements(layer) + caught

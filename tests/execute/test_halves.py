"""A backward pass in two halves is the whole one, and what it keeps between them is known."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from shardlab.models.parts import Attention, FeedForward, Head
from torch import Tensor

from shardlab.execute.graph import FlatWeight, Graph
from shardlab.execute.saved import Saved
from shardlab.models import GPT, MLP, Blocks, Halves, Llama, Model
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
    Llama(layers=2, width=16, heads=2, block=8, kv_heads=1, ffn_hidden=24),
    GPT(layers=1, width=16, heads=2, block=8, activation="squared_relu", norm="rms", rope_theta=1e4),
]
ROWS = 3
CASES = [(model, layer) for model in MODELS for layer in range(model.layers)]
every_layer = pytest.mark.parametrize(("model", "layer"), CASES, ids=str)


def inputs_of(model: Model, layer: int) -> list[Tensor | None]:
    """Random, but always the same; tokens for the first layer, a residual and a branch for a norm."""
    torch.manual_seed(layer)
    shape = (ROWS, *model.activation_shape(layer))
    x = torch.randn(shape, dtype=torch.float64) if layer else torch.randint(model.vocabulary, shape)
    if isinstance(model, Halves) and layer % 2:
        return [torch.randn_like(x) if layer > 1 else None, x]
    return [x]


def graph_of(model: Model, layer: int, saved: bool = True) -> tuple[Graph, Tensor, list[Tensor]]:
    """A layer's graph on random input, its flat weight, and the gradients of its outputs."""
    flat = initial_weights(model, layer, 0, torch.float64)
    weight = FlatWeight(flat, model.layout(layer))
    dropout = Dropout(model.dropout, 0, 0, layer, (0,)) if model.dropout else None
    kept = Saved(flat) if saved else None
    graph = Graph(layers_of(model)[layer], inputs_of(model, layer), weight, Share(), dropout, kept)
    return graph, flat, [torch.randn_like(y) for y in graph.take_outputs()]


def whole(model: Model, layer: int) -> tuple[Tensor, list[Tensor]]:
    """Gradients of weight and inputs, in one backward pass."""
    graph, flat, gradients = graph_of(model, layer, saved=False)
    into = torch.zeros_like(flat)
    x_gradients = graph.backward(gradients, flat, views(model.layout(layer), into))
    return into, x_gradients


def read_by_the_second_half(model: Model, layer: int) -> set[int]:
    """Numbers of the saved tensors that it reads, as a first pass tells."""
    graph, flat, gradients = graph_of(model, layer)
    graph.backward_input(gradients, flat)
    return set(graph.backward_weight(views(model.layout(layer), torch.zeros_like(flat))))


def equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-13 * b.abs().max())


@every_layer
@pytest.mark.parametrize("first", [True, False])
def test_two_halves_give_the_gradients_of_the_whole(model: Model, layer: int, first: bool) -> None:
    reads = None if first else read_by_the_second_half(model, layer)
    graph, flat, gradients = graph_of(model, layer)
    x_gradients = graph.backward_input(gradients, flat, reads)
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
    graph, flat, gradients = graph_of(model, layer)
    elsewhere = flat.clone()
    flat.fill_(float("nan"))
    graph.backward_input(gradients, elsewhere)
    elsewhere.fill_(float("nan"))
    into = torch.zeros_like(flat)
    graph.backward_weight(views(model.layout(layer), into))
    assert equal(into, whole(model, layer)[0])


def storages(tensors: Iterable[Tensor | None]) -> dict[int, int]:
    found = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


class Watched(Saved):
    """What autograd saves, for as long as it stays."""

    def stays(self) -> list[Tensor]:
        return [kept for kept in self._tensors if isinstance(kept, Tensor)]


def kept_between_the_halves(model: Model, layer: int, reads: set[int] | None) -> int:
    """Elements for one sequence, by storages: beyond the layer's inputs, its parameters, and its outputs' gradients."""
    flat = initial_weights(model, layer, 0, torch.float64)
    inputs, weight, saved = inputs_of(model, layer), FlatWeight(flat, model.layout(layer)), Watched(flat)
    dropout = Dropout(model.dropout, 0, 0, layer, (0,)) if model.dropout else None
    graph = Graph(layers_of(model)[layer], inputs, weight, Share(), dropout, saved)
    gradients = [torch.randn_like(y) for y in graph.take_outputs()]
    graph.backward_input(gradients, flat, reads)
    caught = [tensor for entry in graph._entries for tensor in entry.caught.values()]
    given = storages([flat, *gradients, *inputs])
    sizes = {place: size for place, size in storages([*saved.stays(), *caught]).items() if place not in given}
    return sum(sizes.values()) // 8 // ROWS


UNTIED = [model for model in MODELS if isinstance(model, Blocks) and not (isinstance(model, GPT) and model.tied)]
"""The second half of a tied model keeps less: the gradient of its matrix is not put off."""
MEASURED: list[Model] = [*UNTIED, *(Halves(model) for model in UNTIED)]


@pytest.mark.parametrize(("model", "layer"), [(m, layer) for m in MEASURED for layer in range(m.layers)], ids=str)
def test_from_the_second_pass_on_what_models_declare_is_kept_between_the_halves(model: Model, layer: int) -> None:
    """Of what was saved, only what the second half reads; and the gradients that meet parameters."""
    reads = read_by_the_second_half(model, layer)
    assert kept_between_the_halves(model, layer, reads) == model.saved_for_weight(layer)


@pytest.mark.parametrize(("model", "layer"), [(m, layer) for m in UNTIED for layer in range(m.layers)], ids=str)
def test_in_the_first_pass_all_that_was_saved_is_kept_and_the_gradients_that_meet_parameters(
    model: Blocks, layer: int
) -> None:
    """Each norm's and each linear map's output's. Without dropout the last one's is that of the layer's output."""
    t, c = model.block, model.width
    parts = model.parts(layer)
    made = [part.features for part in parts if isinstance(part, Attention | FeedForward)]  # by its first linear map
    streams = sum(2 if isinstance(part, Attention | FeedForward) else 1 for part in parts)
    given = t * c if not isinstance(parts[-1], Head) and not model.dropout else 0
    caught = t * (sum(made) + streams * c) - given
    assert kept_between_the_halves(model, layer, None) == model.saved_elements(layer) + caught

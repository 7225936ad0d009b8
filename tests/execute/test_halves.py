"""A backward pass in two halves is the whole one, and what it keeps between them is known."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardlab.execute.graph import FlatWeight, Graph
from shardlab.execute.saved import Saved
from shardlab.models import GPT, MLP, Blocks, Llama, Mixtral, Model, MoE, cut
from shardlab.models.attention import Projection
from shardlab.models.primitives import Embed, Linear, Lookup, Scores
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, views
from tests.models.conftest import inputs_of, piece_of

MODELS: list[Model] = [  # of width 64, feed-forwards' products are large
    GPT(layers=3, hidden_size=64, heads=2, seq_len=8),
    GPT(layers=3, hidden_size=16, heads=2, seq_len=8, bias=False),
    GPT(layers=2, hidden_size=16, heads=2, seq_len=8, dropout=0.2),
    GPT(layers=2, hidden_size=12, heads=3, seq_len=7, vocab_size=30, bias=False, dropout=0.2),
    GPT(layers=1, hidden_size=16, heads=2, seq_len=8),
    GPT(layers=1, hidden_size=16, heads=2, seq_len=8, tied=True),
    GPT(layers=1, hidden_size=64, heads=2, seq_len=8, tied=True, bias=False, dropout=0.2),
    MLP(layers=3, hidden_size=16, seq_len=8),
    MLP(layers=1, hidden_size=64, seq_len=8, bias=False, dropout=0.2),
    Llama(layers=2, hidden_size=64, heads=2, seq_len=8, kv_heads=1, ffn_hidden_size=256),
    GPT(layers=1, hidden_size=16, heads=2, seq_len=8, activation="squared_relu", norm="rms", rope_theta=1e4),
    MoE(layers=2, hidden_size=64, heads=2, seq_len=8, vocab_size=30, top_k=1),
    MoE(layers=1, hidden_size=16, heads=2, seq_len=8, vocab_size=30, dropout=0.2, capacity_factor=None),
    Mixtral(layers=2, hidden_size=64, heads=2, seq_len=8, kv_heads=1, ffn_hidden_size=256, top_k=3),
]
ROWS = 3

CASES = [(model, layer) for model in MODELS for layer in range(model.layers)]
every_layer = pytest.mark.parametrize(("model", "layer"), CASES, ids=str)


def given(model: Model, layer: int, share: Share) -> tuple[Tensor, ...]:
    """Random, but always the same."""
    torch.manual_seed(layer)
    return inputs_of(model, layer, ROWS, torch.float64, share)


def flat_of(model: Model, layer: int, number: int) -> Tensor:
    """The weights of a layer's slice."""
    return initial_weights(model, layer, 0, torch.float64).chunk(model.layout(layer).slices)[number]


def graph_of(
    model: Model, layer: int, saved: bool = True, number: int = 0, in_halves: bool | None = None
) -> tuple[Graph, Tensor, list[Tensor]]:
    """A layer's graph on random input, its flat weight, and the gradients of its outputs."""
    flat, share = flat_of(model, layer, number), piece_of(model, layer, number)
    weight = FlatWeight(flat, model.layout(layer))
    dropout = Dropout(model.dropout, 0, 0, layer, (0,)) if model.dropout else None
    kept = Saved(flat) if saved else None
    graph = Graph(
        layers_of(model)[layer],
        given(model, layer, share),
        weight,
        share,
        dropout,
        kept,
        in_halves=saved if in_halves is None else in_halves,
    )
    return graph, flat, [torch.randn_like(y) for y in graph.take_outputs()]


def whole(model: Model, layer: int) -> tuple[Tensor, list[Tensor]]:
    """Gradients of weight and inputs, in one backward pass."""
    graph, flat, gradients = graph_of(model, layer, saved=False)
    into = torch.zeros_like(flat)
    x_gradients = graph.backward(gradients, flat, views(model.layout(layer), into))
    return into, x_gradients


def read_by_the_second_half(model: Model, layer: int, number: int = 0) -> set[int]:
    """Numbers of the saved tensors that it reads, as a first pass tells."""
    graph, flat, gradients = graph_of(model, layer, number=number)
    graph.backward_input(gradients, flat)
    return set(graph.backward_weight(views(model.layout(layer), torch.zeros_like(flat))))


def equal(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-13 * b.abs().max())


@every_layer
@pytest.mark.parametrize("first", [True, False])
def test_two_halves_give_the_gradients_of_the_whole(model: Model, layer: int, first: bool) -> None:
    reads = None if first else read_by_the_second_half(model, layer)
    graph, flat, gradients = graph_of(model, layer, saved=reads != set(), in_halves=True)
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


def kept_between_the_halves(model: Model, layer: int, reads: set[int] | None, number: int = 0) -> int:
    """Elements by storages: beyond the layer's inputs, its parameters, and the gradients of its outputs and vectors."""
    flat, share = flat_of(model, layer, number), piece_of(model, layer, number)
    inputs, weight, saved = given(model, layer, share), FlatWeight(flat, model.layout(layer)), Watched(flat)
    dropout = Dropout(model.dropout, 0, 0, layer, (0,)) if model.dropout else None
    graph = Graph(layers_of(model)[layer], inputs, weight, share, dropout, saved, in_halves=True)
    gradients = [torch.randn_like(y) for y in graph.take_outputs()]
    graph.backward_input(gradients, flat, reads)
    assert all(gradient.dim() == 1 for gradient in graph._whole.values()), "matrices' gradients are put off"
    caught = [tensor for entry in graph._entries for tensor in entry.caught.values()]
    waiting = graph._products.waiting or []
    caught += [each for product in waiting for each in (product.input, product.gradient) if isinstance(each, Tensor)]
    others = storages([flat, *gradients, *inputs])
    sizes = {place: size for place, size in storages([*saved.stays(), *caught]).items() if place not in others}
    return sum(sizes.values()) // 8


UNTIED = [model for model in MODELS if isinstance(model, Blocks) and not (isinstance(model, GPT) and model.tied)]
"""The second half of a tied model keeps less: the gradient of its matrix is not put off."""
WITHOUT_EXPERTS = [model for model in UNTIED if not isinstance(model, MoE)]
MEASURED: list[Model] = [
    *UNTIED,
    *(cut(model) for model in UNTIED),
    *(cut(model, attention_apart=True) for model in WITHOUT_EXPERTS),
    *(cut(model, columns=True) for model in UNTIED if isinstance(model, MLP)),
    # in slices
    cut(GPT(layers=1, hidden_size=16, heads=4, kv_heads=2, seq_len=8, vocab_size=30, dropout=0.2), tp=2),
    cut(Llama(layers=1, hidden_size=16, heads=4, kv_heads=2, seq_len=8), tp=2, attention_apart=True),
    cut(MLP(layers=1, hidden_size=16, seq_len=8), tp=2, columns=True),
    cut(MoE(layers=1, hidden_size=16, heads=2, seq_len=8), ep=2),
    cut(MoE(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=30, dropout=0.2), tp=2, ep=2),
    cut(Mixtral(layers=2, hidden_size=16, heads=2, seq_len=8, ffn_hidden_size=24), tp=2, attention_apart=True),
]


@pytest.mark.parametrize(("model", "layer"), [(m, layer) for m in MEASURED for layer in range(m.layers)], ids=str)
def test_from_the_second_pass_on_what_models_declare_is_kept_between_the_halves(model: Model, layer: int) -> None:
    """Of what was saved, only what the second half reads; and the gradients that meet parameters."""
    kept = [
        kept_between_the_halves(model, layer, read_by_the_second_half(model, layer, number), number)
        for number in range(model.layout(layer).slices)
    ]
    assert sum(kept) == model.run(layer).saved_for_weight(ROWS)


@pytest.mark.parametrize(
    ("model", "layer"), [(m, layer) for m in WITHOUT_EXPERTS for layer in range(m.layers)], ids=str
)
def test_in_the_first_pass_a_look_up_keeps_all_that_was_saved_and_the_gradients_that_meet_matrices(
    model: Blocks, layer: int
) -> None:
    """Each linear map's output's. Without dropout the last one's is that of the layer's output.

    What products have read was made again for them. Other layers keep no more than later.
    """
    primitives = [step.primitive for step in model.run(layer).steps]
    if not any(isinstance(each, Lookup) for each in primitives):
        assert kept_between_the_halves(model, layer, None) == model.run(layer).saved_for_weight(ROWS)
        return
    features = [each.outputs for each in primitives if isinstance(each, Projection | Linear)]
    features += [each.hidden_size for each in primitives if isinstance(each, Embed)]
    features += [-model.hidden_size] if not model.dropout and layer < model.layers - 1 else []
    features += [-each.outputs for each in primitives if isinstance(each, Scores)]  # those of the logits are given
    caught = ROWS * model.seq_len * sum(features)
    assert kept_between_the_halves(model, layer, None) == model.run(layer).saved(ROWS, made_again=False) + caught


EVERY = [*MODELS, *MEASURED]


@pytest.mark.parametrize(("model", "layer"), [(m, layer) for m in EVERY for layer in range(m.layers)], ids=str)
def test_the_first_half_asks_autograd_once_and_the_second_one_for_each_entry(model: Model, layer: int) -> None:
    graph, flat, gradients = graph_of(model, layer)
    with (
        patch.object(torch.autograd, "grad", wraps=torch.autograd.grad) as first,
        patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as second,
    ):
        graph.backward_input(gradients, flat)
        assert (first.call_count, second.call_count) == (1, 0)
        graph.backward_weight(views(model.layout(layer), torch.zeros_like(flat)))
    assert (first.call_count, second.call_count) == (1, model.entries(layer))

"""A layer's graph outlives the weights that it was made with."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import gc
import weakref

import torch

from shardlab.execute.graph import FlatWeight, Graph
from shardlab.execute.saved import Saved
from shardlab.models import GPT
from shardlab.models.tensors import Share, initial_weights, layers_of, views

MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)
LAYER, LAYOUT = layers_of(MODEL)[1], MODEL.layout(1)
FLAT = initial_weights(MODEL, 1, 0, torch.float64)


def run(move: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weight and input; if `move`, the weight's buffer is overwritten and its copy lies elsewhere."""
    torch.manual_seed(0)
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    flat = FLAT.clone()
    graph = Graph(LAYER, [x], FlatWeight(flat, LAYOUT), Share(), None, Saved(flat) if move else None)
    (output,) = graph.take_outputs()
    if move:
        elsewhere = flat.clone()
        flat.fill_(float("nan"))
        flat = elsewhere
    into = torch.zeros_like(FLAT)
    (x_gradient,) = graph.backward([torch.ones_like(output)], flat, views(LAYOUT, into))
    return into, x_gradient


def test_backward_reads_the_weight_from_where_it_was_gathered_again() -> None:
    expected, moved = run(move=False), run(move=True)
    for a, b in zip(expected, moved, strict=True):
        assert torch.equal(a, b)


def test_backward_adds_to_what_the_gradient_holds_already() -> None:
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    into = torch.ones_like(FLAT)
    fresh = torch.zeros_like(FLAT)
    for target in (into, fresh):
        graph = Graph(LAYER, [x], FlatWeight(FLAT.clone(), LAYOUT), Share(), None)
        graph.backward([torch.ones_like(y) for y in graph.take_outputs()], FLAT, views(LAYOUT, target))
    assert torch.allclose(into - 1, fresh, atol=1e-12)


def test_the_graph_keeps_neither_its_output_nor_a_regathered_weight_alive() -> None:
    flat = FLAT.clone()
    x = torch.randn(3, 8, 16, dtype=torch.float64)
    graph = Graph(LAYER, [x], FlatWeight(flat, LAYOUT), Share(), None, Saved(flat))
    output = weakref.ref(graph.take_outputs()[0])
    gc.collect()
    assert output() is None


def test_a_graph_that_is_let_go_at_any_point_takes_what_it_saved_with_it() -> None:
    for halves in range(3):
        flat = FLAT.clone()
        saved = Saved(flat)
        graph = Graph(
            LAYER, [torch.randn(3, 8, 16, dtype=torch.float64)], FlatWeight(flat, LAYOUT), Share(), None, saved
        )
        (output,) = graph.take_outputs()
        if halves >= 1:
            graph.backward_input([torch.ones_like(output)], flat)
        if halves == 2:
            graph.backward_weight(views(LAYOUT, torch.zeros_like(flat)))
        gone = weakref.ref(saved)
        del graph, saved, output
        assert gone() is None, f"after {halves} halves of its backward pass"

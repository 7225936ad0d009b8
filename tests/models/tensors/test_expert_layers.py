"""Dense layers and experts, with the exchange played by hand, equal the whole model in loss and gradients."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from shardlab.models import CutModel, MoE, cut
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, loss_of, to_blocks, to_layers, views
from tests.models.tensors.comparing import error, fill_gradient, random_batch, random_flats, whole_step

SMALL = MoE(layers=2, hidden_size=16, heads=4, vocab_size=40, seq_len=12, experts=4, auxiliary=0.5)
MODELS = [
    SMALL,
    replace(SMALL, top_k=1, capacity_factor=0.6, dropout=0.3),
    replace(SMALL, top_k=3, capacity_factor=None, bias=False),
    replace(SMALL, shared_experts=2, dropout=0.3),
]
MICROBATCHES = (3, 5, 6, 8)


def played(model: CutModel, leaves: list[list[list[Tensor]]], tokens: list[Tensor]) -> list[Tensor]:
    """Every rank's logits, of its own microbatch; leaves[layer][slice] are parameters."""
    carried: list[tuple[Tensor, ...]] = [()] * len(tokens)
    xs, share = tokens, Share(of_step=len(tokens))
    for number, (layer, run) in enumerate(zip(layers_of(model), model.runs, strict=True)):
        if not run.cut:
            made = [
                layer.run(leaves[number][0], (x, *c), share, Dropout(model.dropout, 1, 2, 99, (m,)))
                for m, c, x in zip(MICROBATCHES, carried, xs, strict=True)
            ]
            xs, carried = [x for x, *_ in made], [tuple(each[1:]) for each in made]
        else:
            slices = [x.chunk(run.slices) for x in xs]
            there = [torch.cat([its[rank] for its in slices]) for rank in range(run.slices)]
            back = [layer.run(leaves[number][rank], (x,))[0].chunk(len(xs)) for rank, x in enumerate(there)]
            xs = [torch.cat([back[rank][i] for rank in range(run.slices)]) for i in range(len(xs))]
    return xs


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_sliced_experts_equal_the_whole_model_in_loss_and_gradients(whole: MoE, slices: int) -> None:
    flats, (tokens, targets) = random_flats(whole), random_batch(whole, len(MICROBATCHES), 2)
    share = Share(microbatches=len(MICROBATCHES), of_step=len(MICROBATCHES))
    together = tokens.flatten(0, 1), targets.flatten(0, 1)
    expected, theirs = whole_step(whole, flats, together, MICROBATCHES, share)

    model = cut(whole, ep=slices)
    leaves = [
        [[view.clone().requires_grad_() for view in views(layout, run)] for run in flat.chunk(layout.slices)]
        for layout, flat in zip(map(model.layout, range(model.layers)), to_layers(model, flats), strict=True)
    ]
    logits = played(model, leaves, list(tokens))
    loss = torch.stack([loss_of(its, theirs) for its, theirs in zip(logits, targets, strict=True)]).sum()
    loss.backward()
    assert error(loss.detach(), expected) <= 1e-12

    gradients: list[Tensor] = []
    for layer, slices_of_layer in enumerate(leaves):
        layout = model.layout(layer)
        runs = torch.zeros(layout.slices, layout.run_numel, dtype=torch.float64)
        for run, mine in zip(runs, slices_of_layer, strict=True):
            fill_gradient(run, layout, mine)
        gradients.append(runs.flatten())
    assert all(error(a, b) <= 1e-12 for a, b in zip(to_blocks(model, gradients), theirs, strict=True))


def test_experts_numbers_survive_being_carried_in_bfloat16() -> None:
    whole = MoE(layers=1, hidden_size=16, heads=2, vocab_size=40, seq_len=64, experts=256, top_k=4)
    model = cut(whole)
    parameters = [views(model.layout(layer), initial_weights(model, layer, 0, torch.bfloat16)) for layer in range(3)]
    tokens = torch.randint(40, (2, 64))
    *_, carried = layers_of(model)[0].run(parameters[0], (tokens,))
    numbers = carried[..., -4:].float()
    assert torch.equal(numbers, numbers.round())
    assert numbers.max() > 200

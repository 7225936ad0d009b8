"""Random weights and batches, a step of a whole model, and how far two tensors are apart."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.models import Blocks, LayerLayout
from shardlab.models.tensors import (
    Dropout,
    Share,
    add_borrowed,
    cross_entropy,
    initial_weights,
    make_layers,
    parameter_views,
)
from shardlab.models.tensors.share import WHOLE_LAYER


def error(a: Tensor, b: Tensor) -> float:
    """max |a - b| / max |b|."""
    return ((a - b).abs().max() / b.abs().max()).item()


def gradient_of(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, which must have one."""
    assert leaf.grad is not None
    return leaf.grad


def random_flats(model: Blocks) -> list[Tensor]:
    """Weights without an accidental 0 or 1."""
    flats = [initial_weights(model, block, 0, torch.float64) for block in range(model.layers)]
    generator = torch.Generator().manual_seed(1)
    for block, flat in enumerate(flats):
        for view in parameter_views(model.layout(block), flat):
            view.add_(torch.randn(view.shape, dtype=flat.dtype, generator=generator) / 5)
    return flats


def random_batch(model: Blocks, *shape: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets (*shape, T)."""
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(model.vocab_size, (2, *shape, model.seq_len), generator=generator)
    return tokens, targets


def fill_gradient(flat: Tensor, layout: LayerLayout, leaves: Sequence[Tensor]) -> Tensor:
    """Copy the leaves' gradients into a flat buffer of zeros; a leaf without one leaves them."""
    for view, leaf in zip(parameter_views(layout, flat), leaves, strict=True):
        if leaf.grad is not None:
            view.copy_(leaf.grad)
    return flat


def whole_step(
    model: Blocks,
    flats: Sequence[Tensor],
    batch: tuple[Tensor, Tensor],
    microbatches: tuple[int, ...] = (3, 5),
    share: Share = WHOLE_LAYER,
) -> tuple[Tensor, list[Tensor]]:
    """The loss of a batch on whole blocks, and the flat gradient of each."""
    tokens, targets = batch
    leaves = [
        [v.requires_grad_() for v in parameter_views(model.layout(i), flat.clone())] for i, flat in enumerate(flats)
    ]
    x = tokens
    for block, (layer, parameters) in enumerate(zip(make_layers(model), add_borrowed(model, leaves), strict=True)):
        x = layer(parameters, x, Dropout(model.dropout, 1, 2, block, microbatches), share)
    loss = cross_entropy(x, targets)
    loss.backward()
    gradients = [fill_gradient(torch.zeros_like(f), model.layout(i), leaves[i]) for i, f in enumerate(flats)]
    return loss.detach(), gradients

"""The views of a layer's gradient are made once for all microbatches, and go with it."""

from __future__ import annotations

import weakref

import torch

from shardlab.execute.compute_ops import gradient_views
from shardlab.models import GPT

LAYOUT = GPT(layers=2, hidden_size=16, heads=2, seq_len=8).layout(1)


def test_every_microbatch_adds_to_the_same_views_of_a_gradient() -> None:
    gradient = torch.zeros(LAYOUT.numel)
    views = gradient_views(gradient, LAYOUT)
    assert gradient_views(gradient, LAYOUT) is views
    for view in views:
        view.add_(1)
    assert gradient.sum() == LAYOUT.parameter_count


def test_a_gradient_goes_although_its_views_are_kept_with_it() -> None:
    gradient = torch.zeros(LAYOUT.numel)
    views = weakref.ref(gradient_views(gradient, LAYOUT)[0])
    memory = weakref.ref(gradient)
    del gradient
    assert memory() is None
    assert views() is None

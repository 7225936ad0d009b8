"""One slice's update."""

from __future__ import annotations

from torch import Tensor

from shardlab.execute.optimizers.flat_slice import Slice, step_together


def stepped(kept: Slice, gradient: Tensor, step: int, squared_norm: float | None = None) -> None:
    """Update a slice with a gradient, unless the gradient is dropped."""
    if kept.take(gradient, kept.config.rate(step), squared_norm):
        step_together([kept])

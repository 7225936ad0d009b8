"""One slice's update."""

from __future__ import annotations

from torch import Tensor

from shardlab.execute.optimizers.flat_slice import Slice, step_together


def stepped(weight_slice: Slice, gradient: Tensor, step: int, squared_norm: float | None = None) -> None:
    """Update a slice with a gradient, unless the gradient is dropped."""
    if weight_slice.take(gradient, weight_slice.config.rate(step), squared_norm):
        step_together([weight_slice])

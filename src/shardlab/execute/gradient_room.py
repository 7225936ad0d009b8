"""Where a backward pass puts a weight's gradient, and what of an output's gradient it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlab.execute.state import State
from shardlab.models import LayerLayout
from shardlab.models.tensors import views
from shardlab.program import Op


def gradient_room(state: State, at: int, op: Op) -> Callable[[], Tensor]:
    """Where a layer's gradient goes: into zeros, or the older gradient that it is added to."""
    total = state.analysis.in_place.accumulates.get(at)
    number, values = op.outputs[0], state.values
    spec = state.specs[number]
    if number in state.analysis.buckets.first and total is None:
        make = state.room_beside(number)
        return lambda: make().zero_()
    if total is None and number in state.arena.tensors:
        return state.arena.tensors[number].zero_
    if total is None:
        shape, dtype, device = state.shapes.shape(spec), state.dtype(spec), state.settings.device
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    return lambda: values[total]


def parameters_of(gradient: Tensor, layout: LayerLayout) -> Sequence[Tensor]:
    """The views of a layer's gradient; made once, for all microbatches that are added to it, and kept with it."""
    kept = vars(gradient)
    if "views" not in kept:
        kept["views"] = views(layout, gradient.data)  # views of the tensor itself would keep it, and it them
    return kept["views"]


def own_columns(state: State, op: Op) -> Callable[[Tensor], Tensor]:
    """Take out of an output's complete gradient what belongs to a slice of it, for layers that take their own."""
    gradient, saved = state.specs[op.inputs[1]], state.specs[op.inputs[3]]
    if not takes_own(state, op.layer) or gradient.form.slices or not saved.form.slices:
        return lambda whole: whole
    ((index, piece),) = saved.form.slices
    return lambda whole: whole.chunk(saved.form.space.count(index), -1)[piece.bit_length() - 1]


def takes_own(state: State, layer: int) -> bool:
    """Whether a slice of a layer takes its own part of what comes back."""
    return any(node.takes_own for node in state.signatures[layer].nodes)

"""Optimizer ops of a tape: the gradient's norm, the direction of an update, and the update."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.execute.optimizers.flat_slice import Direction, Slice, step_together
from shardlab.execute.state import State
from shardlab.language import Kind, Op

Instruction = Callable[[], None]

MOST_COPIED = 2**20
"""Largest number of bytes of copied gradients (clipped, or in a wider dtype) that may wait for an update."""


def norm(state: State, index: int, op: Op) -> Instruction:
    """Compute the sum of a gradient's squares in float64. The padding of the gradient's buffer is zero."""
    (gradient,), (output,), values = op.inputs, op.outputs, state.values

    def run() -> None:
        values[output] = sum_of_squares(values[gradient]).to(state.settings.device)

    return run


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares in float64, (1,), as the square of a norm, which takes less memory and time."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square().reshape(1)


def direction(state: State, index: int, op: Op) -> Instruction:
    """Compute the direction of the update of the rank's slice (see `Slice.direction`). The weights do not change."""
    (gradient, opt_state, *norms), (output,), values = op.inputs, op.outputs, state.values
    cut_gradient = _own_gradient(state, op, gradient, opt_state)

    def run() -> None:
        scale = state.loss_scale.scale
        squared = [state.number(number) / scale**2 for number in norms]
        values[output] = values[opt_state].direction(cut_gradient(), *squared, scale=scale)

    return run


def update(state: State, index: int, op: Op) -> Instruction:
    """Update the rank's slice in place, in one call with the updates that follow immediately."""
    (gradient, weight, opt_state, *others), (new_weight, new_opt_state), values = op.inputs, op.outputs, state.values
    holds, cut_gradient = state.specs[opt_state].holds, _own_gradient(state, op, gradient, opt_state)
    norms = [number for number in others if state.specs[number].kind is Kind.SCALAR]
    whole = [number for number in others if number not in norms]
    ranges = [state.shapes.ranges(op.layer, state.specs[number].holds) for number in whole]
    slot = state.analysis.empties.get(index)
    key = state.analysis.kept_weights.copied_updates.get(index)
    own_places = state.shapes.places(op.layer, state.specs[weight].holds, holds) if key is not None else ()
    kept_at = (
        state.shapes.places(op.layer, key[1], holds) if key and index in state.analysis.kept_weights.refreshed else ()
    )
    is_followed = index in state.analysis.consecutive_updates

    def step(part: Slice) -> None:
        own_gradient = cut_gradient()
        scale = state.loss_scale.scale
        if state.observer is not None:
            state.observer(op.layer, holds, own_gradient if scale == 1 else own_gradient.float() / scale)
        squared = [state.number(scalar) / scale**2 for scalar in norms]
        for norm in squared:
            state.squared_norm = norm
        if not all(isinstance(norm, Tensor) or math.isfinite(norm) for norm in squared):
            state.finite = False
            if state.not_finite is None and not own_gradient.isfinite().all():
                state.not_finite = op.layer
        directions = [
            Direction(values[number], member_ranges) for number, member_ranges in zip(whole, ranges, strict=True)
        ]
        if part.take(own_gradient, state.rate, *squared, scale=scale, direction=next(iter(directions), None)):
            state.stepping.append(part)

    def run() -> None:
        part: Slice = values[opt_state]
        if own_places:
            part.carry([values[weight][start:stop] for start, stop in own_places])
        for run, (start, stop) in zip(part.weights, kept_at, strict=False):
            assert key is not None
            run.copy_(state.kept[key][start:stop])
        if not state.rehearses:
            step(part)
            copied = sum(waiting_slice.copied for waiting_slice in state.stepping)
            if not is_followed or not part.may_wait or copied > MOST_COPIED:
                stepping, state.stepping = state.stepping, []
                step_together(stepping)
        values[weight] = values[opt_state] = None
        values[new_weight], values[new_opt_state] = part.flat, part
        if slot is not None:  # the weight was received, and the rank's slice replaces it
            state.empty_buffer(slot)

    return run


def _own_gradient(state: State, op: Op, gradient: int, opt_state: int) -> Callable[[], Tensor]:
    """Return a function that cuts the slices of an optimizer state out of a gradient."""
    places = state.shapes.places(op.layer, state.specs[gradient].holds, state.specs[opt_state].holds)

    def cut() -> Tensor:
        parts = [state.values[gradient][start:stop] for start, stop in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return cut

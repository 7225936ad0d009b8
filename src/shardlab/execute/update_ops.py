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


def norm(state: State, at: int, op: Op) -> Instruction:
    """Compute the sum of a gradient's squares in float64. The padding of the gradient's buffer is zero."""
    (gradient,), (output,), values = op.inputs, op.outputs, state.values

    def run() -> None:
        values[output] = sum_of_squares(values[gradient]).to(state.settings.device)

    return run


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the sum of squares in float64, (1,), as the square of a norm, which takes less memory and time."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float64).square().reshape(1)


def direction(state: State, at: int, op: Op) -> Instruction:
    """Compute the direction of the update of the rank's slice (see `Slice.direction`). The weights do not change."""
    (gradient, opt_state, *norms), (output,), values = op.inputs, op.outputs, state.values
    own = _own_gradient(state, op, gradient, opt_state)

    def run() -> None:
        scale = state.loss_scale.scale
        squared = [state.number(each) / scale**2 for each in norms]
        values[output] = values[opt_state].direction(own(), *squared, scale=scale)

    return run


def update(state: State, at: int, op: Op) -> Instruction:
    """Update the rank's slice in place, in one call with the updates that follow immediately."""
    (gradient, weight, opt_state, *others), (new_weight, new_opt_state), values = op.inputs, op.outputs, state.values
    holds, mine = state.specs[opt_state].holds, _own_gradient(state, op, gradient, opt_state)
    norms = [number for number in others if state.specs[number].kind is Kind.SCALAR]
    whole = [number for number in others if number not in norms]
    ranges = [state.shapes.ranges(op.layer, state.specs[number].holds) for number in whole]
    slot = state.analysis.empties.get(at)
    key = state.analysis.kept.copied_updates.get(at)
    own = state.shapes.places(op.layer, state.specs[weight].holds, holds) if key is not None else ()
    kept_at = state.shapes.places(op.layer, key[1], holds) if key and at in state.analysis.kept.refreshed else ()
    goes_on = at in state.analysis.consecutive_updates

    def step(kept: Slice) -> None:
        given = mine()
        scale = state.loss_scale.scale
        if state.observer is not None:
            state.observer(op.layer, holds, given if scale == 1 else given.float() / scale)
        squared = [state.number(each) / scale**2 for each in norms]
        for norm in squared:
            state.squared_norm = norm
        if not all(isinstance(norm, Tensor) or math.isfinite(norm) for norm in squared):
            state.finite = False
            if state.not_finite is None and not given.isfinite().all():
                state.not_finite = op.layer
        directions = [Direction(values[number], where) for number, where in zip(whole, ranges, strict=True)]
        if kept.take(given, state.rate, *squared, scale=scale, direction=next(iter(directions), None)):
            state.stepping.append(kept)

    def run() -> None:
        kept: Slice = values[opt_state]
        if own:
            kept.carry([values[weight][start:stop] for start, stop in own])
        for run, (start, stop) in zip(kept.weights, kept_at, strict=False):
            assert key is not None
            run.copy_(state.kept[key][start:stop])
        if not state.rehearses:
            step(kept)
            copied = sum(each.copied for each in state.stepping)
            if not goes_on or not kept.may_wait or copied > MOST_COPIED:
                stepping, state.stepping = state.stepping, []
                step_together(stepping)
        values[weight] = values[opt_state] = None
        values[new_weight], values[new_opt_state] = kept.flat, kept
        if slot is not None:  # the weight was received, and the rank's slice replaces it
            state.empty_buffer(slot)

    return run


def _own_gradient(state: State, op: Op, gradient: int, opt_state: int) -> Callable[[], Tensor]:
    """Return a function that cuts the slices of an optimizer state out of a gradient."""
    places = state.shapes.places(op.layer, state.specs[gradient].holds, state.specs[opt_state].holds)

    def own() -> Tensor:
        parts = [state.values[gradient][start:stop] for start, stop in places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return own

"""A layer's passes on a rank's tape: what its ops do to the registers.

A forward pass keeps what its backward pass reads, which empties it. The backward pass is given the weight anew: one
that was gathered again is read from where it lies then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardlab.execute.gradient_room import gradient_room, own_columns, parameters_of
from shardlab.execute.state import State
from shardlab.models.tensors import AddGradients, Take
from shardlab.program import Kind, Op, OpKind

Instruction = Callable[[], None]
Waiting = list[tuple[AddGradients, Tensor, Tensor]]
"""What the parameters' gradients are made of, between the halves of a backward pass."""


def forward(state: State, at: int, op: Op) -> Instruction:
    """A layer; with what its backward pass reads, if the tape saves that; of a RECOMPUTE that alone."""
    (x, weight, *carried), values, passes = op.inputs, state.values, state.passes[op.layer]
    saves = state.specs[op.outputs[-1]].kind is Kind.SAVED
    outputs, saved = op.outputs[: len(op.outputs) - saves], op.outputs[-1]
    share, run_of_layer = state.share(op), state.model.run(op.layer)
    factor = state.analysis.gradient_factor.get(saved) if run_of_layer.affine else None
    stays = at in state.analysis.halved and run_of_layer.keeps_input  # as forecast, to the second half
    over = at in state.analysis.last_reads and not stays

    def run() -> None:
        given, weights = [values[number] for number in (x, *carried)], state.weights_of(op.layer, weight)
        scaled = share if factor is None else state.scaled(share, factor)
        made, kept = passes.forward(given, weights, scaled, state.dropout(op), keeps=saves)
        for number, each in zip(outputs, made, strict=op.kind is OpKind.FORWARD):
            values[number] = each
        if saves:
            values[saved] = kept
            if over:
                values[x] = None  # what is wanted of it is kept

    return run


def backward(state: State, at: int, op: Op) -> Instruction:
    """The whole backward pass; adds to an older gradient where an ADD would follow."""
    grad_weight, *outputs = op.outputs
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)
    back = _back(state, op, outputs)

    def run() -> None:
        into = room()
        rooms = parameters_of(into, layout)
        back(lambda add, gradient, read: add(rooms, gradient, read), [])
        state.values[grad_weight] = into

    return run


def backward_input(state: State, at: int, op: Op) -> Instruction:
    """The half that gives the inputs' gradients, and keeps what the parameters' are made of."""
    *outputs, half = op.outputs
    back = _back(state, op, outputs)

    def run() -> None:
        waiting: Waiting = []
        back(lambda add, gradient, read: waiting.append((add, gradient, read)), waiting)
        state.values[half] = waiting

    return run


def backward_weight(state: State, at: int, op: Op) -> Instruction:
    """The half that gives the weight's gradient, added to an older one where an ADD would follow."""
    half, grad_weight, values = op.inputs[2], op.outputs[0], state.values
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)

    def run() -> None:
        waiting: Waiting = values[half]
        values[half] = None
        into = room()
        rooms = parameters_of(into, layout)
        while waiting:
            add, gradient, read = waiting.pop(0)
            add(rooms, gradient, read)
        values[grad_weight] = into

    return run


def _back(state: State, op: Op, outputs: list[int]) -> Callable[[Take, Waiting], None]:
    """Through a layer, to the inputs' gradients; what the parameters' gradients are made of is taken, and may be kept.

    Each gradient is memory of its own, since others write over it.
    """
    (_, gradient, weight, saved, *carried), values = op.inputs, state.values
    own, passes = own_columns(state, op), state.passes[op.layer]

    def run(take: Take, waiting: Waiting) -> None:
        kept: Any = values[saved]
        values[saved] = None
        gradients = [own(values[number]) for number in (gradient, *carried)]
        made = passes.backward(kept, gradients, state.weights_of(op.layer, weight), take)
        taken = {each.data_ptr() for each in (*gradients, *(each for _, each, _ in waiting))}
        for number, each in zip(outputs, made, strict=False):
            if each is not None:  # there is none for tokens
                values[number] = each.clone() if each.data_ptr() in taken else each
                taken.add(each.data_ptr())

    return run

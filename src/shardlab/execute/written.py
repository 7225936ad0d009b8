"""A layer's passes where both are written out (see `shardlab.models.tensors.written`): nothing asks autograd.

What a forward pass keeps is a list of tensors, which the backward pass empties. It is given the weight anew, so a
weight that was gathered again is read from where it lies then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from shardlab.execute.gradient_room import gradient_room, own_columns, parameters_of
from shardlab.execute.state import State
from shardlab.models.tensors import AddGradients, Take, WrittenLayer
from shardlab.program import Op

Instruction = Callable[[], None]
Half = list[tuple[AddGradients, Tensor, Tensor]]
"""What the parameters' gradients are made of."""


def forward(state: State, at: int, op: Op, layer: WrittenLayer) -> Instruction:
    """A layer, with what its backward pass wants; of a RECOMPUTE that alone."""
    (x, weight, *carried), (*outputs, saved), values = op.inputs, op.outputs, state.values
    over = at in state.analysis.last_reads and at not in state.analysis.halved  # between halves the tape has it

    def run() -> None:
        given = [values[number] for number in (x, *carried)]
        made, values[saved] = layer.forward(given, state.flat_weight(op.layer, weight).views)
        for number, each in zip(outputs, made, strict=False):
            values[number] = each
        if over:
            values[x] = None  # what is wanted of it is kept

    return run


def backward(state: State, at: int, op: Op, layer: WrittenLayer) -> Instruction:
    """The whole backward pass; adds to an older gradient where an ADD would follow."""
    grad_weight, *outputs = op.outputs
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)
    back = _back(state, op, layer, outputs)

    def run() -> None:
        into = room()
        rooms = parameters_of(into, layout)
        back(lambda add, gradient, read: add(rooms, gradient, read), [])
        state.values[grad_weight] = into

    return run


def backward_input(state: State, at: int, op: Op, layer: WrittenLayer) -> Instruction:
    """The half that gives the inputs' gradients, and keeps what the parameters' are made of."""
    *outputs, half = op.outputs
    back = _back(state, op, layer, outputs)

    def run() -> None:
        kept: Half = []
        back(lambda add, gradient, read: kept.append((add, gradient, read)), kept)
        state.values[half] = kept

    return run


def backward_weight(state: State, at: int, op: Op, layer: WrittenLayer) -> Instruction:
    """The half that gives the weight's gradient, added to an older one where an ADD would follow."""
    half, grad_weight, values = op.inputs[2], op.outputs[0], state.values
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)

    def run() -> None:
        kept: Half = values[half]
        values[half] = None
        into = room()
        rooms = parameters_of(into, layout)
        while kept:
            add, gradient, read = kept.pop(0)
            add(rooms, gradient, read)
        values[grad_weight] = into

    return run


def _back(state: State, op: Op, layer: WrittenLayer, outputs: list[int]) -> Callable[[Take, Half], None]:
    """Through a layer, to the inputs' gradients; what the parameters' gradients are made of is taken, and may be kept.

    Each gradient is memory of its own, since others write over it.
    """
    (_, gradient, weight, saved, *carried), values = op.inputs, state.values
    own = own_columns(state, op)

    def run(take: Take, half: Half) -> None:
        kept: list[Any] = values[saved]
        values[saved] = None
        gradients = [own(values[number]) for number in (gradient, *carried)]
        made = layer.backward(kept, gradients, state.flat_weight(op.layer, weight).views, take)
        taken = {each.data_ptr() for each in (*gradients, *(each for _, each, _ in half))}
        for number, each in zip(outputs, made, strict=False):
            if each is not None:  # there is none for tokens
                values[number] = each.clone() if each.data_ptr() in taken else each
                taken.add(each.data_ptr())

    return run

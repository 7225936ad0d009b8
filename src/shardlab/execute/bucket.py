"""Collectives of one batch on torch.distributed: they run as one, on one tensor."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardlab.execute.communication import Start, places_of
from shardlab.execute.communicator import Communicator, Wait
from shardlab.execute.state import State
from shardlab.models.tensors.tokens import index_on
from shardlab.program import Op, OpKind

StartTogether = Callable[[State, Communicator, Sequence[Op]], Start]


def once(wait: Wait) -> Wait:
    """Wait at the first call; later ones have nothing to wait for."""
    waits = [wait]

    def first() -> None:
        while waits:
            waits.pop()()

    return first


def all_reduce(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """Where backward passes have put the gradients side by side, there; otherwise in a copy."""
    values, group, reduction = state.values, ops[0].group, ops[0].reduction
    assert group is not None
    lengths = _lengths(state, [op.inputs[0] for op in ops])

    def start() -> Wait:
        given: list[Tensor] = [values[op.inputs[0]] for op in ops]
        whole = state.take_side_by_side(ops[0].inputs[0])
        if whole is None:
            whole = torch.cat(given)
            given = list(torch.split(whole, lengths))
        wait = links.all_reduce(whole, group, reduction)
        return _delivered(state, ops, given, wait)

    return start


def all_gather(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """Each member's pieces one after the other; they are put together where they belong once all have come."""
    values, group = state.values, ops[0].group
    assert group is not None
    lengths = _lengths(state, [op.inputs[0] for op in ops])
    places = [places_of(state, op) for op in ops]
    ascending = [order == sorted(order) for order in places]
    columns = list(pairwise(accumulate(lengths, initial=0)))

    def start() -> Wait:
        piece = torch.cat([values[op.inputs[0]] for op in ops])
        inbox = piece.new_empty((len(group.ranks), len(piece)))
        wholes = [state.room(op.outputs[0]) for op in ops]
        for op, whole in zip(ops, wholes, strict=True):
            values[op.outputs[0]] = whole
        wait = links.all_gather(inbox.flatten(), piece, group)

        def sort() -> None:
            wait()
            for whole, order, in_order, (begin, end) in zip(wholes, places, ascending, columns, strict=True):
                if in_order:
                    whole.view(len(group.ranks), end - begin).copy_(inbox[:, begin:end])
                else:
                    pieces = inbox[:, begin:end].reshape(len(order), len(whole) // len(order))
                    whole.view(pieces.shape)[index_on(whole.device, tuple(order))] = pieces

        return sort

    return start


def reduce_scatter(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """What goes to one member lies together, in a copy."""
    values, group = state.values, ops[0].group
    assert group is not None
    lengths = _lengths(state, [op.outputs[0] for op in ops])
    in_arena = state.arena.side_by_side.get(ops[0].outputs[0])

    def start() -> Wait:
        wholes: list[Tensor] = [values[op.inputs[0]] for op in ops]
        mine = wholes[0].new_empty(sum(lengths)) if in_arena is None else in_arena
        rows = [whole.view(len(group.ranks), length) for whole, length in zip(wholes, lengths, strict=True)]
        given = torch.cat(rows, 1).flatten()
        wait = links.reduce_scatter(mine, given, group)
        delivered = _delivered(state, ops, torch.split(mine, lengths), wait)

        def finish(_: Tensor = given) -> None:  # which stays as long as it is sent
            delivered()

        return finish

    return start


def _lengths(state: State, numbers: Sequence[int]) -> list[int]:
    return [state.shapes.shape(state.specs[number])[0] for number in numbers]


def _delivered(state: State, ops: Sequence[Op], results: Sequence[Tensor], wait: Wait) -> Wait:
    """Give each op its result; weights have rooms of their own, to which they are copied when they have come."""
    analysis, values = state.analysis, state.values
    elsewhere: list[tuple[Tensor, Tensor]] = []
    for op, result in zip(ops, results, strict=True):
        output = op.outputs[0]
        values[output] = result
        if output in analysis.kept.arrives or output in analysis.slot:
            values[output] = state.room(output)
            elsewhere.append((values[output], result))

    def finish() -> None:
        wait()
        for there, result in elsewhere:
            there.copy_(result)

    return finish if elsewhere else wait


START_TOGETHER: dict[OpKind, StartTogether] = {
    OpKind.ALL_REDUCE: all_reduce,
    OpKind.ALL_GATHER: all_gather,
    OpKind.REDUCE_SCATTER: reduce_scatter,
}
"""By the kind of a batch's collectives."""

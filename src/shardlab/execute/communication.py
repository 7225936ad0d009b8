"""What each communication op of a tape does: it starts at once and gives how to wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

import torch

from shardlab.execute.communicator import Communicator, Wait
from shardlab.execute.state import State
from shardlab.program import Kind, Op, OpKind
from shardlab.program.values import bits

Start = Callable[[], Wait]


def all_reduce(state: State, links: Communicator, at: int, op: Op) -> Start:
    """In place where nobody reads the input any more."""
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    in_place = at in state.analysis.in_place.first_input
    assert group is not None

    def start() -> Wait:
        values[output] = values[given] if in_place else values[given].clone()
        return links.all_reduce(values[output], group)

    return start


def all_gather(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Weights into their buffer, other values into new room."""
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None
    shape = state.shapes.shape(state.specs[output])
    places = _places(state, op)

    def start() -> Wait:
        whole = values[output] = _room(state, output)
        if places == sorted(places):
            return links.all_gather(whole, values[given].contiguous(), group)
        inbox = torch.empty_like(whole)
        wait = links.all_gather(inbox, values[given].contiguous(), group)
        pieces = (len(places), shape[0] // len(places), *shape[1:])

        def sort() -> None:
            wait()
            whole.view(pieces)[places] = inbox.view(pieces)

        return sort

    return start


def _places(state: State, op: Op) -> list[int]:
    """For each piece, in the order in which the group's members give them, its place in the whole."""
    checked = state.checked
    members = checked.meetings[checked.meeting_of[state.rank][op.handle]].members
    holds = [checked.specs[rank][checked.program.tapes[rank][at].inputs[0]].holds for rank, _, at in members]
    of = math.lcm(*(each.of for each in holds))  # the whole may be counted in larger pieces
    given = [list(bits(each.refined(of).mask)) for each in holds]
    order = sorted(chain(*given))
    return [order.index(piece) for piece in chain(*given)]


def _room(state: State, number: int) -> torch.Tensor:
    spec = state.specs[number]
    if number in state.analysis.in_kept:
        return state.kept[spec.layer, spec.holds]
    shape, slot = state.shapes.shape(spec), state.analysis.slot.get(number)
    if slot is not None:
        return state.fill_buffer(slot, shape[0])
    tokens = spec.kind is Kind.ACTIVATION and spec.layer == 0
    return state.empty(shape, torch.int64 if tokens else torch.float64 if spec.kind is Kind.SCALAR else None)


def reduce_scatter(state: State, links: Communicator, at: int, op: Op) -> Start:
    """This member's slice of the sum."""
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None

    def start() -> Wait:
        values[output] = _room(state, output)
        return links.reduce_scatter(values[output], values[given], group)

    return start


def send(state: State, links: Communicator, at: int, op: Op) -> Start:
    """The value's tensor, which the tape keeps unchanged until the wait."""
    given, values, to, batch = op.inputs[0], state.values, op.peer, op.batch
    return lambda: links.send(values[given].contiguous(), to, batch)


def recv(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Into new room of the shape that the message has."""
    output, values, source, batch = op.outputs[0], state.values, op.peer, op.batch

    def start() -> Wait:
        values[output] = _room(state, output)
        return links.recv(values[output], source, batch)

    return start


START: dict[OpKind, Callable[[State, Communicator, int, Op], Start]] = {
    OpKind.ALL_REDUCE: all_reduce,
    OpKind.ALL_GATHER: all_gather,
    OpKind.REDUCE_SCATTER: reduce_scatter,
    OpKind.SEND: send,
    OpKind.RECV: recv,
}

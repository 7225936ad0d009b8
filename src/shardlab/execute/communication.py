"""What each communication op of a tape does: it starts at once and gives how to wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain

import torch

from shardlab.execute import exchange
from shardlab.execute.communicator import Communicator, Wait
from shardlab.execute.places import copy
from shardlab.execute.slicing import Join, along_sequence, cut_of, index_apart, join_of
from shardlab.execute.state import State
from shardlab.models.tensors.tokens import index_on
from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import bits

Start = Callable[[], Wait]


def all_reduce(state: State, links: Communicator, at: int, op: Op) -> Start:
    """In place where nobody reads the input any more, but weights into their buffer.

    A REDUCE as well: it writes over its tensor on all ranks, also where the root alone receives.
    """
    (given,), values, group = op.inputs, state.values, op.group
    in_place = at in state.analysis.in_place.first_input
    of_weights = state.specs[given].kind is Kind.WEIGHT
    assert group is not None

    def start() -> Wait:
        tensor: torch.Tensor = values[given]
        if of_weights and op.outputs:
            tensor = state.room(op.outputs[0]).copy_(tensor)
        elif of_weights or not in_place or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for output in op.outputs:
            values[output] = tensor
        if op.kind is OpKind.REDUCE:
            return links.reduce(tensor, group, op.root, op.reduction)
        return links.all_reduce(tensor, group, op.reduction)

    return start


def all_gather(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Weights into their buffer, other values into new room; a GATHER does the same on the root alone."""
    (given,), values, group = op.inputs, state.values, op.group
    assert group is not None

    def gather(whole: torch.Tensor | None, piece: torch.Tensor) -> Wait:
        if op.kind is OpKind.GATHER:
            return links.gather(whole, piece, group, op.root)
        assert whole is not None
        return links.all_gather(whole, piece, group)

    if not op.outputs:
        return lambda: gather(None, values[given].contiguous())
    (output,) = op.outputs
    shape = state.shapes.shape(state.specs[output])
    members = _given(state, op)
    if index_apart(members) is not None or along_sequence(members):
        return _gather_apart(state, gather, op, join_of(state.shapes, members))
    places = places_of(state, op)

    def start() -> Wait:
        whole = values[output] = state.room(output)
        if places == sorted(places):
            return gather(whole, values[given].contiguous())
        inbox = torch.empty_like(whole)
        wait = gather(inbox, values[given].contiguous())
        pieces = (len(places), shape[0] // len(places), *shape[1:])

        def sort() -> None:
            wait()
            whole.view(pieces)[index_on(whole.device, tuple(places))] = inbox.view(pieces)

        return sort

    return start


def _received(state: State, op: Op) -> list[Spec]:
    """What each member of a collective receives, in the group's order."""
    checked = state.checked
    members = checked.communications[checked.communication_of[state.rank][op.handle]].participants
    return [checked.specs[rank][checked.program.tapes[rank][at].outputs[0]] for rank, _, at in members]


def _given(state: State, op: Op) -> list[Spec]:
    """What each member of a collective gives, in the group's order."""
    checked = state.checked
    members = checked.communications[checked.communication_of[state.rank][op.handle]].participants
    return [checked.specs[rank][checked.program.tapes[rank][at].inputs[0]] for rank, _, at in members]


def _gather_apart(state: State, gather: Callable[[torch.Tensor, torch.Tensor], Wait], op: Op, join: Join) -> Start:
    """Pieces that lie apart in the whole: they are copied there once all have come."""
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None

    def start() -> Wait:
        piece = values[given].contiguous()
        inbox = piece.new_empty((len(group.ranks), *piece.shape))
        wait = gather(inbox.flatten(0, 1), piece)

        def finish() -> None:
            wait()
            values[output] = join(inbox.unbind())

        return finish

    return start


def places_of(state: State, op: Op) -> list[int]:
    """For each piece of a gather, in the order in which the members give them, its place in the whole."""
    members, whole = _given(state, op), state.specs[op.outputs[0]]
    of = math.lcm(whole.holds.of, *(member.holds.of for member in members))
    given = [list(bits(_pieces(member, of))) for member in members]
    order = sorted(chain(*given))
    return [order.index(piece) for piece in chain(*given)]


def _pieces(member: Spec, of: int) -> int:
    """What a member gives, as a bit set: microbatches, or some of `of` slices of a layer."""
    if member.kind in ROW_KINDS:
        return member.microbatches
    return member.holds.refined(of).mask


def reduce_scatter(state: State, links: Communicator, at: int, op: Op) -> Start:
    """This member's slice of the sum; of rows and tokens, in pieces that are first laid one after the other."""
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None
    spec = state.specs[given]
    parts = _received(state, op) if spec.kind in ROW_KINDS else []
    cuts = [cut_of(state.shapes, spec, part) for part in parts]
    over = at in state.analysis.last_copies

    def start() -> Wait:
        whole: torch.Tensor = values[given]
        if cuts:
            whole = torch.cat([cut(whole) for cut in cuts])
            if over:
                values[given] = None
        values[output] = state.room(output)
        return links.reduce_scatter(values[output], whole, group)

    return start


def broadcast(state: State, links: Communicator, at: int, op: Op) -> Start:
    """The root's own tensor, into new room on the others."""
    values, group = state.values, op.group
    assert group is not None

    def start() -> Wait:
        for given in op.inputs:
            return links.broadcast(values[given].contiguous(), group, op.root)
        (output,) = op.outputs
        values[output] = state.room(output)
        return links.broadcast(values[output], group, op.root)

    return start


def scatter(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Equal parts of the root's tensor, by their first dim, into new room."""
    (output,), values, group = op.outputs, state.values, op.group
    assert group is not None

    def start() -> Wait:
        values[output] = state.room(output)
        whole = next((values[given].contiguous() for given in op.inputs), None)
        return links.scatter(values[output], whole, group, op.root)

    return start


def barrier(state: State, links: Communicator, at: int, op: Op) -> Start:
    group = op.group
    assert group is not None
    return lambda: links.barrier(group)


def all_to_all(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Experts' buffers, into new room."""
    return exchange.all_to_all(state, links, at, op, _given(state, op), _received(state, op))


def send(state: State, links: Communicator, at: int, op: Op) -> Start:
    """The value's tensor, which the tape keeps unchanged until the wait."""
    given, values, to, batch = op.inputs[0], state.values, op.peer, op.batch
    return lambda: links.send(values[given].contiguous(), to, batch)


def recv(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Into new room of the shape that the message has."""
    output, values, source, batch = op.outputs[0], state.values, op.peer, op.batch

    def start() -> Wait:
        values[output] = state.room(output)
        return links.recv(values[output], source, batch)

    return start


def copied(state: State, links: Communicator, at: int, op: Op) -> Start:
    """Into room elsewhere or on the device; what an optimizer keeps moves there with all that refers to it."""
    (given,), (output,), values = op.inputs, op.outputs, state.values

    def start() -> Wait:
        if state.specs[given].kind is Kind.OPT_STATE:
            values[output] = values[given]
            return state.put_opt_state(state.specs[output])
        values[output] = state.room(output)
        return copy(values[output], values[given])

    return start


START: dict[OpKind, Callable[[State, Communicator, int, Op], Start]] = {
    OpKind.ALL_REDUCE: all_reduce,
    OpKind.ALL_GATHER: all_gather,
    OpKind.REDUCE_SCATTER: reduce_scatter,
    OpKind.ALL_TO_ALL: all_to_all,
    OpKind.BROADCAST: broadcast,
    OpKind.SCATTER: scatter,
    OpKind.GATHER: all_gather,
    OpKind.REDUCE: all_reduce,
    OpKind.BARRIER: barrier,
    OpKind.SEND: send,
    OpKind.RECV: recv,
    OpKind.OFFLOAD: copied,
    OpKind.RELOAD: copied,
}

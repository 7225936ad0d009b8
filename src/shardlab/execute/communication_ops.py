"""Communication ops of a tape.

For each kind, a function prepares the op once and returns the call of each step. The call starts the communication, and
returns a function that waits for its result.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from shardlab.execute.offload import copy
from shardlab.execute.slicing import Join, along_sequence, cut_of, index_apart, join_of
from shardlab.execute.state import State
from shardlab.execute.tape_analysis import Shapes
from shardlab.execute.transport.collectives import Communicator, Wait
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.rules.kinds import ROW_KINDS, bits
from shardlab.models.tensors.attention import index_tensor

Start = Callable[[], Wait]
"""Call that each step makes. It starts a communication, and returns the function that waits for it."""

Places = tuple[Tensor, ...]
"""Indices of elements of a tensor: an index grid for each of its first dims."""


def all_to_all(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare an ALL_TO_ALL, into new memory.

    A member sends to each member the cells and pieces that are both in the sender's input and in the receiver's output.
    All these parts have the same size.
    """
    (operand,), (output,), values, (_, transport) = op.inputs, op.outputs, state.values, links.group_of(op)
    input_spec, output_spec = state.specs[operand], state.specs[output]
    send_places = [_places(state, input_spec, _common(input_spec, member)) for member in _output_specs(state, op)]
    receive_places = [_places(state, output_spec, _common(member, output_spec)) for member in _input_specs(state, op)]
    shape, drops_input = state.shapes.shape(output_spec), index in state.analysis.last_copies

    def start() -> Wait:
        tensor: Tensor = values[operand]
        parts = torch.stack([tensor[places] for places in send_places])
        if drops_input:
            values[operand] = None
        inbox = torch.empty_like(parts)
        wait = links.wait_of(transport.all_to_all([inbox], [parts]))

        def sort() -> None:
            wait()
            whole = values[output] = inbox.new_empty(shape)
            for places, part in zip(receive_places, inbox, strict=True):
                whole[places] = part

        return sort

    return start


def _common(one: Spec, other: Spec) -> Spec:
    """Return the spec of the part that two members' values have in common: their common cells and pieces."""
    names = {index for index, _ in (*one.form.slices, *other.form.slices)}
    slices = tuple(sorted((index, one.pieces(index) & other.pieces(index)) for index in names))
    return one._replace(form=one.form.but(slices=slices), cells=one.cells & other.cells)


def _places(state: State, spec: Spec, part: Spec) -> Places:
    """Return the indices of the elements of `part` in the tensor of `spec`, a value that contains this part."""
    shapes, device = state.shapes, state.settings.device
    microbatches = list(bits(spec.microbatches))
    rows = [microbatches.index(m) for m in bits(part.microbatches)]
    if shapes.model.is_buffers(spec.layer):  # buffers of experts: by microbatch, then by expert
        piece_count = spec.form.space.count("expert")
        experts = shapes.model.activation_shape(spec.layer)[0] // piece_count
        expert_pieces = list(bits(spec.pieces("expert")))
        offsets = [
            expert_pieces.index(piece) * experts + e for piece in bits(part.pieces("expert")) for e in range(experts)
        ]
        return (torch.tensor([row * len(expert_pieces) * experts + e for row in rows for e in offsets], device=device),)
    rows = [row * shapes.rows + r for row in rows for r in range(shapes.rows)]
    places = (rows, shapes.positions(spec, part), _features(shapes, spec, part))
    return torch.meshgrid(*(torch.tensor(indices, device=device) for indices in places), indexing="ij")


def _features(shapes: Shapes, spec: Spec, part: Spec) -> list[int]:
    """Return the indices of the features of `part` among the features of `spec`, a value that contains this part.

    Both have consecutive whole heads, although a single piece of heads may be smaller than a head.
    """
    piece_count = spec.form.space.count("head")
    pieces, part_pieces = (list(bits(value_spec.pieces("head"))) for value_spec in (spec, part))
    places: list[int] = []
    start = 0
    for section in shapes.sections(spec):
        first, last, begin, end = (
            piece * section // piece_count for piece in (pieces[0], pieces[-1] + 1, part_pieces[0], part_pieces[-1] + 1)
        )
        places += range(start + begin - first, start + end - first)
        start += last - first
    return places


def all_reduce(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare an ALL_REDUCE or REDUCE: in place if no op reads the input later; weights are reduced in their buffer.

    A REDUCE overwrites its tensor on all ranks, although only the root receives the result.
    """
    (operand,), values, (group, transport) = op.inputs, state.values, links.group_of(op)
    in_place = index in state.analysis.in_place.first_input
    of_weights = state.specs[operand].kind is Kind.WEIGHT

    def start() -> Wait:
        tensor: torch.Tensor = values[operand]
        if of_weights and op.outputs:
            tensor = state.memory_for(op.outputs[0]).copy_(tensor)
        elif of_weights or not in_place or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        for output in op.outputs:
            values[output] = tensor
        if op.kind is OpKind.REDUCE:
            return links.wait_of(transport.reduce([tensor], group.ranks.index(op.root), op.reduction))
        return links.wait_of(transport.all_reduce([tensor], op.reduction))

    return start


def all_gather(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare an ALL_GATHER or GATHER. Weights are gathered into their buffer, other values into new memory."""
    (operand,), values, (group, transport) = op.inputs, state.values, links.group_of(op)

    def gather(whole: Sequence[torch.Tensor], piece: torch.Tensor) -> Wait:
        if op.kind is OpKind.GATHER:
            return links.wait_of(transport.gather(whole, [piece], group.ranks.index(op.root)))
        return links.wait_of(transport.all_gather(whole, [piece]))

    if not op.outputs:
        return lambda: gather([], values[operand].contiguous())
    (output,) = op.outputs
    shape = state.shapes.shape(state.specs[output])
    members = _input_specs(state, op)
    if index_apart(members) is not None or along_sequence(members):
        return _gather_apart(state, gather, op, len(group.ranks), join_of(state.shapes, members))
    places = places_of(state, op)

    def start() -> Wait:
        whole = values[output] = state.memory_for(output)
        if places == sorted(places):
            return gather([whole], values[operand].contiguous())
        inbox = torch.empty_like(whole)
        wait = gather([inbox], values[operand].contiguous())
        pieces = (len(places), shape[0] // len(places), *shape[1:])

        def sort() -> None:
            wait()
            whole.view(pieces)[index_tensor(whole.device, tuple(places))] = inbox.view(pieces)

        return sort

    return start


def _output_specs(state: State, op: Op) -> list[Spec]:
    """Return the spec of each member's output of a collective, in group order."""
    checked = state.checked
    members = checked.communications[checked.communication_of[state.rank][op.handle]].participants
    return [checked.specs[rank][checked.program.tapes[rank][index].outputs[0]] for rank, _, index in members]


def _input_specs(state: State, op: Op) -> list[Spec]:
    """Return the spec of each member's input of a collective, in group order."""
    checked = state.checked
    members = checked.communications[checked.communication_of[state.rank][op.handle]].participants
    return [checked.specs[rank][checked.program.tapes[rank][index].inputs[0]] for rank, _, index in members]


def _gather_apart(
    state: State, gather: Callable[[Sequence[torch.Tensor], torch.Tensor], Wait], op: Op, ranks: int, join: Join
) -> Start:
    """Prepare a gather whose pieces are not contiguous in the result. Once all have arrived, they are joined."""
    (operand,), (output,), values = op.inputs, op.outputs, state.values

    def start() -> Wait:
        piece = values[operand].contiguous()
        inbox = piece.new_empty((ranks, *piece.shape))
        wait = gather([inbox.flatten(0, 1)], piece)

        def finish() -> None:
            wait()
            values[output] = join(inbox.unbind())

        return finish

    return start


def places_of(state: State, op: Op) -> list[int]:
    """Return each piece's index in the result of a gather. The pieces are in group order of their senders."""
    members, whole = _input_specs(state, op), state.specs[op.outputs[0]]
    piece_count = math.lcm(whole.holds.of, *(member.holds.of for member in members))
    piece_numbers = [list(bits(_pieces(member, piece_count))) for member in members]
    order = sorted(chain(*piece_numbers))
    return [order.index(piece) for piece in chain(*piece_numbers)]


def _pieces(member: Spec, count: int) -> int:
    """Return a bit set of a member's pieces: the microbatches of rows, else the slices of a layer cut into `count`."""
    if member.kind in ROW_KINDS:
        return member.microbatches
    return member.holds.refined(count).mask


def reduce_scatter(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a REDUCE_SCATTER. Activations and their gradients are first copied, with the pieces in group order."""
    (operand,), (output,), values, (_, transport) = op.inputs, op.outputs, state.values, links.group_of(op)
    spec = state.specs[operand]
    parts = _output_specs(state, op) if spec.kind in ROW_KINDS else []
    cuts = [cut_of(state.shapes, spec, part) for part in parts]
    drops_input = index in state.analysis.last_copies

    def start() -> Wait:
        whole: torch.Tensor = values[operand]
        if cuts:
            whole = torch.cat([cut(whole) for cut in cuts])
            if drops_input:
                values[operand] = None
        values[output] = state.memory_for(output)
        return links.wait_of(transport.reduce_scatter([values[output]], [whole]))

    return start


def broadcast(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a BROADCAST of the root's tensor, into new memory on the other ranks."""
    values, (group, transport) = state.values, links.group_of(op)
    root = group.ranks.index(op.root)

    def start() -> Wait:
        for operand in op.inputs:
            return links.wait_of(transport.broadcast([values[operand].contiguous()], root))
        (output,) = op.outputs
        values[output] = state.memory_for(output)
        return links.wait_of(transport.broadcast([values[output]], root))

    return start


def scatter(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a SCATTER of equal parts of the root's tensor along its first dim, into new memory."""
    (output,), values, (group, transport) = op.outputs, state.values, links.group_of(op)
    root = group.ranks.index(op.root)

    def start() -> Wait:
        values[output] = state.memory_for(output)
        wholes = [values[operand].contiguous() for operand in op.inputs]
        return links.wait_of(transport.scatter([values[output]], wholes, root))

    return start


def barrier(state: State, links: Communicator, index: int, op: Op) -> Start:
    _, transport = links.group_of(op)
    return lambda: links.wait_of(transport.barrier())


def send(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a SEND. The tape does not change the value's tensor before the wait."""
    operand, values, peer, batch = op.inputs[0], state.values, op.peer, op.batch
    return lambda: links.send(values[operand].contiguous(), peer, batch)


def recv(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a RECV, into new memory."""
    output, values, source, batch = op.outputs[0], state.values, op.peer, op.batch

    def start() -> Wait:
        values[output] = state.memory_for(output)
        return links.recv(values[output], source, batch)

    return start


def copy_value(state: State, links: Communicator, index: int, op: Op) -> Start:
    """Prepare a copy between device, host and disk. An optimizer state is moved instead, together with its views."""
    (operand,), (output,), values = op.inputs, op.outputs, state.values

    def start() -> Wait:
        if state.specs[operand].kind is Kind.OPT_STATE:
            values[output] = values[operand]
            return state.put_opt_state(state.specs[output])
        values[output] = state.memory_for(output)
        return copy(values[output], values[operand])

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
    OpKind.OFFLOAD: copy_value,
    OpKind.RELOAD: copy_value,
}


# Collectives of one batch run as a single collective of torch.distributed, on one tensor.


def once(wait: Wait) -> Wait:
    """Return a function that calls `wait` the first time it is called, and later does nothing."""
    waits = [wait]

    def first() -> None:
        while waits:
            waits.pop()()

    return first


def all_reduce_together(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """Prepare several ALL_REDUCEs as one: in place if the gradients are adjacent in memory, else in a copy."""
    values, (_, transport) = state.values, links.group_of(ops[0])
    lengths = _lengths(state, [op.inputs[0] for op in ops])

    def start() -> Wait:
        tensors: list[Tensor] = [values[op.inputs[0]] for op in ops]
        whole = state.take_side_by_side(ops[0].inputs[0])
        if whole is None:
            whole = torch.cat(tensors)
            tensors = list(torch.split(whole, lengths))
        wait = links.wait_of(transport.all_reduce([whole], ops[0].reduction))
        return _store_results(state, ops, tensors, wait)

    return start


def all_gather_together(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """Prepare several ALL_GATHERs as one. Received pieces are copied into the results once all have arrived."""
    values, (group, transport) = state.values, links.group_of(ops[0])
    lengths = _lengths(state, [op.inputs[0] for op in ops])
    places = [places_of(state, op) for op in ops]
    ascending = [order == sorted(order) for order in places]
    columns = list(pairwise(accumulate(lengths, initial=0)))

    def start() -> Wait:
        piece = torch.cat([values[op.inputs[0]] for op in ops])
        inbox = piece.new_empty((len(group.ranks), len(piece)))
        wholes = [state.memory_for(op.outputs[0]) for op in ops]
        for op, whole in zip(ops, wholes, strict=True):
            values[op.outputs[0]] = whole
        wait = links.wait_of(transport.all_gather([inbox], [piece]))

        def sort() -> None:
            wait()
            for whole, order, in_order, (begin, end) in zip(wholes, places, ascending, columns, strict=True):
                if in_order:
                    whole.view(len(group.ranks), end - begin).copy_(inbox[:, begin:end])
                else:
                    pieces = inbox[:, begin:end].reshape(len(order), len(whole) // len(order))
                    whole.view(pieces.shape)[index_tensor(whole.device, tuple(order))] = pieces

        return sort

    return start


def reduce_scatter_together(state: State, links: Communicator, ops: Sequence[Op]) -> Start:
    """Prepare several REDUCE_SCATTERs as one. The parts for each member are concatenated in a copy."""
    values, (group, transport) = state.values, links.group_of(ops[0])
    lengths = _lengths(state, [op.outputs[0] for op in ops])
    in_arena = state.arena.side_by_side.get(ops[0].outputs[0])

    def start() -> Wait:
        wholes: list[Tensor] = [values[op.inputs[0]] for op in ops]
        result = wholes[0].new_empty(sum(lengths)) if in_arena is None else in_arena
        rows = [whole.view(len(group.ranks), length) for whole, length in zip(wholes, lengths, strict=True)]
        send_buffer = torch.cat(rows, 1).flatten()
        wait = links.wait_of(transport.reduce_scatter([result], [send_buffer]))
        wait_for_results = _store_results(state, ops, torch.split(result, lengths), wait)

        def finish(_: Tensor = send_buffer) -> None:  # keeps the tensor alive while it is sent
            wait_for_results()

        return finish

    return start


def _lengths(state: State, numbers: Sequence[int]) -> list[int]:
    return [state.shapes.shape(state.specs[number])[0] for number in numbers]


def _store_results(state: State, ops: Sequence[Op], results: Sequence[Tensor], wait: Wait) -> Wait:
    """Store the result of each op as a value, and return the function that waits for all results.

    The wait also copies weights into their own buffers.
    """
    analysis, values = state.analysis, state.values
    copies: list[tuple[Tensor, Tensor]] = []
    for op, result in zip(ops, results, strict=True):
        output = op.outputs[0]
        values[output] = result
        if output in analysis.kept_weights.arriving or output in analysis.slot:
            values[output] = state.memory_for(output)
            copies.append((values[output], result))

    def finish() -> None:
        wait()
        for target, result in copies:
            target.copy_(result)

    return finish if copies else wait


START_TOGETHER: dict[OpKind, Callable[[State, Communicator, Sequence[Op]], Start]] = {
    OpKind.ALL_REDUCE: all_reduce_together,
    OpKind.ALL_GATHER: all_gather_together,
    OpKind.REDUCE_SCATTER: reduce_scatter_together,
}
"""Functions that prepare a batch of collectives, by the kind of the collectives."""

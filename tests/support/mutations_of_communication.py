"""Mistakes in collectives: missing, doubled, of another kind, in another order or group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardlab.language import Group, Kind, Op, OpKind, Program, Reduction
from shardlab.language.mesh import group_of
from shardlab.language.ops import COLLECTIVES, ROOT_GIVES, ROOTED
from tests.support.mutating import (
    changed,
    everywhere,
    fresh_number,
    living_on,
    move_op,
    mutation,
    places,
    reading,
    renamed,
    wait_of,
    with_tape,
)
from tests.support.mutations_of_values import layer_of_result

REDUCES = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER})


def communications(program: Program, kinds: frozenset[OpKind]) -> Iterator[list[tuple[int, int]]]:
    """Yield (rank, index) of the members' ops for each collective: the k-th op of a group on each rank."""
    calls: dict[tuple[Group, int], list[list[tuple[int, int]]]] = {}
    for rank, tape in enumerate(program.tapes):
        counts: dict[Group, int] = {}
        for at, op in enumerate(tape):
            if op.kind in COLLECTIVES:
                assert op.group is not None
                turn = counts[op.group] = counts.get(op.group, -1) + 1
                calls.setdefault((op.group, turn), [[]])[0].append((rank, at))
    for (members,) in calls.values():
        rank, at = members[0]
        if program.tapes[rank][at].kind in kinds:
            yield members


def without_collective(program: Program, members: list[tuple[int, int]]) -> Program:
    """Leave out a collective on these members, each of which continues with its input."""
    for rank, at in members:
        tape = program.tapes[rank]
        op, wait = tape[at], wait_of(program, rank, tape[at].handle)
        freed = [i for i, o in enumerate(tape) if o.kind is OpKind.FREE and o.inputs == op.inputs]
        if not op.inputs or not op.outputs:  # a root's value that others lack, or a barrier
            freed = []
        ops = [o for i, o in enumerate(tape) if i not in (at, wait, *freed[:1])]
        for old, new in zip(op.outputs, op.inputs, strict=False):
            ops = renamed(ops, old, new)
        program = with_tape(program, rank, ops)
    return program


@mutation
def missing_reduce(program: Program) -> Iterator[Program]:
    for members in communications(program, REDUCES):
        yield without_collective(program, members)


@mutation
def missing_gather(program: Program) -> Iterator[Program]:
    for members in communications(program, frozenset({OpKind.ALL_GATHER})):
        yield without_collective(program, members)


@mutation
def double_reduce(program: Program) -> Iterator[Program]:
    """Reduce the result once more on every member, and continue with the new result."""
    for members in communications(program, REDUCES):
        mutant = program
        for rank, at in members:
            tape = mutant.tapes[rank]
            op, wait = tape[at], wait_of(mutant, rank, tape[at].handle)
            fresh = fresh_number(tape)
            handle = 1 + max(o.handle for o in tape)
            second = op._replace(kind=OpKind.ALL_REDUCE, inputs=op.outputs, outputs=(fresh,), handle=handle)
            free = Op(OpKind.FREE, -1, op.outputs)
            rest = renamed(tape[wait + 1 :], op.outputs[0], fresh)
            tape = [*tape[: wait + 1], second, Op(OpKind.WAIT, -1, handle=handle), free, *rest]
            mutant = with_tape(mutant, rank, tape)
        yield mutant


@mutation
def collective_of_another_kind(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COLLECTIVES):
        for kind in sorted(COLLECTIVES - {op.kind}, key=lambda k: k.value):
            yield changed(program, rank, at, op._replace(kind=kind))


@mutation
def collective_of_another_kind_everywhere(program: Program) -> Iterator[Program]:
    for members in communications(program, COLLECTIVES):
        for kind in sorted(COLLECTIVES, key=lambda k: k.value):
            mutant = program
            for rank, at in members:
                mutant = changed(mutant, rank, at, mutant.tapes[rank][at]._replace(kind=kind))
            if mutant.tapes != program.tapes:
                yield mutant


@mutation
def collectives_in_another_order(program: Program) -> Iterator[Program]:
    """Issue two successive collectives in the opposite order on one rank."""
    for rank, tape in enumerate(program.tapes):
        calls = [i for i, op in enumerate(tape) if op.kind in COLLECTIVES]
        for one, other in itertools.pairwise(calls):
            swapped = list(tape)
            swapped[one], swapped[other] = tape[other], tape[one]
            yield with_tape(program, rank, swapped)


@mutation
def collective_dropped_on_one_rank(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, *COLLECTIVES):
        yield without_collective(program, [(rank, at)])


@mutation
def wrong_group(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COLLECTIVES):
        assert op.group is not None
        ranks = op.group.ranks
        others = [(rank,), ranks[::-1], (*ranks, ranks[0]), (*ranks, program.ranks), (*ranks, -1), (), ranks[1:]]
        for other in others:
            if other != ranks:
                yield changed(program, rank, at, op._replace(group=group_of(op.group.axis, other)))
        yield changed(program, rank, at, op._replace(group=group_of("another axis", ranks)))
        yield changed(program, rank, at, op._replace(group=Group(op.group.axis, ranks)))
        yield changed(program, rank, at, op._replace(group=None))


# Mistakes in exchanges, of experts' buffers for microbatches or of heads for sequence slices, and in sums beside
# them.
#
# What all ranks do wrong in the same way is the hardest to see, so most are made on all ranks that do the same.


Exchange = tuple[int, Op]
"""Index on rank 0's tape of an all_to_all, and the op."""


def exchanges(program: Program) -> list[Exchange]:
    """Return the exchanges of rank 0."""
    return [(at, op) for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.ALL_TO_ALL]


def neighbours(program: Program) -> Iterator[Sequence[Exchange]]:
    """Yield each exchange alone, successive ones (of an attention, experts, or both passes), and all together."""
    all_exchanges = exchanges(program)
    for size in (1, 2, 3, 4, 6):
        for first in range(len(all_exchanges) - size + 1):
            yield all_exchanges[first : first + size]
    if all_exchanges:
        yield all_exchanges


def without_exchange(program: Program, at: int, op: Op) -> Program:
    """Leave out an exchange on all ranks, which continue with their inputs."""
    mutant = program
    for rank, exchange in everywhere(program, at, op):
        tape = mutant.tapes[rank]
        (source,), (result,) = exchange.inputs, exchange.outputs
        removed = [exchange, tape[wait_of(mutant, rank, exchange.handle)], Op(OpKind.FREE, -1, (result,))]
        mutant = with_tape(
            mutant, rank, living_on(renamed([o for o in tape if o not in removed], result, source), source)
        )
    return mutant


@mutation
def exchange_left_out(program: Program) -> Iterator[Program]:
    """Leave out exchanges on all ranks."""
    for some in neighbours(program):
        mutant = program
        for at, op in reversed(some):
            mutant = without_exchange(mutant, at, op)
        yield mutant


@mutation
def exchange_in_another_order(program: Program) -> Iterator[Program]:
    """Permute the ranks of the group, so that each member gets the pieces of another one."""
    for some in neighbours(program):
        for step in (-1, 1):
            mutant = program
            for at, op in some:
                for rank, exchange in everywhere(program, at, op):
                    assert exchange.group is not None
                    ranks = exchange.group.ranks
                    other = ranks[::-1] if step < 0 else (*ranks[step:], *ranks[:step])
                    mutant = changed(mutant, rank, at, exchange._replace(group=group_of(exchange.group.axis, other)))
            yield mutant


@mutation
def exchanged_twice(program: Program) -> Iterator[Program]:
    """Exchange the result once more on all ranks, and continue with the new result."""
    for at, op in exchanges(program):
        mutant = program
        for rank, exchange in everywhere(program, at, op):
            mutant = with_tape(
                mutant, rank, issue_after(mutant.tapes[rank], at, exchange._replace(inputs=exchange.outputs))
            )
        yield mutant


def issue_after(tape: list[Op], at: int, collective: Op) -> list[Op]:
    """Issue a collective on an output of op `at`, after its WAIT if it has one, and continue with the result."""
    (number,), fresh, handle = collective.inputs, fresh_number(tape), 1 + max(op.handle for op in tape)
    if tape[at].handle >= 0:
        at = next(index for index, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == tape[at].handle)
    ends = [Op(OpKind.WAIT, -1, handle=handle), Op(OpKind.FREE, -1, (number,))]
    issued = collective._replace(outputs=(fresh,), handle=handle)
    return [*tape[: at + 1], issued, *ends, *renamed(tape[at + 1 :], number, fresh)]


@mutation
def value_of_another_exchange(program: Program) -> Iterator[Program]:
    """Use the input or output of another exchange (of another layer, microbatch or pass), on rank 0 or on all ranks."""
    for (at, op), (other_at, other) in itertools.permutations(exchanges(program), 2):
        yield reading(program, 0, op, 0, other.inputs[0])
        other_input = other_output = program
        for rank, exchange in everywhere(program, at, op):
            theirs = program.tapes[rank]
            if other_at < len(theirs) and theirs[other_at].kind is other.kind:
                other_input = reading(other_input, rank, exchange, 0, theirs[other_at].inputs[0])
                tape = other_output.tapes[rank]
                readers = [o for o in tape if exchange.outputs[0] in o.inputs and o.kind is not OpKind.FREE]
                for reader in readers[:1]:
                    place = reader.inputs.index(exchange.outputs[0])
                    other_output = reading(other_output, rank, reader, place, theirs[other_at].outputs[0])
        yield other_input
        yield other_output


@mutation
def collectives_of_one_value_in_another_order(program: Program) -> Iterator[Program]:
    """Swap the reduction and the exchange or gather of a value."""
    tape = program.tapes[0]
    calls = {op.outputs[0]: (at, op) for at, op in enumerate(tape) if op.kind in COLLECTIVES and op.outputs}
    for second_at, second_op in calls.values():
        if not second_op.inputs or second_op.inputs[0] not in calls:
            continue
        at, op = calls[second_op.inputs[0]]
        mutant = program
        for rank, first in everywhere(program, at, op):
            second = program.tapes[rank][second_at] if second_at < len(program.tapes[rank]) else first
            if second.inputs == first.outputs:
                swapped = [o._replace(kind=w.kind, group=w.group) for o, w in ((first, second), (second, first))]
                mutant = changed(changed(mutant, rank, at, swapped[0]), rank, second_at, swapped[1])
        yield mutant


@mutation
def reduced_after_it_is_used(program: Program) -> Iterator[Program]:
    """Give a layer or an exchange one term of a sum, and reduce its output in place of the sum."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind not in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER):
            continue
        mutant = program
        for rank, reduce in everywhere(program, at, op):
            tape = used_before(program, program.tapes[rank], reduce)
            mutant = with_tape(mutant, rank, tape) if tape else mutant
        yield mutant


def used_before(program: Program, tape: list[Op], reduce: Op) -> list[Op] | None:
    """Let the first reader of a sum read the rank's term, and reduce the reader's output; None if it has no output."""
    (term,), (total,) = reduce.inputs, reduce.outputs
    reader = next((o for o in tape if total in o.inputs and o.kind is not OpKind.FREE), None)
    if reader is None or not reader.outputs:
        return None
    ops = [o for o in tape if o != reduce and not (o.kind is OpKind.WAIT and o.handle == reduce.handle)]
    ops = [o for o in living_on(ops, term) if o != Op(OpKind.FREE, -1, (total,))]
    late = renamed([reader], total, term)[0]
    ops = renamed([late if o == reader else o for o in ops], total, term)
    layer = reader.layer if reader.kind in COLLECTIVES else layer_of_result(program, reader, 0)
    number = reader.outputs[0]
    return issue_after(ops, ops.index(late), reduce._replace(kind=OpKind.ALL_REDUCE, layer=layer, inputs=(number,)))


# Mistakes in waits and messages.


@mutation
def missing_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        yield changed(program, rank, at)


@mutation
def late_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        for to in (at + 1, at + 2, len(program.tapes[rank]) - 1):
            if to < len(program.tapes[rank]):
                yield move_op(program, rank, at, to)


@mutation
def wait_for_another_handle(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.WAIT):
        for handle in (op.handle - 1, op.handle + 1, 10**6):
            yield changed(program, rank, at, op._replace(handle=handle))


@mutation
def wrong_peer(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SEND, OpKind.RECV):
        for peer in range(-1, program.ranks + 1):
            if peer != op.peer:
                yield changed(program, rank, at, op._replace(peer=peer))


def dropped_message(program: Program, kind: OpKind) -> Iterator[Program]:
    for rank, at, op in places(program, kind):
        wait = wait_of(program, rank, op.handle)
        yield with_tape(program, rank, [o for i, o in enumerate(program.tapes[rank]) if i not in (at, wait)])


@mutation
def dropped_send(program: Program) -> Iterator[Program]:
    yield from dropped_message(program, OpKind.SEND)


@mutation
def dropped_recv(program: Program) -> Iterator[Program]:
    yield from dropped_message(program, OpKind.RECV)


def swapped(program: Program, kind: OpKind) -> Iterator[Program]:
    """Swap two messages between the same ranks, or move one behind the other."""
    for rank, tape in enumerate(program.tapes):
        messages = [i for i, op in enumerate(tape) if op.kind is kind]
        for n, one in enumerate(messages):
            for other in messages[n + 1 :]:
                if tape[one].peer == tape[other].peer:
                    exchanged = list(tape)
                    exchanged[one], exchanged[other] = tape[other], tape[one]
                    yield with_tape(program, rank, exchanged)
                    yield move_op(program, rank, one, other)


@mutation
def swapped_sends(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.SEND)


@mutation
def swapped_recvs(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.RECV)


@mutation
def swapped_senders_values(program: Program) -> Iterator[Program]:
    """Swap the values of two successive sends."""
    for rank, tape in enumerate(program.tapes):
        sends = [i for i, op in enumerate(tape) if op.kind is OpKind.SEND]
        for one, other in itertools.pairwise(sends):
            a, b = tape[one], tape[other]
            mutant = list(tape)
            mutant[one] = a._replace(inputs=b.inputs, layer=b.layer)
            mutant[other] = b._replace(inputs=a.inputs, layer=a.layer)
            yield with_tape(program, rank, mutant)


@mutation
def broken_batch(program: Program) -> Iterator[Program]:
    """Take an op out of the batch of an exchange, or add another op to it."""
    for rank, at, op in places(program, OpKind.SEND, OpKind.RECV):
        yield changed(program, rank, at, op._replace(batch=0 if op.batch else 5))
        if op.batch >= 0 and at + 2 < len(program.tapes[rank]):
            yield move_op(program, rank, at, at + 2)


# Mistakes about the root of a collective, and about what becomes of the members' values.


@mutation
def another_root(program: Program) -> Iterator[Program]:
    """Change the root on one member, or on all members, so that they agree on a wrong root."""
    for rank, at, op in places(program, *COLLECTIVES):
        for root in range(-1, program.ranks + 1):
            if root != op.root:
                yield changed(program, rank, at, op._replace(root=root))
    for members in communications(program, ROOTED):
        for root in range(program.ranks):
            mutant = program
            for rank, at in members:
                mutant = changed(mutant, rank, at, program.tapes[rank][at]._replace(root=root))
            if mutant.tapes != program.tapes:
                yield mutant


@mutation
def another_reduction(program: Program) -> Iterator[Program]:
    """Change the reduction on one member, or on all."""
    for members in communications(program, COLLECTIVES):
        for reduction in Reduction:
            mutant = program
            for rank, at in members:
                op = program.tapes[rank][at]
                if op.reduction is not reduction:
                    yield changed(program, rank, at, op._replace(reduction=reduction))
                mutant = changed(mutant, rank, at, op._replace(reduction=reduction))
            if mutant.tapes != program.tapes:
                yield mutant


@mutation
def another_value_from_the_root(program: Program) -> Iterator[Program]:
    """Let receiving ranks expect another layer or other microbatches."""
    for rank, at, op in places(program, *ROOT_GIVES):
        if op.expect is not None:
            for layer, microbatches in ((1, 0), (-1, 0), (0, 1), (0, -9)):
                other = op.expect._replace(
                    layer=op.expect.layer + layer, microbatches=op.expect.microbatches + microbatches
                )
                yield changed(program, rank, at, op._replace(expect=other, layer=other.layer))


@mutation
def root_left_out(program: Program) -> Iterator[Program]:
    """Leave out a collective on its root, which continues with its input or its part of it."""
    for members in communications(program, ROOTED):
        for rank, at in members:
            tape = program.tapes[rank]
            op = tape[at]
            if rank == op.root:
                removed = {at, wait_of(program, rank, op.handle)}
                yield with_tape(program, rank, [o for i, o in enumerate(tape) if i not in removed])


@mutation
def reduced_on_the_root_again(program: Program) -> Iterator[Program]:
    """Sum a replicated value once more on its first rank, which continues with the result."""
    for members in communications(program, frozenset({OpKind.ALL_REDUCE, OpKind.BROADCAST})):
        mutant, root = program, members[0][0]
        for rank, at in members:
            tape = mutant.tapes[rank]
            op, wait = tape[at], wait_of(mutant, rank, tape[at].handle)
            number = (op.outputs or op.inputs)[0]
            outputs = (fresh_number(tape),) if rank == root else ()
            handle = 1 + max(o.handle for o in tape)
            group = op.group
            reduce = Op(OpKind.REDUCE, op.layer, (number,), outputs, handle, group, root=root)
            rest = [
                o._replace(inputs=tuple(outputs[0] if outputs and n == number else n for n in o.inputs)) for o in tape
            ]
            free = [Op(OpKind.FREE, -1, (number,))] if outputs else []
            ops = [*tape[: wait + 1], reduce, Op(OpKind.WAIT, -1, handle=handle), *free, *rest[wait + 1 :]]
            mutant = with_tape(mutant, rank, ops)
        yield mutant


# Mistakes in the way that blocks of keys and values go, and their gradients home.


BLOCKS = (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES)


@mutation
def another_block_sent(program: Program) -> Iterator[Program]:
    """Send another block, or the gradient of another block, on one rank or on all."""
    for rank, at, op in places(program, OpKind.SEND):
        blocks = blocks_of(program, program.tapes[rank])
        for other in sorted(blocks - set(op.inputs)) if op.inputs[0] in blocks else []:
            yield reading(program, rank, op, 0, other)
            mutant = program
            for member, send in everywhere(program, at, op):
                if {send.inputs[0], other} <= blocks_of(program, program.tapes[member]):
                    mutant = reading(mutant, member, send, 0, other)
            yield mutant


def blocks_of(program: Program, tape: list[Op]) -> set[int]:
    """Numbers of a rank's blocks of keys and values, local and received, and of their gradients."""
    numbers: set[int] = set()
    for op in tape:
        received = op.expect is not None and op.expect.kind in BLOCKS
        gathers = op.kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ADD) and op.inputs[0] in numbers
        projects = op.kind is OpKind.FORWARD and program.sizes.signatures[op.layer].projects
        if projects or op.kind is OpKind.ATTEND_BACKWARD:
            numbers.add(op.outputs[1])
        elif received or gathers:
            numbers |= set(op.outputs)
    return numbers


def sends_of_hop(program: Program, at: int, op: Op) -> list[tuple[int, Op]]:
    """Yield (rank, send) of all ranks that have the same send at the same index."""
    return [(rank, send) for rank, send in everywhere(program, at, op) if send.batch >= 0]


@mutation
def hop_the_other_way(program: Program) -> Iterator[Program]:
    """Send one hop's block or gradient in the opposite direction on all ranks, so that it reaches a wrong rank."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, send in sends_of_hop(program, at, op):
            batch = {index: o for index, o in enumerate(program.tapes[rank]) if o.batch == send.batch}
            peers = [o.peer for o in batch.values()][::-1]
            for (index, o), peer in zip(batch.items(), peers, strict=True):
                mutant = changed(mutant, rank, index, o._replace(peer=peer))
        yield mutant


@mutation
def hop_left_out(program: Program) -> Iterator[Program]:
    """Leave out one hop on all ranks: each continues with its block, or with a gradient of another rank's block."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, send in sends_of_hop(program, at, op):
            mutant = with_tape(mutant, rank, _without_hop(mutant, rank, send))
        yield mutant


def _without_hop(program: Program, rank: int, send: Op) -> list[Op]:
    tape = program.tapes[rank]
    batch = [op for op in tape if op.batch == send.batch]
    recv = next(op for op in batch if op.kind is OpKind.RECV)
    removed = [*batch, *(tape[wait_of(program, rank, op.handle)] for op in batch)]
    block, received, fresh = send.inputs[0], recv.outputs[0], fresh_number(tape)
    if any(received in op.inputs and block in op.inputs for op in tape):
        return renamed([op for op in tape if op not in removed], received, fresh)  # the value would be added to itself
    once = Op(OpKind.FREE, -1, (block,))
    ops = [op for op in tape if op not in removed and op != once]
    freed_twice = renamed(ops, received, block)
    return living_on(freed_twice, block)

"""Mistakes put into correct tapes: each mutation yields programs that differ from a right one in one place."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from shardlab.program import Group, Holds, Mesh, Op, OpKind, Program, Sizes
from shardlab.program.mesh import group_of
from shardlab.program.tape import COLLECTIVES, COMMUNICATION
from tests.support import mutations_of_halves, mutations_of_norms, mutations_of_roots, mutations_of_slices
from tests.support.mutating import (
    MUTATIONS,
    changed,
    fresh_number,
    meetings,
    moved,
    mutation,
    places,
    renamed,
    wait_of,
    with_tape,
)

__all__ = [
    "MUTATIONS",
    "changed",
    "moved",
    "mutations_of_halves",
    "mutations_of_norms",
    "mutations_of_roots",
    "mutations_of_slices",
    "places",
    "with_tape",
]

REDUCES = frozenset({OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER})


# Ops dropped, doubled and out of order.


@mutation
def dropped_op(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program):
        yield changed(program, rank, at)


@mutation
def duplicated_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        yield changed(program, rank, at, op, op)


@mutation
def duplicated_op_with_new_numbers(program: Program) -> Iterator[Program]:
    """The same thing done again, and its result used in place of the first one."""
    for rank, at, op in places(program):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        handle = 1 + max(o.handle for o in tape) if op.handle >= 0 and op.kind is not OpKind.WAIT else op.handle
        again = op._replace(outputs=tuple(range(fresh, fresh + len(op.outputs))), handle=handle)
        rest = tape[at + 1 :]
        for old, new in zip(op.outputs, again.outputs, strict=True):
            rest = renamed(rest, old, new)
        waits = [Op(OpKind.WAIT, -1, handle=handle)] if op.kind in COMMUNICATION else []
        yield with_tape(program, rank, [*tape[: at + 1], again, *waits, *rest])


@mutation
def swapped_neighbours(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program):
        if at:
            yield moved(program, rank, at, at - 1)


@mutation
def swapped_with_a_later_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        tape = list(program.tapes[rank])
        for distance in (3, 7, 20):
            if at + distance < len(tape):
                tape[at], tape[at + distance] = tape[at + distance], op
                yield with_tape(program, rank, tape)
                tape = list(program.tapes[rank])


# Wrong layers, microbatches, values, shards.


@mutation
def wrong_layer(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        if op.kind not in (OpKind.WAIT, OpKind.FREE):
            for layer in (op.layer - 1, op.layer + 1, program.layers + 7):
                yield changed(program, rank, at, op._replace(layer=layer))


@mutation
def wrong_value(program: Program) -> Iterator[Program]:
    """An op reads another value of its rank: of another layer, microbatch or kind, partial or stale."""
    for rank, at, op in places(program):
        numbers = sorted({n for o in program.tapes[rank] for n in o.outputs})
        for place, number in enumerate(op.inputs):
            index = numbers.index(number)
            for other in numbers[max(0, index - 6) : index + 7]:
                if other != number:
                    inputs = (*op.inputs[:place], other, *op.inputs[place + 1 :])
                    yield changed(program, rank, at, op._replace(inputs=inputs))


@mutation
def wrong_microbatch(program: Program) -> Iterator[Program]:
    total = program.microbatches
    for rank, at, op in places(program, OpKind.LOAD_BATCH):
        assert op.holds is not None
        mask = op.holds.mask
        for other in {(mask << 1 | mask >> (total - 1)) & ((1 << total) - 1), mask | 1, mask ^ 1, 1 << total, 0} - {
            mask
        }:
            yield changed(program, rank, at, op._replace(holds=Holds(other, total)))


@mutation
def wrong_expected_message(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.RECV):
        assert op.expect is not None
        for other in (op.expect.microbatches << 1, op.expect.microbatches ^ 1, -1):
            yield changed(program, rank, at, op._replace(expect=op.expect._replace(microbatches=other)))
        yield changed(program, rank, at, op._replace(expect=op.expect._replace(layer=op.expect.layer + 1)))


@mutation
def wrong_shard(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        assert op.holds is not None
        mask, of = op.holds
        others = {Holds(1 << i, of) for i in range(of)} | {Holds(1, of + 1), Holds(1, 2 * of), Holds(mask << of, of)}
        for other in others - {op.holds}:
            yield changed(program, rank, at, op._replace(holds=other))


# Lives.


@mutation
def early_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        for distance in (1, 2, 3, 5, 9):
            if at >= distance:
                yield moved(program, rank, at, at - distance)


@mutation
def missing_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        yield changed(program, rank, at)


# Updates.


@mutation
def early_update(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.UPDATE):
        for to in range(0, at, max(1, at // 12)):
            yield moved(program, rank, at, to)


@mutation
def stale_weight(program: Program) -> Iterator[Program]:
    """The update comes before an op that reads the weight, and that op then reads the new one."""
    for rank, at, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        old, new = update.inputs[1], update.outputs[0]
        for reader in [i for i in range(at) if old in tape[i].inputs]:
            middle = renamed(tape[reader:at], old, new)
            yield with_tape(program, rank, [*tape[:reader], update, *middle, *tape[at + 1 :]])


@mutation
def weight_read_after_its_update(program: Program) -> Iterator[Program]:
    """A forward pass is done once more, with the new weight; its activation is kept until then."""
    for rank, _, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        for op in [o for o in tape if o.kind is OpKind.FORWARD and o.inputs[1] == update.inputs[1]]:
            free = Op(OpKind.FREE, -1, op.inputs[:1])
            rest = [o for o in tape if o != free]
            after = rest.index(update) + 1
            again = op._replace(inputs=(op.inputs[0], update.outputs[0]), outputs=(fresh,))
            freed = [Op(OpKind.FREE, -1, (fresh,)), free]
            yield with_tape(program, rank, [*rest[:after], again, *freed, *rest[after:]])


@mutation
def weight_left_stale(program: Program) -> Iterator[Program]:
    """The gradient is there, but the slice stays as it was."""
    for rank, at, _ in places(program, OpKind.UPDATE):
        yield changed(program, rank, at)


@mutation
def second_update(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.UPDATE):
        fresh = fresh_number(program.tapes[rank])
        again = op._replace(inputs=(op.inputs[0], *op.outputs), outputs=(fresh, fresh + 1))
        yield changed(program, rank, at, op, again)


# Collectives.


def without_collective(program: Program, members: list[tuple[int, int]]) -> Program:
    """These members do not issue it, and each goes on with its own value."""
    for rank, at in members:
        tape = program.tapes[rank]
        op, wait = tape[at], wait_of(program, rank, tape[at].handle)
        freed = [i for i, o in enumerate(tape) if o.kind is OpKind.FREE and o.inputs == op.inputs]
        if not op.inputs or not op.outputs:  # a root's value that others lack, or a barrier
            freed = []
        kept = [o for i, o in enumerate(tape) if i not in (at, wait, *freed[:1])]
        for old, new in zip(op.outputs, op.inputs, strict=False):
            kept = renamed(kept, old, new)
        program = with_tape(program, rank, kept)
    return program


@mutation
def missing_reduce(program: Program) -> Iterator[Program]:
    for members in meetings(program, REDUCES):
        yield without_collective(program, members)


@mutation
def missing_gather(program: Program) -> Iterator[Program]:
    for members in meetings(program, frozenset({OpKind.ALL_GATHER})):
        yield without_collective(program, members)


@mutation
def double_reduce(program: Program) -> Iterator[Program]:
    """Every member reduces the result once more, and goes on with that."""
    for members in meetings(program, REDUCES):
        mutant = program
        for rank, at in members:
            tape = mutant.tapes[rank]
            op, wait = tape[at], wait_of(mutant, rank, tape[at].handle)
            fresh = fresh_number(tape)
            handle = 1 + max(o.handle for o in tape)
            again = op._replace(kind=OpKind.ALL_REDUCE, inputs=op.outputs, outputs=(fresh,), handle=handle)
            free = Op(OpKind.FREE, -1, op.outputs)
            rest = renamed(tape[wait + 1 :], op.outputs[0], fresh)
            tape = [*tape[: wait + 1], again, Op(OpKind.WAIT, -1, handle=handle), free, *rest]
            mutant = with_tape(mutant, rank, tape)
        yield mutant


@mutation
def collective_of_another_kind(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COLLECTIVES):
        for kind in sorted(COLLECTIVES - {op.kind}, key=lambda k: k.value):
            yield changed(program, rank, at, op._replace(kind=kind))


@mutation
def collective_of_another_kind_everywhere(program: Program) -> Iterator[Program]:
    for members in meetings(program, COLLECTIVES):
        for kind in sorted(COLLECTIVES, key=lambda k: k.value):
            mutant = program
            for rank, at in members:
                mutant = changed(mutant, rank, at, mutant.tapes[rank][at]._replace(kind=kind))
            if mutant.tapes != program.tapes:
                yield mutant


@mutation
def collectives_in_another_order(program: Program) -> Iterator[Program]:
    """One rank issues two collectives of a group in the other order."""
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


# Waits and messages.


@mutation
def missing_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        yield changed(program, rank, at)


@mutation
def late_wait(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.WAIT):
        for to in (at + 1, at + 2, len(program.tapes[rank]) - 1):
            if to < len(program.tapes[rank]):
                yield moved(program, rank, at, to)


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
    """Two messages between the same ranks change places."""
    for rank, tape in enumerate(program.tapes):
        messages = [i for i, op in enumerate(tape) if op.kind is kind]
        for n, one in enumerate(messages):
            for other in messages[n + 1 :]:
                if tape[one].peer == tape[other].peer:
                    exchanged = list(tape)
                    exchanged[one], exchanged[other] = tape[other], tape[one]
                    yield with_tape(program, rank, exchanged)
                    yield moved(program, rank, one, other)


@mutation
def swapped_sends(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.SEND)


@mutation
def swapped_recvs(program: Program) -> Iterator[Program]:
    yield from swapped(program, OpKind.RECV)


@mutation
def swapped_senders_values(program: Program) -> Iterator[Program]:
    """Two sends keep their places, but each sends the other's value."""
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
    """Ops that an exchange issues together are torn apart, or others are counted in."""
    for rank, at, op in places(program, OpKind.SEND, OpKind.RECV):
        yield changed(program, rank, at, op._replace(batch=0 if op.batch else 5))
        if op.batch >= 0 and at + 2 < len(program.tapes[rank]):
            yield moved(program, rank, at, at + 2)


# Tapes that no writer makes.


@mutation
def malformed_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        for inputs in (
            op.inputs[:-1],
            (*op.inputs, 0),
            tuple(-1 - n for n in op.inputs),
            tuple(n + 10**6 for n in op.inputs),
        ):
            if inputs != op.inputs:
                yield changed(program, rank, at, op._replace(inputs=inputs))
        for outputs in (
            op.outputs[:-1],
            (*op.outputs, 10**6),
            (*op.outputs, *op.outputs),
            tuple(-1 - n for n in op.outputs),
        ):
            if outputs != op.outputs:
                yield changed(program, rank, at, op._replace(outputs=outputs))
        if op.handle >= 0:
            for handle in (-1, op.handle - 1, op.handle + 1):
                yield changed(program, rank, at, op._replace(handle=handle))
        if op.holds is not None:
            mask, of = op.holds
            for holds in (None, Holds(mask, 0), Holds(mask, -1), Holds(-mask, of), Holds(0, of), Holds(1 << of, of)):
                yield changed(program, rank, at, op._replace(holds=holds))
        if op.expect is not None:
            yield changed(program, rank, at, op._replace(expect=None))


@mutation
def another_kind_of_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        for kind in OpKind:
            if kind is not op.kind:
                yield changed(program, rank, at, op._replace(kind=kind))


@mutation
def another_world(program: Program) -> Iterator[Program]:
    yield replace(program, mesh=Mesh(dp_shard=program.ranks + 1))
    yield replace(program, tapes=[*program.tapes, []])
    yield replace(program, tapes=program.tapes[:-1])
    yield replace(program, microbatches=program.microbatches + 1)
    yield replace(program, sizes=Sizes.puzzle(program.layers + 1))
    if program.microbatches > 1 and not program.sizes.kinds:  # two whole microbatches may be read as one in two slices
        yield replace(program, microbatches=program.microbatches - 1)
    if program.layers > 1:
        yield replace(program, sizes=Sizes.puzzle(program.layers - 1))

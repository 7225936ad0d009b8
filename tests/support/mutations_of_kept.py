"""Mistakes with the weights that a rank keeps: what writes them a second time."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import ExpectedValue, Kind, Op, OpKind, Program
from shardlab.language.mesh import group_of
from tests.support.mutating import fresh_number, living_on, mutation, places, renamed, with_tape


def copied(tape: list[Op], rank: int, op: Op, fresh: int) -> list[Op]:
    """A copy of the weight that an update is given, made by a group of one."""
    handle = 1 + max(other.handle for other in tape)
    group = group_of("dp_shard", (rank,))
    gather = Op(OpKind.ALL_GATHER, op.layer, op.inputs[1:2], (fresh,), handle, group)
    return [gather, Op(OpKind.WAIT, -1, handle=handle)]


@mutation
def a_second_state_of_a_weight(program: Program) -> Iterator[Program]:
    """Half of what an update has moved is moved again, given a copy of the old weight, by a state of its own."""
    for rank, _, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        gradient, _, state, *norms = op.inputs
        load = next((o for o in tape if o.kind is OpKind.LOAD_OPT_STATE and o.outputs == (state,)), None)
        if load is None or load.holds is None:
            continue
        for number in (gradient, *norms):
            tape = living_on(tape, number)
        copy, second, new, moved = range(fresh_number(tape), fresh_number(tape) + 4)
        again = Op(OpKind.UPDATE, op.layer, (gradient, copy, second, *norms), (new, moved))
        at = tape.index(op)
        for holds in load.holds.split(2):
            before = [load._replace(holds=holds, outputs=(second,)), *tape[:at], *copied(tape, rank, op, copy)]
            yield with_tape(program, rank, [*before, op, again, Op(OpKind.FREE, -1, (new,)), *tape[at + 1 :]])


@mutation
def an_update_after_an_arrival(program: Program) -> Iterator[Program]:
    """A rank is told by another one what a weight becomes, lets the old one go, and then steps a copy of it."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        copy, told = range(fresh_number(tape), fresh_number(tape) + 2)
        copying = copied(tape, rank, op, copy)
        handle = copying[0].handle + 1
        for other, there, same in places(program, OpKind.UPDATE):
            if other == rank or same.layer != op.layer:
                continue
            expect = ExpectedValue(Kind.WEIGHT, op.layer, 0)
            arrival = [
                Op(OpKind.FREE, -1, op.inputs[1:2]),
                Op(OpKind.RECV, op.layer, (), (told,), handle, peer=other, expect=expect),
                Op(OpKind.WAIT, -1, handle=handle),
            ]
            late = op._replace(inputs=(op.inputs[0], copy, *op.inputs[2:]))
            rest = renamed(tape[at + 1 :], op.outputs[0], told)
            mine = [*tape[:at], *copying, *arrival, late, Op(OpKind.FREE, -1, op.outputs[:1]), *rest]
            theirs = program.tapes[other]
            number = 1 + max(o.handle for o in theirs)
            send = Op(OpKind.SEND, op.layer, same.outputs[:1], (), number, peer=rank)
            telling = [*theirs[: there + 1], send, Op(OpKind.WAIT, -1, handle=number), *theirs[there + 1 :]]
            yield with_tape(with_tape(program, rank, mine), other, telling)

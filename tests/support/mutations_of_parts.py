"""Mistakes with slices cut on one rank and with their concatenation, and with the memory that slices share."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from shardlab.language import ExpectedValue, Holds, Kind, Op, OpKind, Program, Reduction
from shardlab.language.mesh import group_of
from shardlab.language.rules.kinds import ONE, factor_of
from tests.support.mutating import (
    changed,
    everywhere,
    fresh_number,
    living_on,
    mutation,
    places,
    reading,
    renamed,
    with_tape,
)


@mutation
def another_slice(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SLICE):
        mask, of = op.holds or (1, 1)
        for holds in (Holds(1, of), Holds(1 << of - 1, of), Holds(mask, of + 1), Holds(1 << of, of), Holds(3, of)):
            yield changed(program, rank, at, op._replace(holds=holds))
        yield changed(program, rank, at, op._replace(holds=None))


@mutation
def another_value_sliced(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.SLICE):
        for other in {n for o in program.tapes[rank][:at] for n in o.outputs}:
            yield reading(program, rank, op, 0, other)


@mutation
def another_zero(program: Program) -> Iterator[Program]:
    """A gradient of nothing in the place of one that is summed, or of other slices or another layer."""
    for rank, at, op in places(program, OpKind.ZERO_GRADIENT):
        for layer in (op.layer - 1, op.layer + 1):
            yield changed(program, rank, at, op._replace(layer=layer))
        for holds in (None, Holds(1, 2), Holds(2, 2), Holds(0, 1), Holds(2, 1)):
            yield changed(program, rank, at, op._replace(holds=holds))
    for rank, _, op in places(program, OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.ADD):
        fresh = fresh_number(program.tapes[rank])
        zero = Op(OpKind.ZERO_GRADIENT, op.layer, (), (fresh,), holds=Holds(1, 1))
        for place in range(len(op.inputs)):
            tape = living_on(program.tapes[rank], op.inputs[place])
            spoilt = op._replace(inputs=(*op.inputs[:place], fresh, *op.inputs[place + 1 :]))
            where = tape.index(op)
            end = Op(OpKind.FREE, -1, (fresh,))
            yield with_tape(program, rank, [*tape[:where], zero, spoilt, *tape[where + 1 :], end])


@mutation
def another_factor(program: Program) -> Iterator[Program]:
    """On one rank, or on all that do the same: a factor that does not cancel, or none."""
    for rank, at, op in places(program, OpKind.SCALE):
        assert op.factor is not None
        count = factor_of(1, ((1, 1),))
        for factor in (
            None,
            ONE,
            op.factor * 2,
            op.factor / 3,
            op.factor * op.factor,
            op.factor * count,
            1 / op.factor,
        ):
            yield changed(program, rank, at, op._replace(factor=factor))
            mutant = program
            for other, its in everywhere(program, at, op):
                mutant = changed(mutant, other, at, its._replace(factor=factor))
            yield mutant


@mutation
def scaled_once_more(program: Program) -> Iterator[Program]:
    """What a backward pass, a loss or a sum has made is halved."""
    makes = {OpKind.BACKWARD: (0, 1), OpKind.BACKWARD_WEIGHT: (0,), OpKind.LOSS: (0,), OpKind.ADD: (0,)}
    for rank, at, op in places(program, *makes):
        tape = program.tapes[rank]
        for place in makes[op.kind]:
            number, fresh = op.outputs[place], fresh_number(tape)
            half = Op(OpKind.SCALE, op.layer, (number,), (fresh,), factor=factor_of(Fraction(1, 2)))
            rest = renamed(tape[at + 1 :], number, fresh)
            yield with_tape(program, rank, [*tape[: at + 1], half, Op(OpKind.FREE, -1, (number,)), *rest])


@mutation
def mean_for_a_sum(program: Program) -> Iterator[Program]:
    """On all members, or on one."""
    for rank, at, op in places(program, OpKind.ALL_REDUCE, OpKind.REDUCE):
        other = Reduction.MEAN if op.reduction is Reduction.SUM else Reduction.SUM
        yield changed(program, rank, at, op._replace(reduction=other))
        mutant = program
        for member, its in everywhere(program, at, op):
            mutant = changed(mutant, member, at, its._replace(reduction=other))
        yield mutant


@mutation
def piece_left_out(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CONCATENATE):
        for place in range(len(op.inputs)):
            yield changed(program, rank, at, op._replace(inputs=op.inputs[:place] + op.inputs[place + 1 :]))


@mutation
def another_piece(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CONCATENATE):
        made = {n for o in program.tapes[rank][:at] for n in o.outputs}
        for place in range(len(op.inputs)):
            for other in (*op.inputs, *made):
                yield reading(program, rank, op, place, other)


def sliced(op: Op, number: int, made: int, holds: Holds) -> Op:
    return Op(OpKind.SLICE, op.layer, (number,), (made,), holds=holds)


@mutation
def slice_in_flight_while_it_is_updated(program: Program) -> Iterator[Program]:
    """A part of what an update writes, or of what it leaves, is being read through a slice."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        part, copy, handle = fresh_number(tape), fresh_number(tape) + 1, 1 + max(o.handle for o in tape)
        for holds in (Holds(1, 2), Holds(2, 3)):
            before = [
                sliced(op, op.inputs[1], part, holds),
                Op(OpKind.ALL_GATHER, op.layer, (part,), (copy,), handle, group_of("dp_shard", (rank,))),
            ]
            after = [Op(OpKind.WAIT, -1, handle=handle), *(Op(OpKind.FREE, -1, (n,)) for n in (part, copy))]
            yield with_tape(program, rank, [*tape[:at], *before, op, *after, *tape[at + 1 :]])


@mutation
def a_second_update_through_slices(program: Program) -> Iterator[Program]:
    """An update has moved a weight; then a slice of its old state moves a part of it again."""
    for rank, at, op in places(program, OpKind.UPDATE):
        gradient, weight, state, *norms = op.inputs
        tape = program.tapes[rank]
        for number in (gradient, *norms):
            tape = living_on(tape, number)
        view, part, new, moved = range(fresh_number(tape), fresh_number(tape) + 4)
        again = Op(OpKind.UPDATE, op.layer, (gradient, view, part, *norms), (new, moved))
        before = [sliced(op, weight, view, Holds(1, 1)), sliced(op, state, part, Holds(2, 2))]
        for both in ([op, again], [again, op]):
            gone = [Op(OpKind.FREE, -1, (n,)) for n in (new, moved)]
            yield with_tape(program, rank, [*tape[:at], *before, *both, *gone, *tape[at + 1 :]])


@mutation
def an_arrival_beside_a_slice(program: Program) -> Iterator[Program]:
    """A rank is told what a weight becomes, and then steps a slice of the old one, which had to stay."""
    for rank, at, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        view, told = range(fresh_number(tape), fresh_number(tape) + 2)
        handle = 1 + max(o.handle for o in tape)
        for other, there, same in places(program, OpKind.UPDATE):
            if other == rank or same.layer != op.layer:
                continue
            arrival = [
                sliced(op, op.inputs[1], view, Holds(1, 1)),
                Op(OpKind.FREE, -1, op.inputs[1:2]),
                Op(
                    OpKind.RECV,
                    op.layer,
                    (),
                    (told,),
                    handle,
                    peer=other,
                    expect=ExpectedValue(Kind.WEIGHT, op.layer, 0),
                ),
                Op(OpKind.WAIT, -1, handle=handle),
            ]
            late = op._replace(inputs=(op.inputs[0], view, *op.inputs[2:]))
            rest = renamed(tape[at + 1 :], op.outputs[0], told)
            mine = [*tape[:at], *arrival, late, Op(OpKind.FREE, -1, op.outputs[:1]), *rest]
            theirs = program.tapes[other]
            number = 1 + max(o.handle for o in theirs)
            send = Op(OpKind.SEND, op.layer, same.outputs[:1], (), number, peer=rank)
            telling = [*theirs[: there + 1], send, Op(OpKind.WAIT, -1, handle=number), *theirs[there + 1 :]]
            yield with_tape(with_tape(program, rank, mine), other, telling)

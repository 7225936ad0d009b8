"""Mistakes in attention over cut sequences: in what queries meet, and in who has which slices."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Holds, Op, OpKind, Program
from tests.support.mutating import (
    added_twice,
    changed,
    everywhere,
    mutation,
    places,
    reading,
    with_tape,
    without_summand,
)

MEETS = (OpKind.ATTEND, OpKind.ATTEND_BACKWARD)


@mutation
def block_met_twice(program: Program) -> Iterator[Program]:
    """What it gives is added twice: to the mix, to the queries' gradient or to the block's."""
    for rank, at, op in places(program, *MEETS):
        for number in op.outputs:
            layer = op.layer + (op.kind is OpKind.ATTEND)
            yield with_tape(program, rank, added_twice(program.tapes[rank], at, number, layer))


@mutation
def block_left_out(program: Program) -> Iterator[Program]:
    """The sum goes on without what it gives; or it is not met at all."""
    for rank, _, op in places(program, *MEETS):
        for number in op.outputs:
            rest = without_summand(program.tapes[rank], number)
            if rest is not None:
                at = rest.index(op) + 1
                yield with_tape(program, rank, [*rest[:at], Op(OpKind.FREE, -1, (number,)), *rest[at:]])
        tape: list[Op] | None = program.tapes[rank]
        for number in op.outputs:
            tape = tape and without_summand(tape, number)
        if tape:
            yield with_tape(program, rank, [o for o in tape if o != op])


@mutation
def blocks_of_another_meeting(program: Program) -> Iterator[Program]:
    """Queries, block, attended or gradient are those of another layer, microbatch or hop; on one rank or on all."""
    for rank, at, op in places(program, *MEETS):
        others = [(there, o) for r, there, o in places(program, op.kind) if r == rank and o != op]
        for there, other in others:
            for place in range(len(op.inputs)):
                yield reading(program, rank, op, place, other.inputs[place])
                mutant = program
                for member, its in everywhere(program, at, op):
                    theirs = program.tapes[member]
                    if there < len(theirs) and theirs[there].kind is op.kind:
                        mutant = reading(mutant, member, its, place, theirs[there].inputs[place])
                if rank == 0:
                    yield mutant


@mutation
def attended_in_part(program: Program) -> Iterator[Program]:
    """The next layer, or the way back, reads what the queries have mixed before they have met all."""
    for rank, tape in enumerate(program.tapes):
        made = {n for op in tape if op.kind is OpKind.ATTEND for n in op.outputs}
        for op in tape:
            if op.kind is OpKind.ADD and made & set(op.inputs):
                made |= set(op.outputs)
        for op in tape:
            if op.kind in (OpKind.ADD, OpKind.FREE, OpKind.WAIT):
                continue
            for place, number in enumerate(op.inputs):
                for other in sorted(made - {number}) if number in made else []:
                    yield reading(program, rank, op, place, other)


@mutation
def slices_dealt_otherwise(program: Program) -> Iterator[Program]:
    """A rank reads other slices of the sequence; or two have changed places; or all have runs of them."""
    loads = [place for place in places(program, OpKind.LOAD_BATCH) if place[2].holds]
    for rank, at, op in loads:
        assert op.holds is not None
        for other in {op.holds.mask << 1, op.holds.mask >> 1, op.holds.mask & op.holds.mask - 1} - {0}:
            yield changed(program, rank, at, op._replace(holds=Holds(other, op.holds.of)))
        for another, there, theirs in loads:
            if rank < another and op.holds != theirs.holds:
                mutant = changed(program, rank, at, op._replace(holds=theirs.holds))
                yield changed(mutant, another, there, theirs._replace(holds=op.holds))
    count = program.rules.space.sequence
    runs, mutant = program.mesh.cp, program
    for rank, at, op in loads:
        assert op.holds is not None
        if op.holds.of != program.microbatches * count or runs == 1:
            return
        place, size = program.mesh.coordinate(rank, "cp"), count // runs
        microbatches = {i // count for i in range(op.holds.of) if op.holds.mask >> i & 1}
        mask = sum(((1 << size) - 1) << m * count + place * size for m in microbatches)
        mutant = changed(mutant, rank, at, op._replace(holds=Holds(mask, op.holds.of)))
    yield mutant

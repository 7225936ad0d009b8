"""Mistakes in attention over cut sequences: in what queries meet, and in the way that blocks and gradients go."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.program import Holds, Kind, LayerKind, Op, OpKind, Program
from tests.support.mutating import (
    added_twice,
    changed,
    everywhere,
    fresh_number,
    living_on,
    mutation,
    places,
    reading,
    renamed,
    wait_of,
    with_tape,
    without_summand,
)

MEETS = (OpKind.ATTEND, OpKind.ATTEND_BACKWARD)
BLOCKS = (Kind.KEYS_VALUES, Kind.GRAD_KEYS_VALUES)


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
def another_block_sent(program: Program) -> Iterator[Program]:
    """A block, or a gradient of one, in the place of another, on one rank or on all."""
    for rank, at, op in places(program, OpKind.SEND):
        blocks = blocks_of(program, program.tapes[rank])
        for other in sorted(blocks - set(op.inputs)) if op.inputs[0] in blocks else []:
            yield reading(program, rank, op, 0, other)
            mutant = program
            for member, its in everywhere(program, at, op):
                if {its.inputs[0], other} <= blocks_of(program, program.tapes[member]):
                    mutant = reading(mutant, member, its, 0, other)
            yield mutant


def blocks_of(program: Program, tape: list[Op]) -> set[int]:
    """The numbers of a rank's blocks of keys and values, its own and those that came, and of their gradients."""
    found: set[int] = set()
    for op in tape:
        came = op.expect is not None and op.expect.kind in BLOCKS
        gathers = op.kind in (OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER, OpKind.ADD) and op.inputs[0] in found
        projects = op.kind is OpKind.FORWARD and program.sizes.kind(op.layer) is LayerKind.PROJECT
        if projects or op.kind is OpKind.ATTEND_BACKWARD:
            found.add(op.outputs[1])
        elif came or gathers:
            found |= set(op.outputs)
    return found


def exchanges(program: Program, at: int, op: Op) -> list[tuple[int, Op]]:
    """(rank, send) of all ranks that exchange the same at the same place."""
    return [(rank, its) for rank, its in everywhere(program, at, op) if its.batch >= 0]


@mutation
def hop_the_other_way(program: Program) -> Iterator[Program]:
    """All ranks send one hop's block or gradient to the rank before them: it comes to queries, or home, wrongly."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, its in exchanges(program, at, op):
            both = {there: o for there, o in enumerate(program.tapes[rank]) if o.batch == its.batch}
            peers = [o.peer for o in both.values()][::-1]
            for (there, o), peer in zip(both.items(), peers, strict=True):
                mutant = changed(mutant, rank, there, o._replace(peer=peer))
        yield mutant


@mutation
def hop_left_out(program: Program) -> Iterator[Program]:
    """Nobody sends, and each goes on with what it has: a block twice, or a gradient that is not at home."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is not OpKind.SEND or op.batch < 0:
            continue
        mutant = program
        for rank, its in exchanges(program, at, op):
            mutant = with_tape(mutant, rank, _without_hop(mutant, rank, its))
        yield mutant


def _without_hop(program: Program, rank: int, send: Op) -> list[Op]:
    tape = program.tapes[rank]
    both = [op for op in tape if op.batch == send.batch]
    recv = next(op for op in both if op.kind is OpKind.RECV)
    gone = [*both, *(tape[wait_of(program, rank, op.handle)] for op in both)]
    own, came, fresh = send.inputs[0], recv.outputs[0], fresh_number(tape)
    if any(came in op.inputs and own in op.inputs for op in tape):
        return renamed([op for op in tape if op not in gone], came, fresh)  # the value would be added to itself
    once = Op(OpKind.FREE, -1, (own,))
    kept = [op for op in tape if op not in gone and op != once]
    freed_twice = renamed(kept, came, own)
    return living_on(freed_twice, own)


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
    count = program.grid.sequence
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

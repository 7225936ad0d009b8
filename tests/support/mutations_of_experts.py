"""Mistakes in exchanges of experts' buffers, and in what dense layers carry past them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.program import Op, OpKind, Program
from tests.support.mutating import everywhere, fresh_number, mutation, places, reading, renamed, wait_of, with_tape

CARRIED = {
    OpKind.FORWARD: ((3, 2),),
    OpKind.BACKWARD: ((5, 4),),
    OpKind.BACKWARD_INPUT: ((5, 4),),
}
"""Where ops read what is carried: (how many values they then read, its place among these)."""


def exchanges(program: Program) -> Iterator[tuple[int, Op]]:
    """(index, op) of rank 0's all_to_alls."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind is OpKind.ALL_TO_ALL:
            yield at, op


def without_exchange(program: Program, at: int, op: Op) -> Program:
    """All ranks go on with their own buffers."""
    mutant = program
    for rank, its in everywhere(program, at, op):
        tape = mutant.tapes[rank]
        gone = [its, tape[wait_of(mutant, rank, its.handle)], Op(OpKind.FREE, -1, its.inputs)]
        mutant = with_tape(mutant, rank, renamed([o for o in tape if o not in gone], its.outputs[0], its.inputs[0]))
    return mutant


@mutation
def exchange_left_out(program: Program) -> Iterator[Program]:
    """One, or two that follow each other: the buffers stay where they were made."""
    found = list(exchanges(program))
    for at, op in found:
        yield without_exchange(program, at, op)
    for (one, first), (other, second) in itertools.pairwise(found):
        yield without_exchange(without_exchange(program, other, second), one, first)


@mutation
def exchanged_twice(program: Program) -> Iterator[Program]:
    """All ranks exchange the result once more, and go on with that."""
    for at, op in exchanges(program):
        mutant = program
        for rank, its in everywhere(program, at, op):
            tape = mutant.tapes[rank]
            wait, fresh, handle = wait_of(mutant, rank, its.handle), fresh_number(tape), 1 + max(o.handle for o in tape)
            again = its._replace(inputs=its.outputs, outputs=(fresh,), handle=handle)
            ends = [Op(OpKind.WAIT, -1, handle=handle), Op(OpKind.FREE, -1, its.outputs)]
            rest = renamed(tape[wait + 1 :], its.outputs[0], fresh)
            mutant = with_tape(mutant, rank, [*tape[: wait + 1], again, *ends, *rest])
        yield mutant


@mutation
def buffers_of_another_exchange(program: Program) -> Iterator[Program]:
    """All ranks exchange, or go on with, the buffers of another layer, microbatch or direction."""
    found = list(exchanges(program))
    for (at, op), (there, other) in itertools.permutations(found, 2):
        sent = went_on = program
        for rank, its in everywhere(program, at, op):
            theirs = program.tapes[rank]
            if there < len(theirs) and theirs[there].kind is other.kind:
                sent = reading(sent, rank, its, 0, theirs[there].inputs[0])
                tape = went_on.tapes[rank]
                readers = [o for o in tape if its.outputs[0] in o.inputs and o.kind is not OpKind.FREE]
                for reader in readers[:1]:
                    place = reader.inputs.index(its.outputs[0])
                    went_on = reading(went_on, rank, reader, place, theirs[there].outputs[0])
        yield sent
        yield went_on


@mutation
def carried_of_another_pass(program: Program) -> Iterator[Program]:
    """A layer is given what was carried for another layer or microbatch, on one rank or on all."""
    for rank, at, op in places(program, *CARRIED):
        if not program.sizes.signatures[op.layer].carries:
            continue
        for count, place in CARRIED[op.kind]:
            if len(op.inputs) != count:
                continue
            for r, there, other in places(program, op.kind):
                if r != rank or other == op or len(other.inputs) != count:
                    continue
                yield reading(program, rank, op, place, other.inputs[place])
                mutant = program
                for member, its in everywhere(program, at, op) if rank == 0 else ():
                    theirs = program.tapes[member]
                    if there < len(theirs) and len(theirs[there].inputs) == count:
                        mutant = reading(mutant, member, its, place, theirs[there].inputs[place])
                yield mutant

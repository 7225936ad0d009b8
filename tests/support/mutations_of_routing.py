"""Mistakes in routing: in what layers carry past others, and in the experts that a rank dispatches to."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Holds, OpKind, Program
from tests.support.mutating import changed, everywhere, mutation, places, reading

CARRIED = {OpKind.FORWARD: 2, OpKind.BACKWARD: 4, OpKind.BACKWARD_INPUT: 4}
"""From which place on ops read what is carried, or its gradient."""


@mutation
def carried_of_another_pass(program: Program) -> Iterator[Program]:
    """A layer is given what was carried for another layer or microbatch, on one rank or on all."""
    for rank, at, op in places(program, *CARRIED):
        for place in range(CARRIED[op.kind], len(op.inputs)):
            for r, there, other in places(program, op.kind):
                if r != rank or other == op or len(other.inputs) <= place:
                    continue
                yield reading(program, rank, op, place, other.inputs[place])
                mutant = program
                for member, its in everywhere(program, at, op) if rank == 0 else ():
                    theirs = program.tapes[member]
                    if there < len(theirs) and len(theirs[there].inputs) > place:
                        mutant = reading(mutant, member, its, place, theirs[there].inputs[place])
                yield mutant


@mutation
def another_part_of_the_experts(program: Program) -> Iterator[Program]:
    """A rank dispatches to another one's part, to all or to less; or all ranks to the next one's, or to half."""
    for rank, at, op in places(program, OpKind.FORWARD):
        if op.holds is None:
            continue
        for way in range(5):
            yield changed(program, rank, at, op._replace(holds=other_part(op.holds, way)))
        for way in range(5) if rank == 0 else ():
            mutant = program
            for member, its in everywhere(program, at, op):
                mutant = changed(mutant, member, at, its._replace(holds=its.holds and other_part(its.holds, way)))
            yield mutant


def other_part(holds: Holds, way: int) -> Holds | None:
    """The next one, the first half of it, twice as much, all as one part, all."""
    place, of = holds.mask.bit_length() - 1, holds.of
    others = Holds(1 << (place + 1) % of, of), Holds(1 << 2 * place, 2 * of), Holds(1 << place // 2, (of + 1) // 2)
    return (*others, Holds(1, 1), None)[way]

"""Mistakes in what layers carry past others."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.program import OpKind, Program
from tests.support.mutating import everywhere, mutation, places, reading

CARRIED = {
    OpKind.FORWARD: ((3, 2),),
    OpKind.BACKWARD: ((5, 4),),
    OpKind.BACKWARD_INPUT: ((5, 4),),
}
"""Where ops read what is carried: (how many values they then read, its place among these)."""


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

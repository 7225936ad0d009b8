"""Mistakes about the root of a collective, and about what becomes of the members' values."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program, Reduction
from shardlab.language.ops import COLLECTIVES, ROOT_GIVES, ROOTED
from tests.support.mutating import changed, fresh_number, mutation, places, wait_of, with_tape
from tests.support.mutations_of_collectives import communications


@mutation
def another_root(program: Program) -> Iterator[Program]:
    """On one member; or on all, so that they agree, but the value is not where they say."""
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
    """On one member, or on all."""
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
    """The receiving ranks mean another layer, other microbatches or another kind."""
    for rank, at, op in places(program, *ROOT_GIVES):
        if op.expect is not None:
            for layer, microbatches in ((1, 0), (-1, 0), (0, 1), (0, -9)):
                other = op.expect._replace(
                    layer=op.expect.layer + layer, microbatches=op.expect.microbatches + microbatches
                )
                yield changed(program, rank, at, op._replace(expect=other, layer=other.layer))


@mutation
def root_left_out(program: Program) -> Iterator[Program]:
    """The root goes on alone with its own part: its value, or what it would have given."""
    for members in communications(program, ROOTED):
        for rank, at in members:
            tape = program.tapes[rank]
            op = tape[at]
            if rank == op.root:
                gone = {at, wait_of(program, rank, op.handle)}
                yield with_tape(program, rank, [o for i, o in enumerate(tape) if i not in gone])


@mutation
def reduced_on_the_root_again(program: Program) -> Iterator[Program]:
    """What all members have is summed once more on the first of them, which goes on with that."""
    for members in communications(program, frozenset({OpKind.ALL_REDUCE, OpKind.BROADCAST})):
        mutant, root = program, members[0][0]
        for rank, at in members:
            tape = mutant.tapes[rank]
            op, wait = tape[at], wait_of(mutant, rank, tape[at].handle)
            number = (op.outputs or op.inputs)[0]
            made = (fresh_number(tape),) if rank == root else ()
            handle = 1 + max(o.handle for o in tape)
            group = op.group
            again = Op(OpKind.REDUCE, op.layer, (number,), made, handle, group, root=root)
            rest = [o._replace(inputs=tuple(made[0] if made and n == number else n for n in o.inputs)) for o in tape]
            free = [Op(OpKind.FREE, -1, (number,))] if made else []
            ops = [*tape[: wait + 1], again, Op(OpKind.WAIT, -1, handle=handle), *free, *rest[wait + 1 :]]
            mutant = with_tape(mutant, rank, ops)
        yield mutant

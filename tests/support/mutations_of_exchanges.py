"""Mistakes in exchanges, of experts' buffers for microbatches or of heads for sequence slices, and in sums beside them.

What all ranks do wrong in the same way is the hardest to see, so most are made on all ranks that do the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from shardlab.language import Op, OpKind, Program
from shardlab.language.mesh import group_of
from shardlab.language.ops import COLLECTIVES
from tests.support.mutating import (
    changed,
    everywhere,
    fresh_number,
    living_on,
    mutation,
    reading,
    renamed,
    wait_of,
    with_tape,
)
from tests.support.mutations_of_slices import layer_of_result

Exchange = tuple[int, Op]
"""Where rank 0 issues an all_to_all, and the op."""


def exchanges(program: Program) -> list[Exchange]:
    """Those of rank 0."""
    return [(at, op) for at, op in enumerate(program.tapes[0]) if op.kind is OpKind.ALL_TO_ALL]


def neighbours(program: Program) -> Iterator[Sequence[Exchange]]:
    """Each exchange, those of one attention or of one pass through experts, of one pass forward and back, and all."""
    found = exchanges(program)
    for size in (1, 2, 3, 4, 6):
        for first in range(len(found) - size + 1):
            yield found[first : first + size]
    if found:
        yield found


def without_exchange(program: Program, at: int, op: Op) -> Program:
    """All ranks go on with their own values."""
    mutant = program
    for rank, its in everywhere(program, at, op):
        tape = mutant.tapes[rank]
        (own,), (came,) = its.inputs, its.outputs
        gone = [its, tape[wait_of(mutant, rank, its.handle)], Op(OpKind.FREE, -1, (came,))]
        mutant = with_tape(mutant, rank, living_on(renamed([o for o in tape if o not in gone], came, own), own))
    return mutant


@mutation
def exchange_left_out(program: Program) -> Iterator[Program]:
    """The values stay where they were made."""
    for some in neighbours(program):
        mutant = program
        for at, op in reversed(some):
            mutant = without_exchange(mutant, at, op)
        yield mutant


@mutation
def exchange_in_another_order(program: Program) -> Iterator[Program]:
    """The members meet in another order, so that each has another one's pieces."""
    for some in neighbours(program):
        for step in (-1, 1):
            mutant = program
            for at, op in some:
                for rank, its in everywhere(program, at, op):
                    assert its.group is not None
                    ranks = its.group.ranks
                    other = ranks[::-1] if step < 0 else (*ranks[step:], *ranks[:step])
                    mutant = changed(mutant, rank, at, its._replace(group=group_of(its.group.axis, other)))
            yield mutant


@mutation
def exchanged_twice(program: Program) -> Iterator[Program]:
    """All ranks exchange the result once more, and go on with that."""
    for at, op in exchanges(program):
        mutant = program
        for rank, its in everywhere(program, at, op):
            mutant = with_tape(mutant, rank, then(mutant.tapes[rank], at, its._replace(inputs=its.outputs)))
        yield mutant


def then(tape: list[Op], at: int, collective: Op) -> list[Op]:
    """The tape goes on with what a collective makes of a value, which op `at` has made, or what it has begun."""
    (number,), fresh, handle = collective.inputs, fresh_number(tape), 1 + max(op.handle for op in tape)
    if tape[at].handle >= 0:
        at = next(there for there, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == tape[at].handle)
    ends = [Op(OpKind.WAIT, -1, handle=handle), Op(OpKind.FREE, -1, (number,))]
    issued = collective._replace(outputs=(fresh,), handle=handle)
    return [*tape[: at + 1], issued, *ends, *renamed(tape[at + 1 :], number, fresh)]


@mutation
def value_of_another_exchange(program: Program) -> Iterator[Program]:
    """Ranks exchange, or go on with, what is of another layer, microbatch or direction; rank 0 alone, or all."""
    for (at, op), (there, other) in itertools.permutations(exchanges(program), 2):
        yield reading(program, 0, op, 0, other.inputs[0])
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
def collectives_of_one_value_in_another_order(program: Program) -> Iterator[Program]:
    """What is to be reduced and then exchanged, or gathered, is so the other way round."""
    tape = program.tapes[0]
    calls = {op.outputs[0]: (at, op) for at, op in enumerate(tape) if op.kind in COLLECTIVES and op.outputs}
    for there, after in calls.values():
        if not after.inputs or after.inputs[0] not in calls:
            continue
        at, op = calls[after.inputs[0]]
        mutant = program
        for rank, its in everywhere(program, at, op):
            second = program.tapes[rank][there] if there < len(program.tapes[rank]) else its
            if second.inputs == its.outputs:
                ways = [o._replace(kind=w.kind, group=w.group) for o, w in ((its, second), (second, its))]
                mutant = changed(changed(mutant, rank, at, ways[0]), rank, there, ways[1])
        yield mutant


@mutation
def reduced_after_it_is_used(program: Program) -> Iterator[Program]:
    """A layer, or an exchange, is given a term of a sum; what it makes of that is reduced in its place."""
    for at, op in enumerate(program.tapes[0]):
        if op.kind not in (OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER):
            continue
        mutant = program
        for rank, its in everywhere(program, at, op):
            tape = used_before(program, program.tapes[rank], its)
            mutant = with_tape(mutant, rank, tape) if tape else mutant
        yield mutant


def used_before(program: Program, tape: list[Op], reduce: Op) -> list[Op] | None:
    """A tape on which the first that reads a sum reads its own term; None if nothing is made of it."""
    (term,), (total,) = reduce.inputs, reduce.outputs
    reader = next((o for o in tape if total in o.inputs and o.kind is not OpKind.FREE), None)
    if reader is None or not reader.outputs:
        return None
    kept = [o for o in tape if o != reduce and not (o.kind is OpKind.WAIT and o.handle == reduce.handle)]
    kept = [o for o in living_on(kept, term) if o != Op(OpKind.FREE, -1, (total,))]
    late = renamed([reader], total, term)[0]
    kept = renamed([late if o == reader else o for o in kept], total, term)
    layer = reader.layer if reader.kind in COLLECTIVES else layer_of_result(program, reader, 0)
    number = reader.outputs[0]
    return then(kept, kept.index(late), reduce._replace(kind=OpKind.ALL_REDUCE, layer=layer, inputs=(number,)))

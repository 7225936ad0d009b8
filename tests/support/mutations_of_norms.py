"""Mistakes in the norm of the gradient and in what updates make of it."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import (
    added_twice,
    changed,
    fresh_number,
    living_on,
    mutation,
    places,
    renamed,
    wait_of,
    with_tape,
    without_summand,
)


def scalars(tape: list[Op]) -> set[int]:
    """The numbers of a tape's norms and of their sums."""
    found: set[int] = set()
    for op in tape:
        summed = op.kind in (OpKind.ADD, OpKind.ALL_REDUCE) and op.inputs[0] in found
        if op.kind is OpKind.NORM or summed or (op.kind is OpKind.RECV and op.expect and not op.expect.microbatches):
            found |= set(op.outputs)
    return found


@mutation
def norm_without_a_layer(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.NORM):
        rest = without_summand(program.tapes[rank], op.outputs[0])
        if rest is not None:
            yield with_tape(program, rank, [o for o in rest if o != op])


@mutation
def part_of_the_norm_twice(program: Program) -> Iterator[Program]:
    """A part is added to itself; or another layer's stands in its place."""
    for rank, at, op in places(program, OpKind.NORM):
        tape, (part,) = program.tapes[rank], op.outputs
        yield with_tape(program, rank, added_twice(tape, at, part, 0))
        for other in [o for o in tape if o.kind is OpKind.NORM and o != op]:
            kept = living_on(tape, other.inputs[0])
            yield with_tape(program, rank, [op._replace(inputs=other.inputs) if o == op else o for o in kept])
            moved = op._replace(inputs=other.inputs, layer=other.layer)
            yield with_tape(program, rank, [moved if o == op else o for o in kept])


@mutation
def norm_of_an_unfinished_gradient(program: Program) -> Iterator[Program]:
    """It reads what is reduced, or added to, later."""
    for rank, _, op in places(program, OpKind.NORM):
        tape = program.tapes[rank]
        for number in sorted({n for o in tape if o.kind not in (OpKind.FREE, OpKind.WAIT) for n in o.inputs}):
            makers = {o.kind for o in tape if number in o.outputs}
            if makers & {OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT, OpKind.ADD, OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE}:
                kept = living_on(tape, number)
                if number != op.inputs[0]:
                    again = op._replace(inputs=(number,))
                    yield with_tape(program, rank, [again if o == op else o for o in kept])


@mutation
def update_with_a_part_of_the_norm(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        for number in sorted(scalars(tape) - set(op.inputs)):
            given = op._replace(inputs=(*op.inputs[:3], number, *op.inputs[4:]))
            yield with_tape(program, rank, [given if o == op else o for o in living_on(tape, number)])


@mutation
def update_without_the_norm(program: Program) -> Iterator[Program]:
    """One update, or all of a rank's."""
    for rank, at, op in places(program, OpKind.UPDATE):
        if len(op.inputs) > 3:
            yield changed(program, rank, at, _without_norm(op))
    for rank, tape in enumerate(program.tapes if program.ranks > 1 else []):
        plain = [_without_norm(op) if op.kind is OpKind.UPDATE else op for op in tape]
        if plain != tape:
            yield with_tape(program, rank, plain)


def _without_norm(update: Op) -> Op:
    return update._replace(inputs=(*update.inputs[:3], *update.inputs[4:]))


@mutation
def squares_counted_on_every_rank(program: Program) -> Iterator[Program]:
    """The sum of squares over an axis comes last, so that squares which all of its ranks have are counted by each."""
    tape = program.tapes[0]
    found = scalars(tape)
    for at, op in enumerate(tape):
        if op.kind is not OpKind.ALL_REDUCE or op.inputs[0] not in found or op.group is None:
            continue
        mutant = program
        for rank in range(program.ranks):
            theirs = mutant.tapes[rank]
            if at < len(theirs) and theirs[at].kind is op.kind and theirs[at].layer == op.layer:
                mutant = with_tape(mutant, rank, _reduced_last(mutant, rank, theirs[at]))
        if mutant is not program:
            yield mutant


def _reduced_last(program: Program, rank: int, op: Op) -> list[Op]:
    tape = program.tapes[rank]
    wait = tape[wait_of(program, rank, op.handle)]
    once = Op(OpKind.FREE, -1, op.inputs)
    tape = renamed([o for o in tape if o not in (op, wait, once)], op.outputs[0], op.inputs[0])
    first = next((i for i, o in enumerate(tape) if o.kind is OpKind.UPDATE and len(o.inputs) > 3), None)
    if first is None:
        return tape
    norm = tape[first].inputs[3]
    fresh = fresh_number(tape)
    again = [op._replace(inputs=(norm,), outputs=(fresh,)), wait, Op(OpKind.FREE, -1, (norm,))]
    return [*tape[:first], *again, *renamed(tape[first:], norm, fresh)]

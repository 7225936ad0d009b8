"""Mistakes in a weight that head and embedding share: in its two gradients, and in who counts its squares."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import (
    added_twice,
    changed,
    everywhere,
    fresh_number,
    living_on,
    mutation,
    places,
    with_tape,
    without_summand,
)

GRADIENTS = (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT)


def uses(program: Program) -> Iterator[tuple[int, int, Op]]:
    """Where the gradient of a shared weight is made, by either layer."""
    for rank, at, op in places(program, *GRADIENTS):
        if program.sizes.tied and op.layer in (0, program.layers - 1):
            yield rank, at, op


@mutation
def use_of_a_tied_weight_left_out(program: Program) -> Iterator[Program]:
    """A gradient of the shared weight is made and not added, on one rank or on all."""
    for rank, at, op in uses(program):
        chosen = [(rank, op)]
        for members in (chosen, list(everywhere(program, at, op))):
            mutant = program
            for member, its in members:
                rest = without_summand(mutant.tapes[member], its.outputs[0])
                if rest is not None:
                    after = rest.index(its) + 1
                    free = Op(OpKind.FREE, -1, its.outputs[:1])
                    mutant = with_tape(mutant, member, [*rest[:after], free, *rest[after:]])
            yield mutant


@mutation
def use_of_a_tied_weight_twice(program: Program) -> Iterator[Program]:
    for rank, at, op in uses(program):
        yield with_tape(program, rank, added_twice(program.tapes[rank], at, op.outputs[0], 0))


@mutation
def one_use_of_a_tied_weight_for_the_other(program: Program) -> Iterator[Program]:
    """The embedding's gradient is added where the head's should be, or another microbatch's; all others live on."""
    for rank, _, op in uses(program):
        for r, _, other in uses(program):
            if r != rank or other == op:
                continue
            tape = living_on(living_on(program.tapes[rank], op.outputs[0]), other.outputs[0])
            swapped = [
                o._replace(inputs=tuple(other.outputs[0] if n == op.outputs[0] else n for n in o.inputs))
                if o.kind is not OpKind.FREE
                else o
                for o in tape
            ]
            yield with_tape(program, rank, swapped)


@mutation
def squares_of_a_tied_weight_twice(program: Program) -> Iterator[Program]:
    """Each rank that keeps the weight adds its squares to the norm that its updates are given."""
    if not program.sizes.tied:
        return
    for rank, at, op in places(program, OpKind.UPDATE):
        if op.layer == 0 and len(op.inputs) == 4:
            tape = program.tapes[rank]
            fresh = fresh_number(tape)
            more = [
                Op(OpKind.NORM, 0, op.inputs[:1], (fresh,)),
                Op(OpKind.ADD, 0, (op.inputs[3], fresh), (fresh + 1,)),
                Op(OpKind.FREE, -1, (fresh,)),
            ]
            given = op._replace(inputs=(*op.inputs[:3], fresh + 1))
            yield changed(program, rank, at, *more, given, Op(OpKind.FREE, -1, (fresh + 1,)))


@mutation
def head_updated_as_if_alone(program: Program) -> Iterator[Program]:
    """The gradients of the two uses do not meet: each rank updates its copy with what it has."""
    if not program.sizes.tied:
        return
    mutant = program
    for rank, tape in enumerate(program.tapes):
        for op in [o for o in tape if o.kind is OpKind.UPDATE and o.layer == 0]:
            made = next(o for o in tape if op.inputs[0] in o.outputs)
            if made.kind is OpKind.ALL_REDUCE:
                given = op._replace(inputs=(made.inputs[0], *op.inputs[1:]))
                kept = living_on(mutant.tapes[rank], made.inputs[0])
                mutant = with_tape(mutant, rank, [given if o == op else o for o in kept])
    yield mutant

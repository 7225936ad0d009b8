"""Mistakes in backward passes of two halves, and in optimizer states that are sharded apart from their weights."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from shardlab.language.ops import COLLECTIVES
from tests.support.mutating import (
    changed,
    fresh_number,
    living_on,
    moved,
    mutation,
    places,
    renamed,
    with_tape,
    without_summand,
)


@mutation
def weight_half_left_out(program: Program) -> Iterator[Program]:
    """The input's half is done, and the sum goes on without the weight's."""
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        yield changed(program, rank, at)
        rest = without_summand(program.tapes[rank], op.outputs[0])
        if rest is not None:
            yield with_tape(program, rank, [o for o in rest if o != op])


@mutation
def weight_half_done_twice(program: Program) -> Iterator[Program]:
    """Again from what the first half left; or its gradient is added twice."""
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        tape = program.tapes[rank]
        fresh, (gradient,) = fresh_number(tape), op.outputs
        again = op._replace(outputs=(fresh,))
        free = Op(OpKind.FREE, -1, (fresh,))
        kept = living_on(living_on(tape, op.inputs[0]), op.inputs[1])
        at = kept.index(op) + 1
        yield with_tape(program, rank, [*kept[:at], again, free, *kept[at:]])
        add = Op(OpKind.ADD, op.layer, (gradient, gradient), (fresh,))
        rest = [o for o in tape if o != Op(OpKind.FREE, -1, (gradient,))]
        at = rest.index(op) + 1
        once = Op(OpKind.FREE, -1, (gradient,))
        yield with_tape(program, rank, [*rest[:at], add, once, *renamed(rest[at:], gradient, fresh)])


@mutation
def weight_half_of_another_microbatch(program: Program) -> Iterator[Program]:
    """Some or all of what it reads belongs to another microbatch or layer, and is kept alive for it."""
    for rank, _, op in places(program, OpKind.BACKWARD_WEIGHT):
        for _, _, other in [p for p in places(program, OpKind.BACKWARD_WEIGHT) if p[0] == rank and p[2] != op]:
            for swapped in itertools.product((False, True), repeat=3):
                inputs = tuple(
                    theirs if s else n for s, n, theirs in zip(swapped, op.inputs, other.inputs, strict=True)
                )
                if inputs == op.inputs:
                    continue
                tape = program.tapes[rank]
                for number in {*op.inputs[:2], *other.inputs[:2]}:
                    tape = living_on(tape, number)
                yield with_tape(program, rank, [op._replace(inputs=inputs) if o == op else o for o in tape])


@mutation
def weight_half_before_its_input_half(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.BACKWARD_WEIGHT):
        tape = program.tapes[rank]
        first = next(i for i, o in enumerate(tape) if op.inputs[2] in o.outputs)
        yield moved(program, rank, at, first)
        if first:
            yield moved(program, rank, at, first - 1)


@mutation
def whole_backward_and_a_weight_half(program: Program) -> Iterator[Program]:
    """A backward pass is done whole, and once more its weight's half."""
    for rank, at, op in places(program, OpKind.BACKWARD_INPUT):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        whole = op._replace(kind=OpKind.BACKWARD, outputs=(fresh, op.outputs[0]))
        yield changed(program, rank, at, whole, Op(OpKind.FREE, -1, (fresh,)))


@mutation
def state_of_another_shard(program: Program) -> Iterator[Program]:
    """Two ranks of a group load one another's slice of the optimizer state; or both load the same one."""
    loads = list(places(program, OpKind.LOAD_OPT_STATE))
    for (one, at, op), (other, there, theirs) in itertools.combinations(loads, 2):
        if one != other and op.layer == theirs.layer and op.holds != theirs.holds:
            mutant = changed(program, one, at, op._replace(holds=theirs.holds))
            yield mutant
            yield changed(mutant, other, there, theirs._replace(holds=op.holds))


@mutation
def new_weight_not_gathered(program: Program) -> Iterator[Program]:
    """The step ends with the slice that was updated, on one rank or on all."""
    everywhere = program
    for rank, tape in enumerate(program.tapes):
        updated = {op.outputs[0]: op for op in tape if op.kind is OpKind.UPDATE}
        for op in [o for o in tape if o.kind in COLLECTIVES and o.outputs and updated.keys() & o.inputs]:
            mutant = with_tape(program, rank, _ungathered(tape, op))
            yield mutant
            everywhere = with_tape(everywhere, rank, _ungathered(everywhere.tapes[rank], op))
    if everywhere is not program:
        yield everywhere


def _ungathered(tape: list[Op], gather: Op) -> list[Op]:
    frees = [Op(OpKind.FREE, -1, gather.inputs), Op(OpKind.WAIT, -1, handle=gather.handle), gather]
    return renamed([op for op in tape if op not in frees], gather.outputs[0], gather.inputs[0])

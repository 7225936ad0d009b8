"""Mistakes in how long values live, and in when they are updated."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import changed, fresh_number, moved, mutation, places, renamed, with_tape


@mutation
def early_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        for distance in (1, 2, 3, 5, 9):
            if at >= distance:
                yield moved(program, rank, at, at - distance)


@mutation
def missing_free(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.FREE):
        yield changed(program, rank, at)


@mutation
def early_update(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program, OpKind.UPDATE):
        for to in range(0, at, max(1, at // 12)):
            yield moved(program, rank, at, to)


@mutation
def stale_weight(program: Program) -> Iterator[Program]:
    """The update comes before an op that reads the weight, and that op then reads the new one."""
    for rank, at, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        old, new = update.inputs[1], update.outputs[0]
        for reader in [i for i in range(at) if old in tape[i].inputs]:
            middle = renamed(tape[reader:at], old, new)
            yield with_tape(program, rank, [*tape[:reader], update, *middle, *tape[at + 1 :]])


@mutation
def weight_read_after_its_update(program: Program) -> Iterator[Program]:
    """A forward pass is done once more, with the new weight; its activation is kept until then."""
    for rank, _, update in places(program, OpKind.UPDATE):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        for op in [o for o in tape if o.kind is OpKind.FORWARD and o.inputs[1] == update.inputs[1]]:
            free = Op(OpKind.FREE, -1, op.inputs[:1])
            rest = [o for o in tape if o != free]
            after = rest.index(update) + 1
            again = op._replace(inputs=(op.inputs[0], update.outputs[0]), outputs=(fresh,))
            freed = [Op(OpKind.FREE, -1, (fresh,)), free]
            yield with_tape(program, rank, [*rest[:after], again, *freed, *rest[after:]])


@mutation
def weight_left_stale(program: Program) -> Iterator[Program]:
    """The gradient is there, but the slice stays as it was."""
    for rank, at, _ in places(program, OpKind.UPDATE):
        yield changed(program, rank, at)


@mutation
def second_update(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.UPDATE):
        fresh = fresh_number(program.tapes[rank])
        again = op._replace(inputs=(op.inputs[0], *op.outputs), outputs=(fresh, fresh + 1))
        yield changed(program, rank, at, op, again)

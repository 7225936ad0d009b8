"""Mistakes with values that are copied to other places."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import changed, mutation, places, reading, renamed, with_tape

COPIES = (OpKind.OFFLOAD, OpKind.RELOAD)


@mutation
def copy_left_out(program: Program) -> Iterator[Program]:
    """What was to be read of the copy is read where it is, and lives as long."""
    for rank, at, op in places(program, *COPIES):
        (given,), (made,) = op.inputs, op.outputs
        gone = (Op(OpKind.WAIT, -1, handle=op.handle), Op(OpKind.FREE, -1, (given,)))
        rest = [each for each in program.tapes[rank][at + 1 :] if each not in gone]
        yield with_tape(program, rank, [*program.tapes[rank][:at], *renamed(rest, made, given)])


@mutation
def copied_to_another_place(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.OFFLOAD):
        for place in ("", "host", "disk", "attic"):
            if place != op.place:
                yield changed(program, rank, at, op._replace(place=place))


@mutation
def copied_the_other_way(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COPIES):
        back = op.kind is OpKind.OFFLOAD
        kind, place = (OpKind.RELOAD, "") if back else (OpKind.OFFLOAD, "host")
        yield changed(program, rank, at, op._replace(kind=kind, place=place))


@mutation
def another_value_copied(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, *COPIES):
        for other in sorted({n for o in program.tapes[rank][:at] for n in o.outputs}):
            yield reading(program, rank, op, 0, other)


@mutation
def loaded_from_another_place(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        for place in ("", "host", "disk", "attic"):
            if place != op.place:
                yield changed(program, rank, at, op._replace(place=place))


@mutation
def read_where_it_was(program: Program) -> Iterator[Program]:
    """An op reads the value of which a copy was made for it."""
    for rank, _, op in places(program, *COPIES):
        (given,), (made,) = op.inputs, op.outputs
        for other in program.tapes[rank]:
            if made in other.inputs and other.kind is not OpKind.FREE:
                yield reading(program, rank, other, other.inputs.index(made), given)

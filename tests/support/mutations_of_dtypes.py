"""Mistakes with values that are cast to other numbers."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import changed, fresh_number, mutation, places, renamed, with_tape


@mutation
def cast_left_out(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        tape = program.tapes[rank]
        (given,), (made,) = op.inputs, op.outputs
        rest = [o for o in tape[at + 1 :] if not (o.kind is OpKind.FREE and o.inputs == (made,))]
        free = next((i for i, o in enumerate(rest) if o.kind is OpKind.FREE and o.inputs == (given,)), None)
        gone = next((i for i, o in enumerate(tape) if o.kind is OpKind.FREE and o.inputs == (made,)), None)
        if free is not None and gone is not None:
            rest = [o for i, o in enumerate(rest) if i != free]
            rest.insert(min(len(rest), gone - at - 2), Op(OpKind.FREE, -1, (made,)))
        yield with_tape(program, rank, [*tape[:at], *renamed(rest, made, given)])


@mutation
def cast_to_another_dtype(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        for dtype in ("", "float64", "bfloat16", "float16", "int8"):
            if dtype != op.dtype:
                yield changed(program, rank, at, op._replace(dtype=dtype))


@mutation
def cast_where_none_is(program: Program) -> Iterator[Program]:
    """What any op has made, in fewer bytes for all that read it."""
    for rank, at, op in places(program):
        tape = program.tapes[rank]
        for number in op.outputs if op.handle < 0 else ():
            fresh = fresh_number(tape)
            cast = Op(OpKind.CAST, op.layer, (number,), (fresh,), dtype="bfloat16")
            rest = renamed(tape[at + 1 :], number, fresh)
            yield with_tape(program, rank, [*tape[: at + 1], cast, Op(OpKind.FREE, -1, (number,)), *rest])


@mutation
def another_value_cast(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.CAST):
        for other in {n for o in program.tapes[rank][:at] for n in o.outputs}:
            yield changed(program, rank, at, op._replace(inputs=(other,)))

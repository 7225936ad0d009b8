"""Mistakes with any op: dropped, doubled, out of order, of another layer or value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlab.language import Holds, Mesh, Op, OpKind, Program, Sizes
from shardlab.language.ops import COMMUNICATION
from tests.support.mutating import changed, fresh_number, move_op, mutation, places, renamed, with_tape


@mutation
def dropped_op(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program):
        yield changed(program, rank, at)


@mutation
def duplicated_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        yield changed(program, rank, at, op, op)


@mutation
def duplicated_op_with_new_numbers(program: Program) -> Iterator[Program]:
    """Run an op again, and use the new result in place of the first one."""
    for rank, at, op in places(program):
        tape = program.tapes[rank]
        fresh = fresh_number(tape)
        handle = 1 + max(o.handle for o in tape) if op.handle >= 0 and op.kind is not OpKind.WAIT else op.handle
        duplicate = op._replace(outputs=tuple(range(fresh, fresh + len(op.outputs))), handle=handle)
        rest = tape[at + 1 :]
        for old, new in zip(op.outputs, duplicate.outputs, strict=True):
            rest = renamed(rest, old, new)
        waits = [Op(OpKind.WAIT, -1, handle=handle)] if op.kind in COMMUNICATION else []
        yield with_tape(program, rank, [*tape[: at + 1], duplicate, *waits, *rest])


@mutation
def swapped_neighbours(program: Program) -> Iterator[Program]:
    for rank, at, _ in places(program):
        if at:
            yield move_op(program, rank, at, at - 1)


@mutation
def swapped_with_a_later_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        tape = list(program.tapes[rank])
        for distance in (3, 7, 20):
            if at + distance < len(tape):
                tape[at], tape[at + distance] = tape[at + distance], op
                yield with_tape(program, rank, tape)
                tape = list(program.tapes[rank])


@mutation
def wrong_layer(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        if op.kind not in (OpKind.WAIT, OpKind.FREE):
            for layer in (op.layer - 1, op.layer + 1, program.layers + 7):
                yield changed(program, rank, at, op._replace(layer=layer))


@mutation
def wrong_value(program: Program) -> Iterator[Program]:
    """Let an op read another value of its rank: of another layer, microbatch or kind, partial or stale."""
    for rank, at, op in places(program):
        numbers = sorted({n for o in program.tapes[rank] for n in o.outputs})
        for place, number in enumerate(op.inputs):
            index = numbers.index(number)
            for other in numbers[max(0, index - 6) : index + 7]:
                if other != number:
                    inputs = (*op.inputs[:place], other, *op.inputs[place + 1 :])
                    yield changed(program, rank, at, op._replace(inputs=inputs))


@mutation
def wrong_microbatch(program: Program) -> Iterator[Program]:
    total = program.microbatches
    for rank, at, op in places(program, OpKind.LOAD_BATCH):
        assert op.holds is not None
        mask = op.holds.mask
        for other in {(mask << 1 | mask >> (total - 1)) & ((1 << total) - 1), mask | 1, mask ^ 1, 1 << total, 0} - {
            mask
        }:
            yield changed(program, rank, at, op._replace(holds=Holds(other, total)))


@mutation
def wrong_expected_message(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.RECV):
        assert op.expect is not None
        for other in (op.expect.microbatches << 1, op.expect.microbatches ^ 1, -1):
            yield changed(program, rank, at, op._replace(expect=op.expect._replace(microbatches=other)))
        yield changed(program, rank, at, op._replace(expect=op.expect._replace(layer=op.expect.layer + 1)))


@mutation
def wrong_shard(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        assert op.holds is not None
        mask, of = op.holds
        others = {Holds(1 << i, of) for i in range(of)} | {Holds(1, of + 1), Holds(1, 2 * of), Holds(mask << of, of)}
        for other in others - {op.holds}:
            yield changed(program, rank, at, op._replace(holds=other))


# Tapes that no writer makes.


@mutation
def malformed_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        for inputs in (
            op.inputs[:-1],
            (*op.inputs, 0),
            tuple(-1 - n for n in op.inputs),
            tuple(n + 10**6 for n in op.inputs),
        ):
            if inputs != op.inputs:
                yield changed(program, rank, at, op._replace(inputs=inputs))
        for outputs in (
            op.outputs[:-1],
            (*op.outputs, 10**6),
            (*op.outputs, *op.outputs),
            tuple(-1 - n for n in op.outputs),
        ):
            if outputs != op.outputs:
                yield changed(program, rank, at, op._replace(outputs=outputs))
        if op.handle >= 0:
            for handle in (-1, op.handle - 1, op.handle + 1):
                yield changed(program, rank, at, op._replace(handle=handle))
        if op.holds is not None:
            mask, of = op.holds
            for holds in (None, Holds(mask, 0), Holds(mask, -1), Holds(-mask, of), Holds(0, of), Holds(1 << of, of)):
                yield changed(program, rank, at, op._replace(holds=holds))
        if op.expect is not None:
            yield changed(program, rank, at, op._replace(expect=None))


@mutation
def another_kind_of_op(program: Program) -> Iterator[Program]:
    for rank, at, op in places(program):
        for kind in OpKind:
            if kind is not op.kind:
                yield changed(program, rank, at, op._replace(kind=kind))


@mutation
def another_world(program: Program) -> Iterator[Program]:
    yield replace(program, mesh=Mesh(dp_shard=program.ranks + 1))
    yield replace(program, tapes=[*program.tapes, []])
    yield replace(program, tapes=program.tapes[:-1])
    yield replace(program, microbatches=program.microbatches + 1)
    yield replace(program, sizes=Sizes.puzzle(program.layers + 1))
    sliced = any(layer.cut for layer in program.sizes.signatures)
    if program.microbatches > 1 and not sliced:  # else two whole microbatches may be read as one in two slices
        yield replace(program, microbatches=program.microbatches - 1)
    if program.layers > 1:
        yield replace(program, sizes=Sizes.puzzle(program.layers - 1))

"""Tapes that no writer makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlab.language import Holds, Mesh, OpKind, Program, Sizes
from tests.support.mutating import changed, mutation, places


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

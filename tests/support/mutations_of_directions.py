"""Mistakes in the directions of matrices that are stepped whole."""

from __future__ import annotations

from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from tests.support.mutating import changed, mutation, places, reading


def directed(program: Program) -> Iterator[tuple[int, Op, int]]:
    """(rank, update, direction) of every update that is given one."""
    for rank, tape in enumerate(program.tapes):
        made = {op.outputs[0]: op.inputs for op in tape if op.kind in (OpKind.DIRECTION, OpKind.ALL_GATHER)}
        first = {op.outputs[0] for op in tape if op.kind is OpKind.DIRECTION}
        for op in tape:
            if op.kind is OpKind.UPDATE and op.inputs[3:]:
                number = op.inputs[-1]
                while number in made and number not in first:
                    (number,) = made[number]
                if number in first:
                    yield rank, op, op.inputs[-1]


@mutation
def update_without_the_direction(program: Program) -> Iterator[Program]:
    for rank, op, _ in directed(program):
        at = program.tapes[rank].index(op)
        yield changed(program, rank, at, op._replace(inputs=op.inputs[:-1]))


@mutation
def direction_not_gathered(program: Program) -> Iterator[Program]:
    """Over the last axis, or at all."""
    for rank, op, direction in directed(program):
        tape = program.tapes[rank]
        gathers = {gather.outputs[0]: gather.inputs[0] for gather in tape if gather.kind is OpKind.ALL_GATHER}
        while direction in gathers:
            direction = gathers[direction]
            yield reading(program, rank, op, len(op.inputs) - 1, direction)


@mutation
def direction_of_another_layer(program: Program) -> Iterator[Program]:
    found = list(directed(program))
    for rank, op, _ in found:
        for other, update, direction in found:
            if other == rank and update.layer != op.layer:
                yield reading(program, rank, op, len(op.inputs) - 1, direction)


@mutation
def direction_of_another_gradient(program: Program) -> Iterator[Program]:
    """Of another layer's, or of one that lacks microbatches."""
    for rank, _, op in places(program, OpKind.DIRECTION):
        tape = program.tapes[rank]
        for other in tape:
            if other.kind in (OpKind.BACKWARD, OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.ADD):
                yield reading(program, rank, op, 0, other.outputs[0])


@mutation
def direction_without_the_norm(program: Program) -> Iterator[Program]:
    """One, or all of a layer's."""
    for rank, at, op in places(program, OpKind.DIRECTION):
        if op.inputs[2:]:
            yield changed(program, rank, at, op._replace(inputs=op.inputs[:2]))
    for layer in range(program.layers):
        plain = program
        for rank, at, op in places(program, OpKind.DIRECTION):
            if op.layer == layer and op.inputs[2:]:
                plain = changed(plain, rank, at, op._replace(inputs=op.inputs[:2]))
        if plain is not program:
            yield plain


@mutation
def direction_with_a_part_of_the_norm(program: Program) -> Iterator[Program]:
    for rank, _, op in places(program, OpKind.DIRECTION):
        for other in program.tapes[rank]:
            if other.kind is OpKind.NORM and op.inputs[2:]:
                yield reading(program, rank, op, 2, other.outputs[0])


@mutation
def direction_with_a_new_state(program: Program) -> Iterator[Program]:
    """It is computed after an update has moved the state."""
    for rank, _, op in places(program, OpKind.DIRECTION):
        for update in program.tapes[rank]:
            if update.kind is OpKind.UPDATE:
                yield reading(program, rank, op, 1, update.outputs[1])

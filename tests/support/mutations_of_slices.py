"""Mistakes in half-blocks: in the sums over slices, the pieces of sequences, and the residual beside the branch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from shardlab.language import Op, OpKind, Program
from shardlab.language.ops import COLLECTIVES
from tests.support.mutating import changed, fresh_number, mutation, places, renamed, with_tape

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Over which a rank might meet the wrong others."""

ROWS = (
    OpKind.FORWARD,
    OpKind.ATTEND,
    OpKind.LOSS_STATS,
    OpKind.LOSS,
    OpKind.BACKWARD,
    OpKind.BACKWARD_INPUT,
    OpKind.ATTEND_BACKWARD,
    OpKind.LOAD_WEIGHT,
)
"""Ops whose results a rank might put together with others' although it must not."""


def layer_of_result(program: Program, op: Op, place: int) -> int:
    """The number of what an op in `ROWS` makes."""
    sizes = program.sizes
    if op.kind is OpKind.BACKWARD and place == 0:
        return sizes.weight_of(op.layer)
    if op.kind is OpKind.ATTEND:
        return op.layer + 1
    if op.kind is not OpKind.FORWARD or sizes.signatures[op.layer].projects:
        return op.layer
    return sizes.signatures[op.layer].outputs[place].layer


@mutation
def collective_too_many(program: Program) -> Iterator[Program]:
    """What a layer, the loss or a load has made is reduced or gathered over an axis on all its ranks."""
    mesh = program.mesh
    for axis in AXES:
        group = mesh.group(0, axis)
        if len(group.ranks) < 2:
            continue
        for at, op in enumerate(program.tapes[0]):
            there = [program.tapes[rank][at : at + 1] for rank in group.ranks]
            alike = (op.kind, op.layer, len(op.outputs))
            if op.kind not in ROWS or any([(o.kind, o.layer, len(o.outputs)) for o in ops] != [alike] for ops in there):
                continue
            outputs = len(op.outputs) - (op.kind in (OpKind.FORWARD, OpKind.BACKWARD_INPUT))
            for place, kind in itertools.product(range(outputs), sorted(COLLECTIVES, key=lambda kind: kind.value)):
                mutant = program
                for rank in group.ranks:
                    tape = mutant.tapes[rank]
                    made = tape[at].outputs[place]
                    fresh, handle = fresh_number(tape), 1 + max(o.handle for o in tape)
                    layer = layer_of_result(program, op, place)
                    more = [
                        Op(kind, layer, (made,), (fresh,), handle, mesh.group(rank, axis)),
                        Op(OpKind.WAIT, -1, handle=handle),
                        Op(OpKind.FREE, -1, (made,)),
                    ]
                    rest = renamed(tape[at + 1 :], made, fresh)
                    mutant = with_tape(mutant, rank, [*tape[: at + 1], *more, *rest])
                yield mutant


@mutation
def collective_over_another_axis(program: Program) -> Iterator[Program]:
    """All ranks that meet, and those that they meet instead, take the other axis."""
    mesh = program.mesh
    axes = [axis for axis in AXES if len(mesh.group(0, axis).ranks) > 1]
    for at, op in enumerate(program.tapes[0]):
        if op.kind in COLLECTIVES and op.group is not None:
            for axis in axes:
                mutant = program
                for rank, tape in enumerate(program.tapes):
                    alike = at < len(tape) and tape[at].kind is op.kind and tape[at].layer == op.layer
                    if alike and axis != op.group.axis:
                        mutant = changed(mutant, rank, at, tape[at]._replace(group=mesh.group(rank, axis)))
                if mutant is not program:
                    yield mutant


@mutation
def residual_for_branch(program: Program) -> Iterator[Program]:
    """A norm takes one for the other, or hands one on for the other, forward or backward; on one rank or on all."""
    swaps = {
        OpKind.FORWARD: ((3, "inputs", 0, 2), (3, "outputs", 0, 1)),
        OpKind.BACKWARD: ((5, "inputs", 1, 4), (3, "outputs", 1, 2)),
        OpKind.BACKWARD_INPUT: ((5, "inputs", 1, 4), (3, "outputs", 0, 1)),
    }
    for rank, at, op in places(program, *swaps):
        for count, field, one, other in swaps[op.kind]:
            numbers = list(getattr(op, field))
            if len(numbers) == count:
                numbers[one], numbers[other] = numbers[other], numbers[one]
                yield changed(program, rank, at, op._replace(**{field: tuple(numbers)}))
    for at, op in enumerate(program.tapes[0]):
        for count, field, one, other in swaps.get(op.kind, ()):
            mutant = program
            for rank, tape in enumerate(program.tapes):
                if at < len(tape) and tape[at].kind is op.kind and len(getattr(tape[at], field)) == count:
                    numbers = list(getattr(tape[at], field))
                    numbers[one], numbers[other] = numbers[other], numbers[one]
                    mutant = changed(mutant, rank, at, tape[at]._replace(**{field: tuple(numbers)}))
            if mutant is not program:
                yield mutant


@mutation
def slice_of_another_rank(program: Program) -> Iterator[Program]:
    """A rank loads another one's slice of a layer, weight and state; or two ranks have changed places."""
    loads: dict[tuple[int, int], dict[OpKind, tuple[int, Op]]] = {}
    for rank, at, op in places(program, OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE):
        loads.setdefault((op.layer, rank), {})[op.kind] = at, op
    for (layer, rank), mine in loads.items():
        for (other_layer, other), theirs in loads.items():
            same = all(mine[kind][1].holds == theirs[kind][1].holds for kind in mine) if layer == other_layer else True
            if same or rank == other:
                continue
            mutant = program
            for kind, (at, op) in mine.items():
                mutant = changed(mutant, rank, at, op._replace(holds=theirs[kind][1].holds))
            yield mutant
            if rank < other:
                for kind, (at, op) in theirs.items():
                    mutant = changed(mutant, other, at, op._replace(holds=mine[kind][1].holds))
                yield mutant

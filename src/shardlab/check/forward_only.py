"""The forward half of a program: what it takes to compute every microbatch's loss, and nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from shardlab.check.checked import Checked
from shardlab.program import Op, OpKind, Program
from shardlab.program.ops import COMMUNICATION
from shardlab.rules.kind import Kind

FREE, WAIT, LOSS, LOAD_WEIGHT = OpKind.FREE, OpKind.WAIT, OpKind.LOSS, OpKind.LOAD_WEIGHT

Place = tuple[int, int]
"""A rank, and the number of a value there or the index of an op."""


def forward_only(checked: Checked) -> Program:
    """Leave of a program what its losses need: no gradient, no update, nothing that layers keep.

    Values end after their last use. All else stays in its order, so that ranks which did not wait for one another in a
    circle do not begin to. `check_forward` proves the result from its tapes alone, like any other.
    """
    needed = _needed(checked)
    tapes = [
        _with_ends([_without_gradients(checked, rank, op) for at, op in enumerate(tape) if (rank, at) in needed])
        for rank, tape in enumerate(checked.program.tapes)
    ]
    program = checked.program
    return Program(program.mesh, program.microbatches, program.sizes, tapes)


def _needed(checked: Checked) -> set[Place]:
    """The ops that losses follow from; of a communication the part of every member, and its wait."""
    tapes = checked.program.tapes
    every = [(rank, at, op) for rank, tape in enumerate(tapes) for at, op in enumerate(tape)]
    maker = {(rank, number): at for rank, at, op in every for number in op.outputs}
    wait = {(rank, op.handle): at for rank, at, op in every if op.kind is WAIT}
    left = [(rank, at) for rank, at, op in every if op.kind is LOSS]
    needed: set[Place] = set()
    while left:
        place = left.pop()
        if place in needed:
            continue
        needed.add(place)
        rank, at = place
        op = tapes[rank][at]
        left += [(rank, maker[rank, number]) for number in op.inputs]
        if op.kind in COMMUNICATION:
            left.append((rank, wait[rank, op.handle]))
            communication = checked.communications[checked.communication_of[rank][op.handle]]
            left += [(member.rank, member.op) for member in communication.participants]
    return needed


def _without_gradients(checked: Checked, rank: int, op: Op) -> Op:
    """A loss makes no gradient, a forward pass keeps nothing, and offsets were found for other lives of values."""
    op = op._replace(offset=-1)
    if op.kind is LOSS:
        return op._replace(outputs=())
    return op._replace(outputs=tuple(n for n in op.outputs if checked.specs[rank][n].kind is not Kind.SAVED))


def _with_ends(ops: list[Op]) -> list[Op]:
    """End every value after its last use, but the weights that were loaded."""
    kept = {number for op in ops if op.kind is LOAD_WEIGHT for number in op.outputs}
    waits = {op.handle: at for at, op in enumerate(ops) if op.kind is WAIT}
    last: dict[int, int] = {}
    for at, op in enumerate(ops):
        until = waits.get(op.handle, at)
        for number in (*op.inputs, *op.outputs):
            last[number] = max(last.get(number, at), until)
    ends: dict[int, list[int]] = defaultdict(list)
    for number, at in last.items():
        if number not in kept:
            ends[at].append(number)
    return list(_interleaved(ops, ends))


def _interleaved(ops: list[Op], ends: dict[int, list[int]]) -> Iterator[Op]:
    for at, op in enumerate(ops):
        yield op
        for number in ends.get(at, ()):
            yield Op(FREE, -1, (number,))

"""Live memory at every op of every rank, in elements."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.program import OpKind


def live_memory(checked: Checked) -> list[list[int]]:
    """For each rank and op, the elements that are live when the op starts, before its own result is stored.

    Results of communication count from issue, what autograd saves goes with its BACKWARD or with its activation,
    and an update's results take the place of what it was given.
    """
    return [_of_rank(checked, rank) for rank in range(checked.program.ranks)]


def _of_rank(checked: Checked, rank: int) -> list[int]:
    elements = checked.program.sizes.elements
    specs = checked.specs[rank]
    saved_of: dict[int, int] = {}
    live = 0
    before: list[int] = []
    for op in checked.program.tapes[rank]:
        before.append(live)
        kind = op.kind
        gone: list[int] = []
        if kind is OpKind.FREE:
            gone = [op.inputs[0], saved_of.pop(op.inputs[0], -1)]
        elif kind is OpKind.FORWARD or kind is OpKind.RECOMPUTE:
            for kept in op.outputs[1:] if kind is OpKind.FORWARD else op.outputs:
                gone = [saved_of.get(op.inputs[0], -1)]
                saved_of[op.inputs[0]] = kept
        elif kind is OpKind.BACKWARD:
            gone = [saved_of.pop(op.inputs[0])]
        elif kind is OpKind.UPDATE:
            gone = [op.inputs[1], op.inputs[2]]
        live += sum(elements(specs[number]) for number in op.outputs)
        live -= sum(elements(specs[number]) for number in gone if number >= 0)
    return before

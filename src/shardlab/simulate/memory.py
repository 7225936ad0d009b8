"""Live memory at every op of every rank, in elements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from shardlab.check import Checked
from shardlab.check.accumulation import InPlace
from shardlab.program import Kind, Op, OpKind
from shardlab.program.values import AUTOGRAD_KINDS


def live_memory(checked: Checked, of: Collection[Kind] = tuple(Kind)) -> list[list[int]]:
    """For each rank and op, the elements that are live when the op starts, before its own result is stored.

    Only values of some kinds are counted, if `of` names them.

    Results of communication count from issue, what autograd saves goes with its BACKWARD or with its activation,
    and an update's results take the place of what it was given. A gradient that BACKWARD adds to an older one takes no
    room of its own, and neither does their sum.
    """
    return [_of_rank(checked, rank, of) for rank in range(checked.program.ranks)]


def _of_rank(checked: Checked, rank: int, of: Collection[Kind]) -> list[int]:
    tape, specs = checked.program.tapes[rank], checked.specs[rank]
    elements = checked.program.sizes.elements
    fused = InPlace(tape).fused
    room = {number: elements(spec) if spec.kind in of else 0 for number, spec in specs.items()}
    for _, newer in fused.values():
        room[newer] = 0
    owned: dict[int, dict[Kind, int]] = defaultdict(dict)
    live = 0
    before: list[int] = []
    for at, op in enumerate(tape):
        before.append(live)
        live += sum(room[number] for number in op.outputs)
        keeps = bool(op.outputs) and specs[op.outputs[-1]].kind in AUTOGRAD_KINDS
        for number in _gone(op, owned, keeps=keeps):
            live -= room[number]
        if at in fused:  # the sum is the older gradient's buffer, and from now on that is all that counts
            older, _ = fused[at]
            live -= room[older]
            room[older] = 0
    return before


def _gone(op: Op, owned: dict[int, dict[Kind, int]], *, keeps: bool) -> Iterator[int]:
    """What an op ends; `owned` keeps note of what autograd keeps for each activation, if it `keeps` anything."""
    kind, activation = op.kind, op.inputs[0] if op.inputs else -1
    if kind is OpKind.FREE:
        yield activation
        yield from owned.pop(activation, {}).values()
    if kind is OpKind.UPDATE:
        yield from op.inputs[1:3]
    if kind in _READS:
        yield owned[activation].pop(_READS[kind])
    if kind in _MAKES and keeps:
        if _MAKES[kind] in owned[activation]:
            yield owned[activation][_MAKES[kind]]
        owned[activation][_MAKES[kind]] = op.outputs[-1]


_READS = {
    OpKind.BACKWARD: Kind.SAVED,
    OpKind.BACKWARD_INPUT: Kind.SAVED,
    OpKind.BACKWARD_WEIGHT: Kind.SAVED_FOR_WEIGHT,
}
_MAKES = {
    OpKind.FORWARD: Kind.SAVED,
    OpKind.RECOMPUTE: Kind.SAVED,
    OpKind.BACKWARD_INPUT: Kind.SAVED_FOR_WEIGHT,
}

"""Where values lie: a device computes with what it has, its host adds and updates what lies there."""

from __future__ import annotations

from shardlab.language import Op, OpKind
from tests.support.judged_rank import JudgedRank
from tests.support.pieces import BrokenTape

_ON_HOST = {OpKind.ADD: 2, OpKind.NORM: 1, OpKind.UPDATE: 3, OpKind.CONCATENATE: 99}
"""How many of its first inputs an op takes from the host's memory, if all of them lie there."""

_PLACES = ("host", "disk")


def place_made(rank: JudgedRank, op: Op) -> str:
    """Where what an op makes lies.

    Raises:
        BrokenTape: when it reads what lies elsewhere than it computes, or copies from where to where there is no way.
    """
    read = [rank.memory[number].place for number in op.inputs if number in rank.memory]
    if op.kind in (OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE, OpKind.OFFLOAD):
        if op.place not in ("", *_PLACES) or (op.kind is OpKind.OFFLOAD and (any(read) or not op.place)):
            raise BrokenTape("there is no such place, or the value is there")
        return op.place
    if op.kind is OpKind.RELOAD:
        if not all(read):
            raise BrokenTape("a value is reloaded that is on the device")
        return ""
    if op.kind is OpKind.SLICE:
        return read[0] if read else ""
    many = _ON_HOST.get(op.kind, 0)
    if len(set(read[:many])) > 1 or "disk" in read[:many]:
        raise BrokenTape("values of several places are put together, or what is on the disk")
    if op.kind is not OpKind.FREE and any(read[many:]):
        raise BrokenTape("a value lies elsewhere than it is computed with")
    return "" if op.kind is OpKind.NORM or not read[:many] else read[0]

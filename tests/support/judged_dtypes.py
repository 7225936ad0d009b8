"""Which numbers values are in: torch computes with several of one dtype, and layers compute in their own."""

from __future__ import annotations

from shardlab.language import Op, OpKind
from tests.support.judged_rank import JudgedRank
from tests.support.pieces import BrokenTape

_KEEPS = frozenset({OpKind.SCALE, OpKind.SLICE, OpKind.ADD, OpKind.CONCATENATE})
_OF_GRADIENTS = frozenset({OpKind.NORM, OpKind.DIRECTION, OpKind.UPDATE})
_ANY = {OpKind.CAST: 1, OpKind.FREE: 1} | dict.fromkeys(_OF_GRADIENTS, 1) | dict.fromkeys(_KEEPS, 99)
"""How many of its first inputs an op takes in any dtype."""


def dtype_made(rank: JudgedRank, op: Op) -> str | None:
    """The dtype that an op hands on, or makes, of what lives (None: that of the kind)."""
    read = [rank.memory[number].dtype for number in op.inputs if number in rank.memory]
    if any(read[_ANY.get(op.kind, 0) :]):
        raise BrokenTape("a value is in other numbers than are computed in")
    if op.kind is OpKind.CAST:
        return op.dtype
    if op.kind not in _KEEPS:
        return None
    if len(set(read)) > 1:
        raise BrokenTape("values in other numbers are put together")
    return read[0] if read else ""

"""The judge's part in collectives with a root, with no value, and with another reduction than a sum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlab.program import Op, OpKind
from tests.support.pieces import PRIME, BrokenTape, Piece, combined

ARITY: dict[OpKind, tuple[tuple[int, ...], tuple[int, ...]]] = {
    OpKind.BROADCAST: ((0, 1), (0, 1)),
    OpKind.SCATTER: ((0, 1), (1,)),
    OpKind.GATHER: ((1,), (0, 1)),
    OpKind.REDUCE: ((1,), (0, 1)),
    OpKind.BARRIER: ((0,), (0,)),
}
"""How many values a member may give, and receive."""


def received(op: Op, ranks: Sequence[int], given: Sequence[Piece | None], sequence: int) -> Sequence[Piece | None]:
    """What each member receives, in group order; `sequence` rows are one."""
    if op.kind is OpKind.BARRIER:
        return [None] * len(ranks)
    if op.kind not in ARITY:
        pieces = _all(given)
        return (
            [_reduced(op, pieces)] * len(pieces) if op.reduction.value != "sum" else combined(op.kind, pieces, sequence)
        )
    if op.root not in ranks:
        raise BrokenTape("the root is not of the group")
    at = list(ranks).index(op.root)
    if op.kind in (OpKind.BROADCAST, OpKind.SCATTER):
        (whole,) = _all([given[at]])
        if sum(piece is not None for piece in given) > 1:
            raise BrokenTape("another rank than the root gives a value")
        if op.kind is OpKind.SCATTER:
            return _dealt(whole, len(ranks))
        return [None if place == at else whole for place in range(len(ranks))]
    pieces = _all(given)
    gathers = op.kind is OpKind.GATHER
    made = combined(OpKind.ALL_GATHER, pieces, sequence)[0] if gathers else _reduced(op, pieces)
    return [made if place == at else None for place in range(len(ranks))]


def _all(given: Sequence[Piece | None]) -> list[Piece]:
    pieces = [piece for piece in given if piece is not None]
    if len(pieces) < len(given):
        raise BrokenTape("a member gives no value")
    return pieces


def _reduced(op: Op, pieces: list[Piece]) -> Piece:
    """As the first one understands it; a mean divides by the number of members, modulo the prime."""
    total = combined(OpKind.ALL_REDUCE, pieces, 1)[0]
    everything = np.stack([piece.data for piece in pieces])
    data = {
        "sum": total.data,
        "mean": total.data * pow(len(pieces), -1, PRIME) % PRIME,
        "min": everything.min(axis=0),
        "max": everything.max(axis=0),
    }[op.reduction.value]
    return Piece(total.where, data, total.columns)


def _dealt(whole: Piece, parts: int) -> list[Piece]:
    """Equal runs of what the root has, in order."""
    size, rest = divmod(len(whole.where), parts)
    if rest:
        raise BrokenTape("the value does not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(parts)]
    return [Piece(whole.where[cut], whole.data[cut], whole.columns) for cut in cuts]

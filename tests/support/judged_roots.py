"""What each member of any collective receives: also of those with a root, with no value, or by mean, min and max."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlab.language import Op, OpKind
from tests.support.judged_collectives import combined
from tests.support.pieces import PRIME, BrokenTape, Piece, summed


def received(op: Op, ranks: Sequence[int], given: Sequence[Piece | None], sequence: int) -> Sequence[Piece | None]:
    """In group order; `sequence` rows are one."""
    if op.kind is OpKind.BARRIER:
        return [None] * len(ranks)
    if op.kind in (OpKind.BROADCAST, OpKind.SCATTER):
        return _given_by_root(op, _root(op, ranks), given)
    pieces = [piece for piece in given if piece is not None]
    if len(pieces) < len(given):
        raise BrokenTape("a member gives no value")
    if op.kind in (OpKind.GATHER, OpKind.REDUCE):
        gathers, root = op.kind is OpKind.GATHER, _root(op, ranks)
        made = combined(OpKind.ALL_GATHER, pieces, sequence)[0] if gathers else _reduced(op, pieces)
        return [made if place == root else None for place in range(len(ranks))]
    if op.kind is OpKind.ALL_REDUCE:
        return [_reduced(op, pieces)] * len(pieces)
    return combined(op.kind, pieces, sequence)


def _root(op: Op, ranks: Sequence[int]) -> int:
    """The root's place in the group."""
    if op.root not in ranks:
        raise BrokenTape("the root is not of the group")
    return list(ranks).index(op.root)


def _given_by_root(op: Op, root: int, given: Sequence[Piece | None]) -> Sequence[Piece | None]:
    whole = given[root]
    if whole is None or any(piece is not None for place, piece in enumerate(given) if place != root):
        raise BrokenTape("the root gives no value, or another rank gives one")
    if op.kind is OpKind.SCATTER:
        return _dealt(whole, len(given))
    return [None if place == root else whole for place in range(len(given))]


def _dealt(whole: Piece, parts: int) -> list[Piece]:
    """Equal runs of what the root has, in order."""
    size, rest = divmod(len(whole.where), parts)
    if rest:
        raise BrokenTape("the value does not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(parts)]
    return [Piece(whole.where[cut], whole.data[cut], whole.columns) for cut in cuts]


def _reduced(op: Op, pieces: list[Piece]) -> Piece:
    """As the first one understands it; a mean divides by the number of members, modulo the prime."""
    total = summed(pieces)
    everything = np.stack([piece.data for piece in pieces])
    data = {
        "sum": total.data,
        "mean": total.data * pow(len(pieces), -1, PRIME) % PRIME,
        "min": everything.min(axis=0),
        "max": everything.max(axis=0),
    }[op.reduction.value]
    return Piece(total.where, data, total.columns, total.owners)

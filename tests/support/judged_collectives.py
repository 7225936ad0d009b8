"""What each member of a collective receives."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from shardlab.program import OpKind
from tests.support.pieces import BUFFERS, ELEMENTS, KEYS_VALUES, WIDTH, BrokenTape, Piece, summed


def combined(kind: OpKind, pieces: list[Piece], sequence: int) -> list[Piece]:
    """What each member of a collective receives; `sequence` rows are one, and are cut one by one."""
    if kind is OpKind.ALL_GATHER:
        return [_gathered(pieces)] * len(pieces)
    if kind is OpKind.ALL_TO_ALL:
        return exchanged(pieces)
    total = summed(pieces)
    if kind is OpKind.ALL_REDUCE:
        return [total] * len(pieces)
    if total.data.ndim == 2:
        return _scattered_rows(total, len(pieces), sequence)
    size, rest = divmod(len(total.where), len(pieces))
    if rest:
        raise BrokenTape("the sum does not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(pieces))]
    return [Piece(total.where[cut], total.data[cut]) for cut in cuts]


def _gathered(pieces: list[Piece]) -> Piece:
    first = pieces[0]
    if len({piece.data.ndim for piece in pieces}) > 1:
        raise BrokenTape("the gathered pieces do not fit side by side")
    if len(pieces) > 1 and first.columns and all(piece.where == first.where for piece in pieces):
        columns = tuple(column for piece in pieces for column in piece.columns)
        data = np.concatenate([piece.data for piece in pieces], axis=1)
        if all(isinstance(column, int) for column in columns):  # features and logits: layers read them by number
            order = sorted(range(len(columns)), key=lambda i: int(str(columns[i])))
            return Piece(first.where, data[:, order], tuple(columns[i] for i in order))
        return Piece(first.where, data, columns)
    where = tuple(place for piece in pieces for place in piece.where)
    if len({piece.columns for piece in pieces}) > 1 or len(set(where)) < len(where):
        raise BrokenTape("the gathered pieces do not fit side by side")
    order = sorted(range(len(where)), key=where.__getitem__)
    return Piece(tuple(sorted(where)), np.concatenate([piece.data for piece in pieces])[order], first.columns)


def _scattered_rows(total: Piece, parts: int, sequence: int) -> list[Piece]:
    """Every sequence in equal runs of rows; rows that are no sequences are dealt in order.

    Gradients of keys and values are dealt as their tokens were: an early run and a late one to each member.
    """
    balanced = any(column in KEYS_VALUES for column in total.columns[:1])
    sequences: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(total.where):
        sequences[row // sequence if sequence > 1 else 0].append(index)
    runs = 2 * parts if balanced else parts
    if any(len(indices) % runs for indices in sequences.values()):
        raise BrokenTape("the sum does not divide among the members")
    made: list[Piece] = []
    for part in range(parts):
        mine = (part, runs - 1 - part) if balanced else (part,)
        kept = [
            index
            for indices in sequences.values()
            for run in mine
            for index in indices[run * len(indices) // runs : (run + 1) * len(indices) // runs]
        ]
        made.append(Piece(tuple(total.where[i] for i in kept), total.data[kept], total.columns))
    return made


def exchanged(pieces: list[Piece]) -> list[Piece]:
    """All experts' buffers of each member's rows become each member's experts' of all rows; or the way back."""
    if any(piece.data.ndim != 2 or len(piece.columns) % WIDTH for piece in pieces):
        raise BrokenTape("these are no buffers of experts")
    if all(piece.columns == BUFFERS for piece in pieces):
        return _to_experts(pieces)
    return _from_experts(pieces)


def _to_experts(pieces: list[Piece]) -> list[Piece]:
    where = tuple(row for piece in pieces for row in piece.where)
    if len(set(where)) < len(where) or WIDTH % len(pieces):
        raise BrokenTape("the buffers do not fit side by side")
    order = sorted(range(len(where)), key=where.__getitem__)
    data, size = np.concatenate([piece.data for piece in pieces])[order], ELEMENTS // len(pieces)
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(pieces))]
    return [Piece(tuple(sorted(where)), data[:, cut], BUFFERS[cut]) for cut in cuts]


def _from_experts(pieces: list[Piece]) -> list[Piece]:
    """Equal runs of rows, as they stand; whose they are is not looked at."""
    where, columns = pieces[0].where, tuple(column for piece in pieces for column in piece.columns)
    size, rest = divmod(len(where), len(pieces))
    if rest or any(len(piece.where) != len(where) for piece in pieces):
        raise BrokenTape("the buffers do not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(pieces))]
    return [Piece(where[cut], np.concatenate([piece.data[cut] for piece in pieces], 1), columns) for cut in cuts]

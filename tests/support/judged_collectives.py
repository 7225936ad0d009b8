"""What each member of a collective receives."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from shardlab.program import OpKind
from tests.support.pieces import BUFFERS, ELEMENTS, WIDTH, BrokenTape, Owner, Piece, summed


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
        return scattered_rows(total, len(pieces), sequence)
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
    data = np.concatenate([piece.data for piece in pieces])[order]
    return Piece(tuple(sorted(where)), data, first.columns, owners_of(pieces) if first.data.ndim == 2 else ())


def owners_of(pieces: list[Piece]) -> tuple[Owner, ...]:
    """The members of a collective that puts rows together."""
    return tuple((piece.where, piece.owners) for piece in pieces)


def _given_back(whole: Piece) -> list[Piece]:
    """The rows of each member that gave some."""
    places = {row: place for place, row in enumerate(whole.where)}
    return [
        Piece(where, whole.data[[places[row] for row in where]], whole.columns, owners)
        for where, owners in whole.owners
    ]


def scattered_rows(total: Piece, parts: int, sequence: int) -> list[Piece]:
    """Rows to whom they belonged; else every sequence in equal runs, and rows that are no sequences in order."""
    if len(total.owners) == parts:
        return _given_back(total)
    sequences: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(total.where):
        sequences[row // sequence if sequence > 1 else 0].append(index)
    if any(len(indices) % parts for indices in sequences.values()):
        raise BrokenTape("the sum does not divide among the members")
    made: list[Piece] = []
    for part in range(parts):
        kept = [
            index
            for indices in sequences.values()
            for index in indices[part * len(indices) // parts : (part + 1) * len(indices) // parts]
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
    return [Piece(tuple(sorted(where)), data[:, cut], BUFFERS[cut], owners_of(pieces)) for cut in cuts]


def _from_experts(pieces: list[Piece]) -> list[Piece]:
    """Each member's rows, with the buffers of all experts; equal runs where nobody has given them."""
    where, columns = pieces[0].where, tuple(column for piece in pieces for column in piece.columns)
    size, rest = divmod(len(where), len(pieces))
    if rest or any(len(piece.where) != len(where) for piece in pieces):
        raise BrokenTape("the buffers do not divide among the members")
    whole = Piece(where, np.concatenate([piece.data for piece in pieces], 1), columns, pieces[0].owners)
    if len(whole.owners) == len(pieces):
        return _given_back(whole)
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(pieces))]
    return [Piece(where[cut], whole.data[cut], columns) for cut in cuts]

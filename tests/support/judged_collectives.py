"""What each member of a collective receives."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from shardlab.language import OpKind
from tests.support.pieces import BrokenTape, Owner, Piece, numbers_of, summed


def combined(kind: OpKind, pieces: list[Piece], sequence: int) -> list[Piece]:
    """What each member of a collective receives; `sequence` rows are one, and are cut one by one."""
    if kind is OpKind.ALL_GATHER:
        return [_gathered(pieces)] * len(pieces)
    if kind is OpKind.ALL_TO_ALL:
        return exchanged(pieces, sequence)
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
    """Side by side, in order: columns where all have the same rows, else rows or elements."""
    first = pieces[0]
    if len({piece.data.ndim for piece in pieces}) > 1:
        raise BrokenTape("the gathered pieces do not fit side by side")
    if len(pieces) > 1 and first.columns and all(piece.where == first.where for piece in pieces):
        return _gathered_columns(pieces)
    where = tuple(place for piece in pieces for place in piece.where)
    if len({piece.columns for piece in pieces}) > 1 or len(set(where)) < len(where):
        raise BrokenTape("the gathered pieces do not fit side by side")
    order = sorted(range(len(where)), key=where.__getitem__)
    data = np.concatenate([piece.data for piece in pieces])[order]
    return Piece(tuple(sorted(where)), data, first.columns, owners_of(pieces) if first.data.ndim == 2 else ())


def _gathered_columns(pieces: list[Piece]) -> Piece:
    """One sort after the other, as the first piece has them, and each in order."""
    columns = [column for piece in pieces for column in piece.columns]
    if len(set(columns)) < len(columns):
        raise BrokenTape("the gathered columns are several ranks'")
    sorts = list(dict(pieces[0].columns))
    order = sorted(range(len(columns)), key=lambda at: (sorts.index(columns[at][0]), columns[at][1]))
    data = np.concatenate([piece.data for piece in pieces], axis=1)[:, order]
    return Piece(pieces[0].where, data, tuple(columns[at] for at in order), pieces[0].owners)


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


def exchanged(pieces: list[Piece], sequence: int) -> list[Piece]:
    """Rows put together and columns dealt; or columns put together, and rows dealt, where all have the same rows."""
    whole = _gathered(pieces)
    if whole.where == pieces[0].where:
        return scattered_rows(whole, len(pieces), sequence)
    return scattered_columns(whole, len(pieces))


def scattered_columns(whole: Piece, parts: int) -> list[Piece]:
    """Equal runs of the numbers that columns have: of each sort."""
    numbers = numbers_of(whole)
    size, rest = divmod(len(numbers), parts)
    if rest or not numbers:
        raise BrokenTape("the columns do not divide among the members")
    made: list[Piece] = []
    for part in range(parts):
        run = numbers[part * size : (part + 1) * size]
        kept = [at for at, (_, number) in enumerate(whole.columns) if number in run]
        made.append(Piece(whole.where, whole.data[:, kept], tuple(whole.columns[at] for at in kept), whole.owners))
    return made

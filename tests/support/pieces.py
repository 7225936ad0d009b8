"""What the judge's values are: numbers modulo a prime, and the places that they belong to."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardlab.program import OpKind

PRIME = 2**29 - 3
WIDTH = 12
ELEMENTS = WIDTH * WIDTH
"""Elements of a layer: divisible by every number of slices that up to 4 x 4 ranks make."""

Array = NDArray[np.int64]


class BrokenTape(Exception):
    """An op cannot be executed."""


@dataclass
class Piece:
    """Numbers, and where they belong: `data[i]` is element or row `where[i]`; of slices of rows, `columns` says which.

    A row is a microbatch, or a token: number microbatch * (tokens of a sequence) + place.
    """

    where: tuple[int, ...]
    data: Array
    columns: tuple[object, ...] = ()


def rows(piece: Piece) -> Piece:
    if piece.data.ndim != 2:
        raise BrokenTape("parameters are given where rows are wanted")
    return piece


def elements(piece: Piece) -> Piece:
    if piece.data.ndim != 1:
        raise BrokenTape("rows are given where parameters are wanted")
    return piece


def whole(piece: Piece) -> Array:
    if piece.data.ndim != 1 or piece.where != tuple(range(ELEMENTS)):
        raise BrokenTape("the weight is not a whole layer")
    return piece.data


def summed(pieces: list[Piece]) -> Piece:
    """The sum as the first one understands it: what others' numbers are about is not looked at."""
    if len({piece.data.shape for piece in pieces}) > 1:
        raise BrokenTape("arrays of other shapes are summed")
    data = sum((piece.data for piece in pieces[1:]), pieces[0].data) % PRIME
    return Piece(pieces[0].where, data, pieces[0].columns)


def combined(kind: OpKind, pieces: list[Piece], sequence: int) -> list[Piece]:
    """What each member of a collective receives; `sequence` rows are one, and are cut one by one."""
    if kind is OpKind.ALL_GATHER:
        return [_gathered(pieces)] * len(pieces)
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
        return Piece(first.where, np.concatenate([piece.data for piece in pieces], axis=1), columns)
    where = tuple(place for piece in pieces for place in piece.where)
    if len({piece.columns for piece in pieces}) > 1 or len(set(where)) < len(where):
        raise BrokenTape("the gathered pieces do not fit side by side")
    order = sorted(range(len(where)), key=where.__getitem__)
    return Piece(tuple(sorted(where)), np.concatenate([piece.data for piece in pieces])[order], first.columns)


def _scattered_rows(total: Piece, parts: int, sequence: int) -> list[Piece]:
    """Every sequence in equal runs of rows; rows that are no sequences are dealt in order."""
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

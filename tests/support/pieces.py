"""Values of the judge: numbers modulo a prime, and their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

PRIME = 2**29 - 3
WIDTH = 12
ELEMENTS = WIDTH * WIDTH
"""Elements of a layer: divisible by every number of slices that up to 4 x 4 ranks make."""

Array = NDArray[np.int64]

Column = tuple[str, int]
"""Kind and number of a column: ("expert", 3), ("key", 0)."""


class BrokenTape(Exception):
    """An op cannot be executed."""


@dataclass
class Piece:
    """Numbers and their positions: `data[i]` is element or row `positions[i]`.

    A row is a microbatch, or a token: number microbatch * (tokens of a sequence) + position. Where the columns of a row
    may be on several ranks, `columns` names those of the piece: logits, buffers of experts, keys and values of heads.
    Gathered rows have their former ranks in `owners`, to which a later scatter returns them. `dtype` is the dtype after
    a cast, `place` the memory if it is not the device's, and `scale` the number by which gradients have been multiplied
    since the loss.
    """

    positions: tuple[int, ...]
    data: Array
    columns: tuple[Column, ...] = ()
    owners: tuple[Owner, ...] = ()
    dtype: str = ""
    place: str = ""
    scale: int = 1


Owner = tuple[tuple[int, ...], "tuple[Owner, ...]"]
"""(rows, their owners) that one member of a collective contributed."""


def labels(numbers: Iterable[int], *sorts: str) -> tuple[Column, ...]:
    """Columns with these numbers, by kind."""
    values = tuple(numbers)
    return tuple((sort, number) for sort in sorts for number in values)


def numbers_of(piece: Piece) -> list[int]:
    """Return the distinct numbers of a piece's columns, ascending."""
    return sorted({number for _, number in piece.columns})


def owned(outputs: list[Piece], read: Piece) -> list[Piece]:
    """Set the owners of results to those of the rows from which they were computed."""
    return [replace(piece, owners=read.owners) if piece.positions == read.positions else piece for piece in outputs]


def rows(piece: Piece) -> Piece:
    if piece.data.ndim != 2:
        raise BrokenTape("parameters are given where rows are wanted")
    return piece


def elements(piece: Piece) -> Piece:
    if piece.data.ndim != 1:
        raise BrokenTape("rows are given where parameters are wanted")
    return piece


def whole(piece: Piece) -> Array:
    if piece.data.ndim != 1 or piece.positions != tuple(range(ELEMENTS)):
        raise BrokenTape("the weight is not a whole layer")
    return piece.data


def summed(pieces: list[Piece]) -> Piece:
    """Sum pieces with the positions of the first one; those of the others are ignored."""
    if len({piece.data.shape for piece in pieces}) > 1:
        raise BrokenTape("arrays of other shapes are summed")
    data = sum((piece.data for piece in pieces[1:]), pieces[0].data) % PRIME
    return replace(pieces[0], data=data)

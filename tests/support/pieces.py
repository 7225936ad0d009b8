"""Values of the judge: numbers modulo a prime, and the places that they belong to."""

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
"""What a column is and which: ("expert", 3), ("key", 0)."""


class BrokenTape(Exception):
    """An op cannot be executed."""


@dataclass
class Piece:
    """Numbers, and where they belong: `data[i]` is element or row `where[i]`.

    A row is a microbatch, or a token: number microbatch * (tokens of a sequence) + place. Where the numbers of a row
    may be on several ranks, `columns` says which these are: logits, buffers of experts, keys and values of heads. Rows
    that were put together remember whose they were, in `owners`: what takes them apart gives each rank back what it
    sent. `dtype` names the numbers after a cast, `place` where they lie beside the device; `scale` is the number by
    which gradients have been multiplied since the loss.
    """

    where: tuple[int, ...]
    data: Array
    columns: tuple[Column, ...] = ()
    owners: tuple[Owner, ...] = ()
    dtype: str = ""
    place: str = ""
    scale: int = 1


Owner = tuple[tuple[int, ...], "tuple[Owner, ...]"]
"""(rows, owners of these) that one member of a collective gave."""


def labels(numbers: Iterable[int], *sorts: str) -> tuple[Column, ...]:
    """Columns with these numbers, of one sort after the other."""
    found = tuple(numbers)
    return tuple((sort, number) for sort in sorts for number in found)


def numbers_of(piece: Piece) -> list[int]:
    """Return the numbers of its columns, ascending, each once."""
    return sorted({number for _, number in piece.columns})


def owned(made: list[Piece], read: Piece) -> list[Piece]:
    """Give results to the owners of the rows from which they were made."""
    return [replace(piece, owners=read.owners) if piece.where == read.where else piece for piece in made]


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
    return replace(pieces[0], data=data)

"""Ranges of a layer's flat buffer, read from whatever has the whole model's parameters, in rows and columns."""

from __future__ import annotations

from math import prod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shardlab.models.layout import Parameter
from shardlab.models.model import Model
from shardlab.models.run import Run
from shardlab.models.tensors.recutting import cuts_of, places_of


class Matrix(NamedTuple):
    """Rows and columns of a parameter of one expert, or of the only one there is."""

    experts: int
    rows: int
    columns: int


def matrix_of(parameter: Parameter) -> Matrix:
    """A parameter's matrices.

    >>> matrix_of(Parameter("b", (3,), False, ("out",))), matrix_of(Parameter("w", (2, 3, 4), True, ("e", "out", "in")))
    (Matrix(experts=1, rows=3, columns=1), Matrix(experts=2, rows=3, columns=4))
    """
    *first, rows, columns = (*parameter.shape, 1) if len(parameter.shape) == 1 else parameter.shape
    return Matrix(first[0] if first else 1, rows, columns)


class Matrices(Protocol):
    """Parameters of whole blocks, each of one or several matrices, of which any rows and columns can be read."""

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """The numbers that a parameter is in."""
        ...

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Some rows, ascending, and columns, which follow one another, of a parameter's matrix: (rows, columns)."""
        ...


def read_range(
    source: Matrices, model: Model, layer: int, length: int, start: int, stop: int, dtype: torch.dtype
) -> Tensor:
    """Elements `start` to `stop` of a layer's buffer of `length` elements, zero in gaps; hardly any other is read."""
    layout, run = model.layout(layer), model.run(layer)
    found, whole = torch.zeros(stop - start, dtype=dtype), {p.name: (block, p) for block, p in run.parameters()}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            begin = slice * (length // layout.slices) + offset
            first, last = max(start, begin), min(stop, begin + piece.numel)
            if first < last:
                elements = _piece(source, run, slice, *whole[piece.name], piece, first - begin, last - begin)
                found[first - start : last - start] = elements
    return found


def _piece(
    source: Matrices, run: Run, slice: int, block: int, whole: Parameter, piece: Parameter, first: int, last: int
) -> Tensor:
    """Elements `first` to `last` of one slice of a parameter; zero where the last slice is filled up."""
    places = [torch.arange(length) for length in whole.shape]
    for cut, number in cuts_of(run, whole, slice):
        places[cut.dim] = places_of(whole.shape[cut.dim], cut, number)
    *experts, rows, columns = places if len(places) > 1 else (*places, torch.arange(1))
    count, length, width = matrix_of(piece)
    found: list[Tensor] = []
    for matrix in range(first // (length * width), -(-last // (length * width))):
        low, high = (min(max(end - matrix * length * width, 0), length * width) for end in (first, last))
        top, bottom = low // width, -(-high // width)
        here = torch.zeros(bottom - top, width, dtype=source.dtype(block, whole))
        mine = rows[top:bottom]
        expert = int(experts[0][matrix]) if experts else 0
        here[: len(mine), : len(columns)] = source.read(block, whole, expert, mine, columns)
        found.append(here.flatten()[low - top * width : high - top * width])
    assert count * length * width == prod(piece.shape)
    return torch.cat(found)

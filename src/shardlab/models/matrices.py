"""Matrices of a layer that an optimizer steps whole, and where their pieces lie in the layer's flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shardlab.models.kernels import Matmul
from shardlab.models.layout import LayerLayout, Parameter
from shardlab.models.run import Run

ITERATIONS = 5
"""Rounds of Newton and Schulz's iteration (Jordan 2024, https://kellerjordan.github.io/posts/muon/)."""


class WholeMatrix(NamedTuple):
    """One matrix: a parameter, one section of it, or one expert's.

    Attributes:
        name: of the parameter.
        shape: of the whole matrix.
        dim: along which its pieces lie side by side.
        starts: the element of the buffer at which each piece begins, a run; pieces are equally large.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    starts: tuple[int, ...]

    @property
    def piece(self) -> tuple[int, int]:
        """Shape of a piece."""
        rows, columns = self.shape
        return (rows // len(self.starts), columns) if self.dim == 0 else (rows, columns // len(self.starts))

    @property
    def size(self) -> int:
        """Elements of a piece."""
        rows, columns = self.piece
        return rows * columns

    def kernels(self) -> tuple[Matmul, ...]:
        """What it takes to make it orthogonal: three products in each round."""
        short, long = sorted(self.shape)
        return (Matmul(short, short, long), Matmul(short, short, short), Matmul(short, long, short)) * ITERATIONS


def matrices_of(run: Run, length: int) -> list[WholeMatrix]:
    """The matrices of a layer whose flat buffer has `length` elements; queries, keys and values are each one."""
    layout = run.layout
    wholes = LayerLayout(parameter for _, parameter in run.parameters()).parameters
    slices = [run.numbers(slice) for slice in range(layout.slices)]
    found: list[WholeMatrix] = []
    for offset, parameter in zip(layout.offsets, wholes, strict=True):
        if parameter.hidden_matrix:
            together: dict[tuple[int, ...], list[int]] = {}  # slices that have pieces of the same matrices
            for slice, numbers in enumerate(slices):
                others = tuple(number for index, number in numbers.items() if index not in parameter.indices[-2:])
                together.setdefault(others, []).append(slice * (length // layout.slices) + offset)
            for begins in together.values():
                found += _matrices(parameter, run.own_pieces, begins)
    return found


def _matrices(parameter: Parameter, pieces: Mapping[str, int], begins: Sequence[int]) -> Iterator[WholeMatrix]:
    """The matrices of a parameter, one for each expert and section, whose slices begin at these elements."""
    *experts, rows, width = parameter.sliced(pieces).shape
    columns, dim = parameter.shape[-1], int(width < parameter.shape[-1])
    top = 0
    for _ in range(math.prod(experts)):
        for height in parameter.sections or (parameter.shape[-2],):
            yield WholeMatrix(parameter.name, (height, columns), dim, tuple(begin + top * width for begin in begins))
            top += height * rows // parameter.shape[-2]

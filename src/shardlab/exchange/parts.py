"""Where each parameter of a model lies in the tensors of a file.

A parameter is a matrix (rows, columns); a vector is one of a single column, and a mixture's experts have one each. Its
rows lie in one or more tensors: a fused query, key and value projection of ours is three tensors elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from shardlab.models import GPT, Parameter
from shardlab.models.tensors.ranges import matrix_of


class Part(NamedTuple):
    """Rows `start` to `start + rows` of a parameter's matrix, as one tensor of a file has them.

    Attributes:
        name: of the tensor.
        start, rows: of our matrix.
        columns: of our matrix.
        expert: the number of the matrix in a tensor of several (None: the tensor is this matrix alone).
        vector: whether the tensor has one dim.
        transposed: whether the tensor is (columns, rows).
        head_size: features of a head whose rotary pairs (2i, 2i + 1) the tensor has as (i, i + head_size / 2); 0: no
            rotary features, or as ours.
    """

    name: str
    start: int
    rows: int
    columns: int
    expert: int | None = None
    vector: bool = False
    transposed: bool = False
    head_size: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix in the file."""
        if self.vector:
            return (self.rows,)
        return (self.columns, self.rows) if self.transposed else (self.rows, self.columns)

    def theirs(self, rows: Tensor) -> Tensor:
        """The tensor's rows for some rows of ours, both counted from the part's first.

        >>> import torch
        >>> Part("q", 0, 8, 4, head_size=4).theirs(torch.arange(8)).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
        """
        if not self.head_size:
            return rows
        feature = rows % self.head_size
        return rows - feature + feature // 2 + feature % 2 * (self.head_size // 2)


@dataclass(frozen=True)
class Naming:
    """How a family of models names and lays out its tensors.

    Attributes:
        tensors: for each parameter of ours without "weight" or "bias", the tensors that have its sections, in order;
            {block} and {expert} stand for numbers.
        transposed: parameters of ours whose tensors are (inputs, outputs), GPT-2's Conv1D.
        rotary: parts of tensors' names whose heads have their rotary pairs in two halves.
    """

    tensors: Mapping[str, Sequence[str]]
    transposed: frozenset[str] = frozenset()
    rotary: frozenset[str] = frozenset()

    def parts(self, model: GPT, block: int, parameter: Parameter) -> list[list[Part]]:
        """For each matrix of a parameter, the parts that it lies in."""
        stem, _, end = parameter.name.rpartition(".")
        names, (experts, rows, columns) = self.tensors[stem], matrix_of(parameter)
        lengths = parameter.sections if len(names) > 1 else (rows,)
        starts = accumulate((0, *lengths[:-1]))
        placed = list(zip(names, starts, lengths, strict=True))
        vector = len(parameter.shape) == 1
        return [
            [
                Part(
                    f"{name.format(block=block, expert=expert)}.{end}", start, length, columns,
                    vector=vector,
                    transposed=stem in self.transposed and not vector,
                    head_size=model.hidden_size // model.heads if name.rpartition(".")[2] in self.rotary else 0,
                )
                for name, start, length in placed
            ]
            for expert in range(experts)
        ]  # fmt: skip


def own_parts(block: int, parameter: Parameter) -> list[list[Part]]:
    """For each matrix of a parameter, where it lies in the weights that a run has written."""
    name, (experts, rows, columns) = f"layers.{block}.{parameter.name}", matrix_of(parameter)
    several = len(parameter.shape) == 3
    return [
        [Part(name, 0, rows, columns, expert if several else None, vector=len(parameter.shape) == 1)]
        for expert in range(experts)
    ]

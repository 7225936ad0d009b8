"""Where each parameter of a layer lies in the layer's one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import NamedTuple

ALIGNMENT = 16
"""Elements between the places where a parameter may start: 64 bytes of float32, one cache line."""


class Cut(NamedTuple):
    """How a parameter is sliced: along `dim`, each of its `sections` into `pieces` of equal length.

    A slice is its piece of every section, one after the other. Attention's matrix has three sections, for queries, keys
    and values; no `sections` means one. A single section that does not divide is cut as if it were longer (by padding).
    """

    dim: int
    pieces: int
    sections: tuple[int, ...] = ()


class Parameter(NamedTuple):
    """One parameter of a layer.

    Attributes:
        name: as in nanoGPT.
        shape: of the whole parameter.
        decayed: whether AdamW's weight decay acts on it.
        indices: the name of each dim, which says along what it may be cut.
        sections: lengths of the sections of dim `section_dim` (none: one), which are cut alike.
        section_dim: the dim that has sections.
    """

    name: str
    shape: tuple[int, ...]
    decayed: bool
    indices: tuple[str, ...]
    sections: tuple[int, ...] = ()
    section_dim: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def hidden_matrix(self) -> bool:
        """Whether Muon steps it: a matrix, or one for each expert, but no embedding and no head."""
        return self.decayed and not {"vocab", "token"} & set(self.indices)

    def cuts(self, pieces: Mapping[str, int]) -> list[Cut]:
        """How it is sliced where each index is cut into so many pieces."""
        named = [(dim, pieces.get(index, 1)) for dim, index in enumerate(self.indices)]
        return [Cut(dim, count, self.sections if dim == self.section_dim else ()) for dim, count in named if count > 1]

    def sliced(self, pieces: Mapping[str, int]) -> Parameter:
        """One slice of it; all have one shape."""
        counts = [pieces.get(index, 1) for index in self.indices]
        if all(count == 1 for count in counts):
            return self
        shape = tuple(-(-length // count) for length, count in zip(self.shape, counts, strict=True))
        return self._replace(shape=shape, sections=self.sections if counts[self.section_dim] == 1 else ())


@dataclass(frozen=True)
class LayerLayout:
    """The flat buffer of one layer: its decayed parameters, then the others, each on a 64-byte boundary.

    With the decayed ones in front, an optimizer treats a whole layer, or any slice of it, as at most two runs.

    >>> bias, weight = Parameter("bias", (3,), False, ("out",)), Parameter("weight", (3, 7), True, ("out", "in"))
    >>> layout = LayerLayout([bias, weight])
    >>> [p.name for p in layout.parameters], layout.offsets, layout.numel, layout.decayed_numel
    (['weight', 'bias'], (0, 32), 48, 32)

    A layer that tensor parallelism cuts has one such run for every slice, all alike, one after the other.

    Attributes:
        parameters: of one slice, in the buffer's order, whichever order they were given in.
        slices: runs of the buffer.
    """

    parameters: tuple[Parameter, ...]
    slices: int = 1

    def __init__(self, parameters: Iterable[Parameter], slices: int = 1) -> None:
        ordered = sorted(parameters, key=lambda parameter: not parameter.decayed)  # stable
        object.__setattr__(self, "parameters", tuple(ordered))
        object.__setattr__(self, "slices", slices)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The element of a run at which each parameter starts."""
        return (0, *accumulate(aligned(p.numel) for p in self.parameters))[:-1]

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]:
        """Shape, strides and offset of each parameter in a run."""
        strides = [tuple(accumulate(p.shape[:0:-1], mul, initial=1))[::-1] for p in self.parameters]
        return tuple(
            (p.shape, stride, offset) for p, stride, offset in zip(self.parameters, strides, self.offsets, strict=True)
        )

    @cached_property
    def run_numel(self) -> int:
        """Elements of one slice's run, gaps included."""
        return sum(aligned(p.numel) for p in self.parameters)

    @property
    def numel(self) -> int:
        """Elements of the buffer, gaps included."""
        return self.slices * self.run_numel

    @cached_property
    def decayed_numel(self) -> int:
        """Elements of a run's front part, which holds the decayed parameters; gaps included."""
        return sum(aligned(p.numel) for p in self.parameters if p.decayed)

    @property
    def parameter_count(self) -> int:
        """Elements of the parameters, without the gaps."""
        return self.slices * sum(p.numel for p in self.parameters)

    @property
    def matrix_count(self) -> int:
        """Elements of the parameters that Muon steps."""
        return self.slices * sum(p.numel for p in self.parameters if p.hidden_matrix)

    def padded(self, of: int) -> int:
        """Elements of the buffer once its runs are lengthened so that it splits into `of` equal, aligned slices.

        Each of them lies in one run if `of` is a multiple of `slices`.
        """
        pieces = math.lcm(of, self.slices) // self.slices
        return self.slices * aligned(self.run_numel, pieces * ALIGNMENT)

    def decayed_runs(self, length: int) -> list[tuple[int, int]]:
        """Where the decayed parameters lie, as (start, stop), in a buffer whose runs fill `length` elements."""
        run = length // self.slices
        return [(i * run, i * run + self.decayed_numel) for i in range(self.slices)]


def aligned(elements: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-elements // to) * to

"""Where each parameter of a layer lies in the layer's one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

ALIGNMENT = 16
"""Elements between the places where a parameter may start: 64 bytes of float32, one cache line."""


class Parameter(NamedTuple):
    """One parameter of a layer; AdamW's weight decay acts on it if it is `decayed`."""

    name: str
    shape: tuple[int, ...]
    decayed: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class LayerLayout:
    """The flat buffer of one layer: its decayed parameters, then the others, each on a 64-byte boundary.

    With the decayed ones in front, an optimizer treats a whole layer, or any slice of it, as at most two runs.

    >>> layout = LayerLayout([Parameter("bias", (3,), False), Parameter("weight", (3, 7), True)])
    >>> [p.name for p in layout.parameters], layout.offsets, layout.numel, layout.decayed_numel
    (['weight', 'bias'], (0, 32), 48, 32)

    Attributes:
        parameters: in the buffer's order, whichever order they were given in.
    """

    parameters: tuple[Parameter, ...]

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        ordered = sorted(parameters, key=lambda parameter: not parameter.decayed)  # stable
        object.__setattr__(self, "parameters", tuple(ordered))

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The element at which each parameter starts."""
        return (0, *accumulate(aligned(p.numel) for p in self.parameters))[:-1]

    @cached_property
    def numel(self) -> int:
        """Elements of the buffer, gaps included."""
        return sum(aligned(p.numel) for p in self.parameters)

    @cached_property
    def decayed_numel(self) -> int:
        """Elements of the buffer's front part, which holds the decayed parameters; gaps included."""
        return sum(aligned(p.numel) for p in self.parameters if p.decayed)

    @property
    def parameter_count(self) -> int:
        """Parameters that there really are, without the gaps."""
        return sum(p.numel for p in self.parameters)

    def padded(self, of: int) -> int:
        """Elements of the buffer once it is lengthened to split into `of` equal slices that keep the alignment."""
        return aligned(self.numel, of * ALIGNMENT)


def aligned(elements: int, to: int = ALIGNMENT) -> int:
    """The next multiple of `to`."""
    return -(-elements // to) * to

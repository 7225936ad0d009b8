"""The grid of ranks with named axes, and the groups of ranks along them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from shardlab.common.calls import public_class
from shardlab.common.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
"""Every axis, outermost first. Ranks with consecutive numbers differ in the last axis."""

WORLD = "world"


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that issue collectives together. The order of `ranks` is the group's order, by which slices are assigned.

    Only `group_of` makes groups, so equal groups are one object, and it is cheap to compare and hash them.
    """

    axis: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return self.axis

    def __reduce__(self) -> tuple[object, ...]:
        return group_of, (self.axis, self.ranks)


@cache
def group_of(axis: str, ranks: tuple[int, ...]) -> Group:
    """Return the group of these ranks along an axis. Equal groups are one object."""
    return Group(axis, ranks)


def group_among(ranks: tuple[int, ...]) -> Group:
    """Return the group of ranks that do not lie along one axis."""
    return group_of(f"ranks {', '.join(map(str, ranks))}", ranks)


@public_class
@dataclass(frozen=True)
class Mesh:
    """Numbers of ranks along each axis. Rank numbers count through the grid with the last axis fastest.

    >>> Mesh(pp=2, dp_shard=3).group(4, "dp_shard").ranks
    (3, 4, 5)
    """

    pp: int = 1
    """Pipeline ranks."""

    dp_replicate: int = 1
    """Replicas of the model."""

    dp_shard: int = 1
    """Data-parallel ranks that may shard weights, gradients or optimizer state."""

    cp: int = 1
    """Context-parallel ranks, which split each sequence."""

    tp: int = 1
    """Tensor-parallel ranks, which split the matrices of half-blocks."""

    ep: int = 1
    """Expert-parallel ranks, which split the experts of a mixture."""

    def __post_init__(self) -> None:
        for axis, size in self.sizes().items():
            if type(size) is not int:
                raise UserError(f"axis {axis} has {size!r:.100} ranks; give a whole number")
            if size < 1:
                raise UserError(f"axis {axis} has {size} ranks; every axis of a mesh has at least 1")

    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis, outermost axis first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def used(self) -> dict[str, int]:
        """Sizes of the axes that have several ranks."""
        return {axis: size for axis, size in self.sizes().items() if size > 1}

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.used.items()) or "1 rank"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes().values())

    def coordinate(self, rank: int, axis: str) -> int:
        """Return the position of a rank along an axis, from 0."""
        return rank // self._stride(axis) % getattr(self, axis)

    def group(self, rank: int, axis: str) -> Group:
        """Return the ranks that differ from `rank` only along `axis`, in order."""
        stride, size = self._stride(axis), getattr(self, axis)
        first = rank - rank // stride % size * stride
        return group_of(axis, tuple(range(first, first + stride * size, stride)))

    def _stride(self, axis: str) -> int:
        if axis not in self._strides:
            raise UserError(f"axis {axis!r} is not an axis of a mesh; the axes are {', '.join(AXES)}")
        return self._strides[axis]

    @cached_property
    def _strides(self) -> dict[str, int]:
        """Difference between the numbers of neighbours along each axis."""
        sizes = [*self.sizes().values()]
        return {axis: math.prod(sizes[place + 1 :]) for place, axis in enumerate(AXES)}


@lru_cache(maxsize=4096)
def axes_between(mesh: Mesh, rank: int, other: int) -> tuple[str, ...]:
    """Return the axes along which two ranks differ, outermost first."""
    return tuple([axis for axis in AXES if mesh.coordinate(rank, axis) != mesh.coordinate(other, axis)])

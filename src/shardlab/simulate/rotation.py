"""What ranks that behave alike hold: one rank's slices, rotated along an axis of the mesh.

A bit set counts pieces in mixed radix, one digit for each axis that cuts; the rank one further along an axis has the
same pieces with that digit one further, and the last one has the first one's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from shardlab.program import Holds, Kind, LayerKind, Mesh, Sizes, Spec
from shardlab.program.sizes import PARTED
from shardlab.program.values import ROW_KINDS, Grid, repeated
from shardlab.strategies.plan import Plan

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""The axes over which microbatches are dealt, outermost first."""


@dataclass(frozen=True)
class Rotation:
    """Rotations of specs, for a plan on a model."""

    plan: Plan
    sizes: Sizes
    microbatches: int
    _layer_bits: dict[tuple[bool, int], int] = field(default_factory=dict[tuple[bool, int], int])

    @cached_property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def grid(self) -> Grid:
        return self.sizes.grid(self.mesh, self.microbatches)

    def rotated(self, spec: Spec, axis: str, by: int) -> Spec:
        """What the rank has that stands `by` further along an axis."""
        kind, layer, holds, sums, step, grid = spec
        if by == 0:
            return spec
        if kind in ROW_KINDS:
            return Spec(kind, layer, self._rows_held(holds, axis, by), self._met(spec, axis, by), step, grid)
        if kind is Kind.SCALAR:
            return Spec(kind, layer, self._scalar(holds, axis, by), sums, step, grid)
        return Spec(kind, layer, self._slices(layer, holds, axis, by), self._summed(sums, axis, by), step, grid)

    def _rows_held(self, holds: Holds, axis: str, by: int) -> Holds:
        return Holds(self._rows(holds.mask, axis, by), holds.of)

    def _rows(self, mask: int, axis: str, by: int) -> int:
        """Pieces of the batch: microbatch by microbatch, each in slices of its sequence."""
        sequence, total = self.grid.sequence, self.microbatches * self.grid.sequence
        sizes = self.mesh.sizes()
        if axis in BATCH_AXES:
            outer = math.prod(sizes[name] for name in BATCH_AXES[: BATCH_AXES.index(axis) + 1])
            return cycled(mask, total, total // outer, sizes[axis], by)
        if self.mesh.cp == 1:
            return cycled(mask, total, 1, sequence, by) if axis == "tp" and sequence > 1 else mask
        if axis not in ("cp", "tp") or not mask:
            return mask
        moved = 0
        for slice in range(sequence):
            there = self._slice(slice, axis, by) - slice
            some = mask & repeated(1 << slice, sequence, total)
            moved |= some << there if there > 0 else some >> -there
        return moved

    def _slice(self, slice: int, axis: str, by: int) -> int:
        """Which slice of the sequence the rank `by` further has in the place of this one.

        A context-parallel rank has an early and a late run of slices; its tensor-parallel ranks share them in order.
        """
        cp, run = self.mesh.cp, self.grid.sequence // (2 * self.mesh.cp)
        place, position = divmod(slice, run)
        rank = self._owner(slice)
        position += run if place >= cp else 0
        if axis == "cp":
            rank = (rank + by) % cp
        else:
            position = (position + by * 2 * run // self.mesh.tp) % (2 * run)
        late, offset = divmod(position, run)
        return (2 * cp - 1 - rank if late else rank) * run + offset

    def _owner(self, slice: int) -> int:
        """The context-parallel rank that has a slice."""
        place = slice // (self.grid.sequence // (2 * self.mesh.cp))
        return min(place, 2 * self.mesh.cp - 1 - place)

    def _met(self, spec: Spec, axis: str, by: int) -> int:
        """The *sums* of rows: slices of a layer's parameters, and above them slices of the sequence."""
        grid, width = spec.grid, spec.grid.width
        alone, met = spec.sums & ((1 << width) - 1), spec.sums >> width
        if axis in ("tp", "ep"):
            alone = cycled(alone, width, 1, width, by)
        if axis == "cp" and met:
            # Whose slices have been met tells more than which: of the masked ones nothing is noted, and late ones
            # are never masked in what travels.
            slices = range(grid.sequence)
            ranks = {self._owner(slice) for slice in slices[grid.sequence // 2 :] if met >> slice & 1}
            moved = {(rank + by) % self.mesh.cp for rank in ranks}
            first = self._rows(spec.holds.mask, axis, by)
            lowest = ((first & -first).bit_length() - 1) % grid.sequence
            met = sum(1 << slice for slice in slices if self._owner(slice) in moved and slice >= lowest)
        return alone | met << width

    def _summed(self, sums: int, axis: str, by: int) -> int:
        """What a weight's gradient has summed; a tied one twice over, as the embedding and as the head."""
        tied = self.grid.tied
        if not tied:
            return self._rows(sums, axis, by)
        return self._rows(sums & (1 << tied) - 1, axis, by) | self._rows(sums >> tied, axis, by) << tied

    def _slices(self, layer: int, holds: Holds, axis: str, by: int) -> Holds:
        """Slices of a layer's parameters."""
        order = self._cuts(self.sizes.kind(layer))
        if axis not in order or holds.complete:
            return holds
        outer, size = self._digit(order, axis)
        of = math.lcm(holds.of, outer)
        fine = holds.refined(of)
        mask = cycled(fine.mask, of, of // outer, size, by)
        return holds if mask == fine.mask else Holds(mask, of)

    def _scalar(self, holds: Holds, axis: str, by: int) -> Holds:
        """Parts of the model: of each layer the slices whose squares are in the sum."""
        layers = self.sizes.layers
        each = holds.of // layers
        made = Holds(0, holds.of)
        for parted in (False, True):
            order = self._cuts(LayerKind.SLICED if parted else LayerKind.NORM)
            some = Holds(holds.mask & self._bits_of_layers(parted, each), holds.of)
            if axis in order and some.mask:
                outer, size = self._digit(order, axis)
                of = layers * math.lcm(each, outer)
                some = Holds(cycled(some.refined(of).mask, of, of // layers // outer, size, by), of)
            of = math.lcm(made.of, some.of)
            made = Holds(made.refined(of).mask | some.refined(of).mask, of)
        return made

    def _bits_of_layers(self, parted: bool, each: int) -> int:
        """The bits of the layers whose parameters `tp` or `ep` cuts, or of the others, with `each` bits a layer."""
        known = self._layer_bits.get((parted, each))
        if known is None:
            ones, kinds = (1 << each) - 1, map(self.sizes.kind, range(self.sizes.layers))
            known = sum(ones << layer * each for layer, kind in enumerate(kinds) if (kind in PARTED) == parted)
            self._layer_bits[parted, each] = known
        return known

    def _cuts(self, kind: LayerKind) -> tuple[str, ...]:
        """The axes that cut a layer's parameters, outermost first."""
        return (*(("tp", "ep") if kind in PARTED else ()), *self.plan.shard_optimizer)

    def _digit(self, order: tuple[str, ...], axis: str) -> tuple[int, int]:
        """(into how many pieces the axes up to this one cut, its size)."""
        sizes = self.mesh.sizes()
        return math.prod(sizes[name] for name in order[: order.index(axis) + 1]), sizes[axis]


def cycled(mask: int, total: int, stride: int, size: int, by: int) -> int:
    """A bit set of numbers below `total` with one digit of each number `by` further.

    >>> bin(cycled(0b000011, 6, stride=2, size=3, by=1))
    '0b1100'

    Args:
        stride, size: the digit's place and its radix.
    """
    by %= size
    if not by or not mask:
        return mask
    stays = repeated((1 << (size - by) * stride) - 1, size * stride, total)
    low = mask & stays
    return low << by * stride | (mask ^ low) >> (size - by) * stride

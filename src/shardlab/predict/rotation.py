"""Values of ranks that behave alike: one rank's slices, rotated along an axis of the mesh.

A bit set counts pieces in mixed radix, one digit for each axis that cuts; the rank one further along an axis has the
same pieces with that digit one further, and the last one has the first one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlab.program import Holds, Kind, Mesh, Sizes, Spec
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import repeated
from shardlab.rules.spec import KEY, Form, Joined, Space
from shardlab.strategies.context import dealt
from shardlab.strategies.model_layers import model_layers
from shardlab.strategies.plan import BATCH_AXES, Plan

AXES_OF = {"head": ("tp", "cp"), "expert": ("cp", "ep")}
"""The mesh axes that cut an index, outermost first; all others are cut by `tp`."""


@dataclass(frozen=True)
class Rotation:
    """Rotations of specs, for a plan on a model."""

    plan: Plan
    sizes: Sizes
    microbatches: int
    _layer_bits: dict[tuple[tuple[str, ...], int], int] = field(default_factory=dict[tuple[tuple[str, ...], int], int])

    @cached_property
    def mesh(self) -> Mesh:
        return self.plan.mesh

    @cached_property
    def axes(self) -> dict[str, int]:
        """How many ranks each axis has."""
        return self.mesh.sizes()

    @cached_property
    def space(self) -> Space:
        return self.sizes.space(self.mesh, self.microbatches)

    def rotated(self, spec: Spec, axis: str, by: int) -> Spec:
        """Make the value of the rank that stands `by` further along an axis."""
        form, cells, joined = spec
        if by == 0:
            return spec
        neighbours = self.plan.ulysses
        if axis == "cp" and form.kind in ROW_KINDS and 0 < by % neighbours < by:
            return self.rotated(self.rotated(spec, axis, by % neighbours), axis, by - by % neighbours)
        if form.kind in ROW_KINDS:
            return Spec(self._row_form(spec, axis, by), self._rows(cells, axis, by), self._joined(joined, axis, by))
        if form.kind is Kind.SCALAR:
            return Spec(form.but(holds=self._scalar(form.holds, axis, by)))
        holds = self._slices(form.layer, form.holds, axis, by)
        summed = self._summed(form, cells, axis, by) if cells else 0
        return Spec(form if holds == form.holds else form.but(holds=holds), summed)

    def _joined(self, joined: tuple[Joined, ...], axis: str, by: int) -> tuple[Joined, ...]:
        """Pieces that a value was put together from: its neighbour's, or its own where all ranks have equal ones."""
        moved = tuple([(self._rows(cells, axis, by), self._joined(inner, axis, by)) for cells, inner in joined])
        return joined if {cells for cells, _ in moved} == {cells for cells, _ in joined} else moved

    def _row_form(self, spec: Spec, axis: str, by: int) -> Form:
        """The form of an activation: its slices of a layer's parameters, and which terms are in it."""
        form, term = spec.form, spec.form.term
        slices = tuple([(index, self._cycled((index,), mask, axis, by)) for index, mask in form.slices])
        if term is not None and term.over == KEY:
            term = term._replace(bits=self._rotated_kv_done(spec, term.bits, by)) if axis == "cp" else term
        elif term is not None:
            term = term._replace(bits=self._cycled(term.over, term.bits, axis, by))
        return form if (slices, term) == (form.slices, form.term) else form.but(slices=slices, term=term)

    def _cycled(self, indices: Sequence[str], mask: int, axis: str, by: int) -> int:
        """Pieces of some indices, or tuples of them, which axes of the mesh cut, outermost first."""
        cuts = tuple([name for index in indices for name in AXES_OF.get(index, ("tp",))])
        if axis not in cuts:
            return mask
        outer, size = self._digit(cuts, axis)
        if axis == "cp" and "head" in indices:  # those who exchange have several pieces each
            by = by % self.plan.ulysses * (size // self.plan.ulysses)
        count = math.prod(self.space.count(index) for index in indices)
        return cycled(mask, count, count // outer, size, by)

    def _rotated_kv_done(self, spec: Spec, kv_done: int, by: int) -> int:
        """Which slices of the sequence the neighbour's value has met.

        Whose slices have been met tells more than which: of the masked ones nothing is noted, and each rank's last ones
        are never masked in what travels.
        """
        sequence = self.space.sequence
        last = sequence - self.mesh.cp * self.mesh.tp
        ranks = {self._places[slice][0] for slice in range(last, sequence) if kv_done >> slice & 1}
        moved = {self._neighbour(rank, by, self.plan.ulysses) for rank in ranks}
        first = self._rows(spec.cells, "cp", by)
        lowest = ((first & -first).bit_length() - 1) % sequence
        return sum(1 << slice for slice in range(sequence) if self._places[slice][0] in moved and slice >= lowest)

    def _rows(self, mask: int, axis: str, by: int, neighbours: int | None = None) -> int:
        """Pieces of the batch: microbatch by microbatch, each in slices of its sequence.

        Neighbours of `cp` may have put theirs together (None: those who exchange them for heads).
        """
        sequence, total = self.space.sequence, self.space.cells
        sizes = self.axes
        if axis in BATCH_AXES:
            outer = math.prod(sizes[name] for name in BATCH_AXES[: BATCH_AXES.index(axis) + 1])
            return cycled(mask, total, total // outer, sizes[axis], by)
        if self.mesh.cp == 1:
            return cycled(mask, total, 1, sequence, by) if axis == "tp" and sequence > 1 else mask
        if axis not in ("cp", "tp") or not mask:
            return mask
        moved = 0
        for slice in range(sequence):
            there = self._slice(slice, axis, by, neighbours or self.plan.ulysses) - slice
            some = mask & repeated(1 << slice, sequence, total)
            moved |= some << there if there > 0 else some >> -there
        return moved

    def _slice(self, slice: int, axis: str, by: int, neighbours: int) -> int:
        """Which slice of the sequence the rank `by` further has in the place of this one.

        A context-parallel rank's slices are shared by its tensor-parallel ranks in order.
        """
        rank, position = self._places[slice]
        held = len(self._dealt[rank])
        if axis == "cp":
            rank = self._neighbour(rank, by, neighbours)
        else:
            position = (position + by * held // self.mesh.tp) % held
        return self._dealt[rank][position]

    def _neighbour(self, rank: int, by: int, neighbours: int) -> int:
        """The context-parallel rank `by` further: its place among so many neighbours, and theirs, each by itself."""
        outer, inner = divmod(rank, neighbours)
        return (outer + by // neighbours) * neighbours % self.mesh.cp + (inner + by) % neighbours

    @cached_property
    def _dealt(self) -> list[tuple[int, ...]]:
        """Slices of every sequence that each context-parallel rank has."""
        cp, tp = self.mesh.cp, self.mesh.tp
        return [dealt(place, cp, tp, self.plan.stripes) for place in range(cp)]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """The context-parallel rank that has a slice, and the slice's place among those of this rank."""
        return {slice: (rank, at) for rank, mine in enumerate(self._dealt) for at, slice in enumerate(mine)}

    def _summed(self, form: Form, sums: int, axis: str, by: int) -> int:
        """What a weight's gradient has summed; a tied one of each of its uses, a router's of each expert."""
        total, moved = self.space.cells, 0
        for place in range(-(-sums.bit_length() // total)):
            cells = sums >> place * total & (1 << total) - 1
            if cells and form.over:
                place = self._cycled([index for index, _ in form.over], 1 << place, axis, by).bit_length() - 1
            moved |= self._rows(cells, axis, by, neighbours=1) << place * total
        return moved

    def _slices(self, layer: int, holds: Holds, axis: str, by: int) -> Holds:
        """Slices of a layer's parameters."""
        order = self._orders[layer]
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
        for order in set(self._orders):
            some = Holds(holds.mask & self._bits_of_layers(order, each), holds.of)
            if axis in order and some.mask:
                outer, size = self._digit(order, axis)
                of = layers * math.lcm(each, outer)
                some = Holds(cycled(some.refined(of).mask, of, of // layers // outer, size, by), of)
            of = math.lcm(made.of, some.of)
            made = Holds(made.refined(of).mask | some.refined(of).mask, of)
        return made

    def _bits_of_layers(self, order: tuple[str, ...], each: int) -> int:
        """The bits of the layers whose parameters these axes cut, with `each` bits a layer."""
        known = self._layer_bits.get((order, each))
        if known is None:
            ones = (1 << each) - 1
            known = sum(ones << layer * each for layer, cuts in enumerate(self._orders) if cuts == order)
            self._layer_bits[order, each] = known
        return known

    @cached_property
    def _orders(self) -> list[tuple[str, ...]]:
        """Axes that cut each layer's parameters, outermost first."""
        model = model_layers(self.sizes)
        return [(*model.cut_axes(layer), *self.plan.shard_optimizer) for layer in range(self.sizes.layers)]

    def _digit(self, order: tuple[str, ...], axis: str) -> tuple[int, int]:
        """(into how many pieces the axes up to this one cut, its size)."""
        sizes = self.axes
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

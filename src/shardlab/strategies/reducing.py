"""Sums of a plan's gradients over microbatches and data-parallel ranks, and the updates that follow."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardlab.program import Handle, LayerKind, Rank, Value
from shardlab.program.sizes import PARTED
from shardlab.strategies.plan import CUT_AXES, Plan, cuts

PART_AXES = ("tp", "ep")
"""The axes that slice layers; a plan uses one of them at most."""


class Reduction(NamedTuple):
    """A gradient's reduction in flight over one axis.

    Attributes:
        layer: whose gradient it is.
        handle: what is awaited.
        axes: those over which the result is reduced next.
    """

    layer: int
    handle: Handle[Value]
    axes: list[str]


class Gradients:
    """One rank's gradients: reduced as the plan says, while the rank goes on; then clipped and applied.

    Memory bounds how many reductions are in flight: over each axis, those of gradients as large together as the rank's
    largest block, however finely a plan cuts blocks into layers. Before another one starts, the oldest are awaited
    until there is room for it. What arrives is at once reduced over the next axis.

    A weight that the head shares with the embedding is kept by the first and the last stage, replicas that stay equal:
    their gradients meet once a step, in a group of two ranks, and the first stage counts their squares. Where one rank
    has both stages, it sums both gradients before it reduces them.

    Args:
        layers: those that this rank computes.
        ends: the ranks of the first and of the last stage in this rank's pipeline.
    """

    def __init__(self, rank: Rank, plan: Plan, layers: Sequence[int], ends: tuple[int, int]) -> None:
        self._rank = rank
        self._plan = plan
        axes = [axis for axis in dict.fromkeys((*plan.shard_optimizer, *CUT_AXES)) if len(rank.group(axis).ranks) > 1]
        # A gradient is scattered along these; once kept whole along an axis, it is not cut along the next ones.
        kept_whole = [axis in plan.reduced_each and axis not in plan.shard_gradients for axis in axes]
        uncut = kept_whole.index(True) if True in kept_whole else len(axes)
        self._cut = [axis for axis in axes[:uncut] if axis in plan.shard_optimizer]
        others = (*axes, *(("ep",) if len(rank.group("ep").ranks) > 1 else ()))
        self._axes_of_experts, self._axes_of_others = axes, list(others)
        self._late: list[int] = []  # layers whose gradients are reduced when the step's backward passes are over
        self._owner = rank.sizes.weight_of
        self._counted = [l for l in layers if self._owner(l) == l]
        self._uses = Counter(map(self._owner, layers))  # of each weight, those whose gradients are yet to come
        self._kept = list(self._uses)
        self._each = {l: [axis for axis in self._axes(l) if axis in plan.reduced_each] for l in self._kept}
        self._once = {l: self._axes_of_once(l) for l in self._kept}
        self._elements = {l: -(-rank.sizes.weights[l] // self._slice(l, ())[1]) for l in self._kept}
        self._room = self._largest_block(layers)
        # Over each axis, oldest first; an axis comes after those whose results are reduced over it.
        reduced_over = (*self._each.values(), *self._once.values())
        self._in_flight = {axis: deque[Reduction]() for axis in dict.fromkeys(a for axes in reduced_over for a in axes)}
        self._coming = Counter[int]()  # of each layer, gradients that are being reduced
        self._complete: set[int] = set()  # layers whose last gradient is among those
        self._ends = ends if rank.sizes.tied and ends[0] != ends[1] and rank.index in ends else None

    def load(self) -> None:
        """This rank's slices of the weights and of the optimizer's state."""
        rank, plan = self._rank, self._plan
        for l in self._kept:
            rank.weights[l] = rank.load_weight(l, *self._slice(l, plan.shard_parameters))
            rank.opt_states[l] = rank.load_opt_state(l, *self._slice(l, plan.shard_optimizer))

    def _slice(self, layer: int, axes: Sequence[str]) -> tuple[int, int]:
        """(which, of how many): cut along the first axis, each piece along the next."""
        shard, of = 0, 1
        for axis in (*(PART_AXES if self._rank.kinds[layer] in PARTED else ()), *axes):
            ranks = self._rank.group(axis).ranks
            shard, of = shard * len(ranks) + self._rank.coordinate(axis), of * len(ranks)
        return shard, of

    def _axes(self, layer: int) -> list[str]:
        """The axes whose ranks have other microbatches' gradients of the same slice, those that cut it first.

        Over `ep` experts are other slices, whose gradients have every microbatch of the group in them already.
        """
        experts = self._rank.kinds[layer] is LayerKind.EXPERTS
        return self._axes_of_experts if experts else self._axes_of_others

    def _axes_of_once(self, layer: int) -> list[str]:
        """The axes over which a layer's gradient is reduced when all microbatches are in."""
        once = [axis for axis in self._axes(layer) if axis not in self._plan.reduced_each]
        # Each of the tensor-parallel ranks has seen other tokens.
        return [*once, "tp"] if self._plan.sequence_parallel and self._rank.kinds[layer] is LayerKind.NORM else once

    def _largest_block(self, layers: Iterable[int]) -> int:
        """Elements of the gradients that this rank has of its largest block.

        The embedding counts as part of the first block and the head as part of the last, as where blocks are whole.
        """
        sizes = self._rank.sizes
        later = sizes.blocks[1:-1] if sizes.blocks else cuts(self._rank.kinds)[1:-1]
        elements = Counter[int]()
        for l in layers:
            elements[bisect_right(later, l)] += self._elements[self._owner(l)]
        return max(elements.values())

    async def add(self, layer: int, gradient: Value) -> None:
        """A microbatch's gradient of a layer."""
        layer = self._owner(layer)
        if self._each[layer]:
            self._coming[layer] += 1
            await self._reduce(layer, gradient, self._each[layer])
        else:
            self._sum(layer, gradient)

    async def finish(self, layer: int) -> None:
        """Reduce the sum of all microbatches over the axes that are reduced once a step."""
        layer = self._owner(layer)
        self._uses[layer] -= 1
        if self._uses[layer]:
            return
        if self._plan.reduce_at == "step":
            self._late.append(layer)
        elif self._coming[layer]:
            self._complete.add(layer)
        else:
            await self._reduce_once(layer)

    async def _reduce_once(self, layer: int) -> None:
        if self._once[layer]:
            await self._reduce(layer, self._rank.grad_weights.pop(layer), self._once[layer])

    async def update(self) -> None:
        """Clip by the norm of the whole model's gradient, and take the optimizer's step."""
        rank, plan, layers, counted = self._rank, self._plan, self._kept, self._counted
        await self._land_all()
        for l in self._late:
            await self._reduce_once(l)
        await self._land_all()
        if self._ends:
            rank.grad_weights[0] = await rank.all_reduce(rank.grad_weights.pop(0), among=self._ends)
        await self._norm([l for l in counted if rank.kinds[l] in PARTED], PART_AXES)
        await self._norm([l for l in counted if rank.kinds[l] not in PARTED], (*self._cut, "pp"))
        again = [axis for axis in reversed(plan.shard_optimizer) if axis not in plan.shard_parameters]
        for l in layers:
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"]
            )
        for axis in again:
            if len(rank.group(axis).ranks) > 1:
                await self._gather(layers, axis)

    async def _norm(self, layers: Sequence[int], axes: Sequence[str]) -> None:
        """Add some layers' squares to the norm, and then those of the ranks along some axes, which have others."""
        rank = self._rank
        for l in layers:
            squares = rank.norm(l, rank.grad_weights[l])
            rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
        for axis in axes:
            if "norm" in rank.scalars and len(rank.group(axis).ranks) > 1:
                rank.scalars["norm"] = await rank.all_reduce(rank.scalars["norm"], axis=axis)

    async def _gather(self, layers: Sequence[int], axis: str) -> None:
        """Put updated slices together again; two on their way bound the memory."""
        rank = self._rank
        arriving: dict[int, Handle[Value]] = {}
        for l in layers:
            if len(arriving) == 2:
                first = next(iter(arriving))
                rank.weights[first] = await arriving.pop(first)
            arriving[l] = rank.all_gather(rank.weights[l], axis=axis)
        for l, gathered in arriving.items():
            rank.weights[l] = await gathered

    async def _reduce(self, layer: int, gradient: Value, axes: list[str]) -> None:
        """Start to reduce a gradient over the first of some axes, as soon as there is room for it."""
        axis, size = axes[0], self._elements
        in_flight = self._in_flight[axis]
        while in_flight and size[layer] + sum(size[other.layer] for other in in_flight) > self._room:
            await self._land(axis)
        start = self._rank.reduce_scatter if axis in self._cut else self._rank.all_reduce
        in_flight.append(Reduction(layer, start(gradient, axis=axis), axes[1:]))

    async def _land(self, axis: str) -> None:
        """Wait for the oldest reduction over an axis; reduce what it gives over the next one, or add it up."""
        layer, handle, axes = self._in_flight[axis].popleft()
        gradient = await handle
        if axes:
            await self._reduce(layer, gradient, axes)
            return
        self._sum(layer, gradient)
        self._coming[layer] -= 1
        if layer in self._complete and not self._coming[layer]:
            self._complete.remove(layer)
            await self._reduce_once(layer)

    async def _land_all(self) -> None:
        for axis, in_flight in self._in_flight.items():
            while in_flight:
                await self._land(axis)

    def _sum(self, layer: int, gradient: Value) -> None:
        sums = self._rank.grad_weights
        sums[layer] = sums[layer] + gradient if layer in sums else gradient

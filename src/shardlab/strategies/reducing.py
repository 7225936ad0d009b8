"""How a plan's gradients are summed over microbatches and data-parallel ranks, and what then updates the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardlab.program import Handle, LayerKind, Rank, Value
from shardlab.program.sizes import PARTED
from shardlab.strategies.plan import CUT_AXES, Plan

PART_AXES = ("tp", "ep")
"""The axes that slice layers; a plan uses one of them at most."""


class Gradients:
    """One rank's gradients: reduced as the plan says, while the rank goes on; then clipped and applied.

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
        self._arriving: dict[int, tuple[Handle[Value], list[str]]] = {}
        self._late: list[int] = []  # layers whose gradients are reduced when the step's backward passes are over
        self._owner = rank.sizes.weight_of
        self._counted = [l for l in layers if self._owner(l) == l]
        self._uses = Counter(map(self._owner, layers))  # of each weight, those whose gradients are yet to come
        self._kept = list(self._uses)
        self._each = {l: [axis for axis in self._axes(l) if axis in plan.reduced_each] for l in self._kept}
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

    async def add(self, layer: int, gradient: Value) -> None:
        """A microbatch's gradient of a layer."""
        layer = self._owner(layer)
        if self._arriving:
            await self._settle()
        each = self._each[layer]
        if each:
            self._arriving[layer] = self._reduce(gradient, each[0]), each[1:]
        else:
            self._sum(layer, gradient)

    async def finish(self, layer: int) -> None:
        """All microbatches of a layer are in: reduce the sum over the axes that are reduced once a step."""
        layer = self._owner(layer)
        self._uses[layer] -= 1
        if self._uses[layer]:
            return
        if self._plan.reduce_at == "step":
            self._late.append(layer)
        else:
            await self._reduce_once(layer)

    async def _reduce_once(self, layer: int) -> None:
        once = [axis for axis in self._axes(layer) if axis not in self._plan.reduced_each]
        if self._plan.sequence_parallel and self._rank.kinds[layer] is LayerKind.NORM:
            once.append("tp")  # each of its ranks has seen other tokens
        if once:
            await self._settle()
            gradient = self._rank.grad_weights.pop(layer)
            self._arriving[layer] = self._reduce(gradient, once[0]), once[1:]

    async def update(self) -> None:
        """Clip by the norm of the whole model's gradient, and take the optimizer's step."""
        rank, plan, layers, counted = self._rank, self._plan, self._kept, self._counted
        for l in self._late:
            await self._reduce_once(l)
        await self._settle()
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

    async def _settle(self) -> None:
        """Wait for the reduction under way, and add what it gives: one at a time bounds the memory."""
        for layer, (handle, axes) in self._arriving.items():
            gradient = await handle
            for axis in axes:
                gradient = await self._reduce(gradient, axis)
            self._sum(layer, gradient)
        self._arriving.clear()

    def _reduce(self, gradient: Value, axis: str) -> Handle[Value]:
        if axis in self._cut:
            return self._rank.reduce_scatter(gradient, axis=axis)
        return self._rank.all_reduce(gradient, axis=axis)

    def _sum(self, layer: int, gradient: Value) -> None:
        sums = self._rank.grad_weights
        sums[layer] = sums[layer] + gradient if layer in sums else gradient

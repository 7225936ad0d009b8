"""How a plan's gradients are summed over microbatches and data-parallel ranks, and what then updates the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardlab.program import Handle, LayerKind, Rank, Value
from shardlab.strategies.plan import DATA_AXES, Plan


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
        axes = [axis for axis in dict.fromkeys((*plan.shard_optimizer, *DATA_AXES)) if len(rank.group(axis).ranks) > 1]
        self._each = [axis for axis in axes if axis in plan.reduced_each]
        self._once = [axis for axis in axes if axis not in plan.reduced_each]
        self._arriving: dict[int, tuple[Handle[Value], list[str]]] = {}
        self._owner = rank.sizes.weight_of
        self._counted = [l for l in layers if self._owner(l) == l]
        self._uses = Counter(map(self._owner, layers))  # of each weight, those whose gradients are yet to come
        self._kept = list(self._uses)
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
        for axis in (*(["tp"] if self._rank.kinds[layer] is LayerKind.SLICED else []), *axes):
            ranks = self._rank.group(axis).ranks
            shard, of = shard * len(ranks) + self._rank.coordinate(axis), of * len(ranks)
        return shard, of

    async def add(self, layer: int, gradient: Value) -> None:
        """A microbatch's gradient of a layer."""
        layer = self._owner(layer)
        await self._settle(layer)
        if self._each:
            self._arriving[layer] = self._reduce(gradient, self._each[0]), self._each[1:]
        else:
            self._sum(layer, gradient)

    async def finish(self, layer: int) -> None:
        """All microbatches of a layer are in: reduce the sum over the axes that are reduced once a step."""
        layer = self._owner(layer)
        self._uses[layer] -= 1
        if self._uses[layer]:
            return
        await self._settle(layer)
        once = [*self._once]
        if self._plan.sequence_parallel and self._rank.kinds[layer] is LayerKind.NORM:
            once.append("tp")  # each of its ranks has seen other tokens
        if once:
            gradient = self._rank.grad_weights.pop(layer)
            self._arriving[layer] = self._reduce(gradient, once[0]), once[1:]

    async def update(self) -> None:
        """Clip by the norm of the whole model's gradient, and take the optimizer's step."""
        rank, plan, layers, counted = self._rank, self._plan, self._kept, self._counted
        tied = await self._meet() if self._ends else None
        for l in layers:
            await self._settle(l)
        if tied is not None:
            rank.grad_weights[0] = await tied
        await self._norm([l for l in counted if rank.kinds[l] is LayerKind.SLICED], ("tp",))
        await self._norm([l for l in counted if rank.kinds[l] is not LayerKind.SLICED], (*plan.shard_optimizer, "pp"))
        again = [axis for axis in reversed(plan.shard_optimizer) if axis not in plan.shard_parameters]
        for l in layers:
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"]
            )
        for axis in again:
            if len(rank.group(axis).ranks) > 1:
                for l, gathered in [(l, rank.all_gather(rank.weights[l], axis=axis)) for l in layers]:
                    rank.weights[l] = await gathered

    async def _meet(self) -> Handle[Value]:
        """Start to sum the gradients of the embedding's and of the head's rank."""
        await self._settle(0)
        return self._rank.all_reduce(self._rank.grad_weights.pop(0), among=self._ends)

    async def _norm(self, layers: Sequence[int], axes: Sequence[str]) -> None:
        """Add some layers' squares to the norm, and then those of the ranks along some axes, which have others."""
        rank = self._rank
        for l in layers:
            squares = rank.norm(l, rank.grad_weights[l])
            rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
        for axis in axes:
            if "norm" in rank.scalars and len(rank.group(axis).ranks) > 1:
                rank.scalars["norm"] = await rank.all_reduce(rank.scalars["norm"], axis=axis)

    async def _settle(self, layer: int) -> None:
        """Wait for a layer's reduction under way, and add what it gives."""
        if layer in self._arriving:
            handle, axes = self._arriving.pop(layer)
            gradient = await handle
            for axis in axes:
                gradient = await self._reduce(gradient, axis)
            self._sum(layer, gradient)

    def _reduce(self, gradient: Value, axis: str) -> Handle[Value]:
        cut = self._plan.shard_gradients if axis in self._each else self._plan.shard_optimizer
        if axis in cut:
            return self._rank.reduce_scatter(gradient, axis=axis)
        return self._rank.all_reduce(gradient, axis=axis)

    def _sum(self, layer: int, gradient: Value) -> None:
        sums = self._rank.grad_weights
        sums[layer] = sums[layer] + gradient if layer in sums else gradient

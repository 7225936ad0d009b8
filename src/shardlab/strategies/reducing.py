"""Sums of a plan's gradients over microbatches and data-parallel ranks, and the updates that follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Generic, NamedTuple

from shardlab.strategies.plan_rank import PlanRank, V
from shardlab.strategies.rank_plan import RankPlan


class PendingReduction(NamedTuple, Generic[V]):
    """A gradient's reduction in flight over one axis.

    Attributes:
        layer: whose gradient it is.
        handle: what is awaited.
        axes: those over which the result is reduced next.
    """

    layer: int
    handle: Awaitable[V]
    axes: tuple[str, ...]


class ReducingState(NamedTuple):
    """How far the reductions of a rank's gradients are, as of `GradientReducer`; handles as they are told."""

    in_flight: tuple[tuple[str, tuple[tuple[int, int, tuple[str, ...]], ...]], ...]
    uses: frozenset[tuple[int, int]]
    coming: frozenset[tuple[int, int]]
    complete: frozenset[int]
    late: tuple[int, ...]


class GradientReducer(Generic[V]):
    """Gradients of one rank: reduced as the plan says, while the rank goes on; then clipped and applied.

    Memory bounds how many reductions are in flight: over each axis, those of gradients as large together as the rank's
    largest block, however finely a plan cuts blocks into layers. Before another one starts, the oldest are awaited
    until there is room for it. What arrives is at once reduced over the next axis.

    A weight that several pipeline stages compute with is kept by each of their ranks, replicas that stay equal: their
    gradients meet once a step, and one of these ranks counts their squares. Where one rank has several of the stages,
    it sums their gradients before it reduces them.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._trained = rank_plan.trained
        weights = self._trained.values()
        self._uses = {l: weight.users for l, weight in self._trained.items()}  # whose gradients are yet to come
        # Over each axis, oldest first; an axis comes after those whose results are reduced over it.
        reduced_over = (*(w.reduce_every_microbatch for w in weights), *(w.reduce_once for w in weights))
        axes = dict.fromkeys(axis for axes in reduced_over for axis in axes)
        self._in_flight = {axis: deque[PendingReduction[V]]() for axis in axes}
        self._elements = dict.fromkeys(axes, 0)  # of the gradients in flight
        untrained = {*rank_plan.bare, *rank_plan.frozen}
        owners = {l: rank_plan.weight_of(l) for l in rank_plan.layers if l not in untrained}
        self._reduced = {l: (owner, rank_plan.weights[owner].reduce_every_microbatch) for l, owner in owners.items()}
        self._coming = Counter[int]()  # of each layer, gradients that are being reduced
        self._complete: set[int] = set()  # layers whose last gradient is among those
        self._late: list[int] = []  # layers whose gradients are reduced when the step's backward passes are over

    def state(self, told: Callable[[Awaitable[V]], int]) -> ReducingState:
        """All that decides how it goes on; handles as they are told."""
        in_flight = [
            (axis, tuple([(layer, told(handle), axes) for layer, handle, axes in pending]))
            for axis, pending in self._in_flight.items()
        ]
        uses, coming = frozenset(self._uses.items()), frozenset((+self._coming).items())
        return ReducingState(tuple(in_flight), uses, coming, frozenset(self._complete), tuple(self._late))

    def restore(self, state: ReducingState, handle: Callable[[int], Awaitable[V]]) -> None:
        """Go on from a state."""
        self._in_flight = {
            axis: deque([PendingReduction(layer, handle(told), axes) for layer, told, axes in pending])
            for axis, pending in state.in_flight
        }
        weights = self._plan.weights
        self._elements = {
            axis: sum([weights[layer].elements for layer, _, _ in pending]) for axis, pending in state.in_flight
        }
        self._uses, self._coming = dict(state.uses), Counter(dict(state.coming))
        self._complete, self._late = set(state.complete), list(state.late)

    def load(self) -> None:
        """Load this rank's slices of the weights and of the optimizer's state."""
        rank = self._rank
        for l, weight in self._plan.weights.items():
            rank.weights[l] = rank.load_weight(l, *weight.parameters)
            if l in self._trained:
                rank.opt_states[l] = rank.load_opt_state(l, *weight.optimizer)
        for l in self._plan.bare:
            rank.weights[l] = rank.load_weight(l)

    async def add(self, layer: int, gradient: V, *, last: bool) -> None:
        """Add a microbatch's gradient of a layer; after the `last` one the sum is finished."""
        if layer not in self._reduced:
            return
        weight, axes = self._reduced[layer]
        if axes:
            self._coming[weight] += 1
            await self._reduce(weight, gradient, axes)
        else:
            self._rank.accumulate(gradient)
        if last:
            await self.finish(layer)

    async def finish(self, layer: int) -> None:
        """Reduce the sum of all microbatches over the axes that are reduced once a step."""
        if layer in self._plan.bare:
            return
        layer = self._plan.weight_of(layer)
        self._uses[layer] -= 1
        if self._uses[layer]:
            return
        if self._plan.plan.reduce_at == "step":
            self._late.append(layer)
        elif self._coming[layer]:
            self._complete.add(layer)
        else:
            await self._reduce_once(layer)

    async def update(self) -> None:
        """Clip by the norm of the whole model's gradient, and take the optimizer's step."""
        rank, weights = self._rank, self._trained
        await self._land_all()
        for l in self._late:
            await self._reduce_once(l)
        await self._land_all()
        for l, weight in weights.items():
            if weight.shared_by:
                rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights.pop(l), among=weight.shared_by)
        counted = [l for l, weight in weights.items() if weight.counted]
        for axis in ("cp", "ep", "tp"):  # experts, which all three may cut, first: their squares are on more ranks
            cut = any(axis in weights[l].cut_axes for l in counted)
            await self._norm([l for l in counted if weights[l].cut_axes[:1] == (axis,)], (axis,) if cut else ())
        training = self._plan.training
        all_train = len(training) == len(self._plan.pipeline)
        axes = (*self._plan.scatter_axes, "pp") if all_train else self._plan.scatter_axes
        await self._norm([l for l in counted if not weights[l].cut_axes], axes)
        if "norm" in rank.scalars and 1 < len(training) < len(self._plan.pipeline):
            rank.scalars["norm"] = await rank.all_reduce(rank.scalars["norm"], among=training)
        async for l, direction in self._directions():
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"], direction
            )
        for axis in self._plan.update_axes:
            await self._gather(axis)

    async def _norm(self, layers: Sequence[int], axes: Sequence[str]) -> None:
        """Add some layers' squares to the norm, and then those of the ranks along some axes, which have others."""
        rank = self._rank
        for l in layers:
            squares = rank.norm(l, rank.grad_weights[l])
            rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
        for axis in axes:
            if "norm" in rank.scalars and len(rank.group(axis).ranks) > 1:
                rank.scalars["norm"] = await rank.all_reduce(rank.scalars["norm"], axis=axis)

    async def _directions(self) -> AsyncIterator[tuple[int, V | None]]:
        """Every weight, with the direction of its update where that takes one; the next one is gathered meanwhile."""
        rank, weights = self._rank, self._trained
        left = [l for l, weight in weights.items() if weight.direction_axes]
        coming: dict[int, Awaitable[V]] = {}
        for l, weight in weights.items():
            for ahead in left[: 2 - len(coming)]:
                made = rank.direction(ahead, rank.grad_weights[ahead], rank.opt_states[ahead], rank.scalars["norm"])
                coming[left.pop(0)] = rank.all_gather(made, axis=weights[ahead].direction_axes[0])
            direction = await coming.pop(l) if l in coming else None
            for axis in weight.direction_axes[1:]:
                assert direction is not None
                direction = await rank.all_gather(direction, axis=axis)
            yield l, direction

    async def _gather(self, axis: str) -> None:
        """Put updated slices together again; two on their way bound the memory."""
        rank = self._rank
        arriving: dict[int, Awaitable[V]] = {}
        for l in self._trained:
            if len(arriving) == 2:
                first = next(iter(arriving))
                rank.weights[first] = await arriving.pop(first)
            arriving[l] = rank.all_gather(rank.weights[l], axis=axis)
        for l, gathered in arriving.items():
            rank.weights[l] = await gathered

    async def _reduce_once(self, layer: int) -> None:
        if axes := self._plan.weights[layer].reduce_once:
            await self._reduce(layer, self._rank.grad_weights.pop(layer), axes)

    async def _reduce(self, layer: int, gradient: V, axes: tuple[str, ...]) -> None:
        """Start to reduce a gradient over the first of some axes, as soon as there is room for it."""
        axis, in_flight, size = axes[0], self._in_flight[axes[0]], self._plan.weights[layer].elements
        while in_flight and size + self._elements[axis] > self._plan.room:
            await self._land(axis)
        start = self._rank.reduce_scatter if axis in self._plan.scatter_axes else self._rank.all_reduce
        in_flight.append(PendingReduction(layer, start(gradient, axis=axis), axes[1:]))
        self._elements[axis] += size

    async def _land(self, axis: str) -> None:
        """Wait for the oldest reduction over an axis; reduce what it gives over the next one, or add it up."""
        layer, handle, axes = self._in_flight[axis].popleft()
        self._elements[axis] -= self._plan.weights[layer].elements
        gradient = await handle
        if axes:
            await self._reduce(layer, gradient, axes)
            return
        self._rank.accumulate(gradient)
        self._coming[layer] -= 1
        if layer in self._complete and not self._coming[layer]:
            self._complete.remove(layer)
            await self._reduce_once(layer)

    async def _land_all(self) -> None:
        for axis, in_flight in self._in_flight.items():
            while in_flight:
                await self._land(axis)

"""Data-parallel sharding of a plan: weights are gathered and prefetched, gradients are reduced, weights are updated.

`ParameterGatherer` knows the order in which the rank will use its weights (`weight_uses`), so it can start the next
all-gather while the current layer computes, and free a weight after its last use. `GradientReducer` sums gradients over
microbatches and data-parallel ranks while backward passes continue, and then clips and updates.

Programs that are not plans get prefetching from the pass `prefetch` (`shardlab.simulate.passes`) instead.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Generic, NamedTuple

from shardlab.strategies.plan.rank_plan import PlanRank, RankPlan, V
from shardlab.strategies.schedules import Backward, BackwardInput, Forward
from shardlab.strategies.schedules.steps import ShardedStep


class ParameterGatherer(Generic[V]):
    """Whole weights of one rank: gathered before use, prefetched, and freed.

    If the schedule has steps that gather and free the weights of a stage, the gatherer follows these. Otherwise it
    follows `reshard_after` of the plan, and prefetches the next layer (with half-blocks, the next block) while the
    current one computes.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._explicit = rank_plan.explicit_gathers
        self._uses: Sequence[WeightUse] = weight_uses(rank_plan, rank_plan.steps) if rank_plan.gather_axes else ()
        gathered = set(rank_plan.layers).difference(rank_plan.weightless) if rank_plan.gather_axes else ()
        # Layers whose weights are stored whole, each with the owner of its weight.
        self._whole = {l: rank_plan.weight_of(l) for l in rank_plan.layers if l not in gathered}
        self._at = 0
        self._in_flight: dict[int, Awaitable[V]] = {}

    def state(self, number_of: Callable[[Awaitable[V]], int]) -> GatheringState:
        """Return the state between two steps, except for the remaining uses.

        Args:
            number_of: function that replaces a handle with a number.
        """
        return frozenset([(layer, number_of(handle)) for layer, handle in self._in_flight.items()])

    def restore(self, state: GatheringState, handle: Callable[[int], Awaitable[V]]) -> None:
        """Continue from a state; `handle` is the inverse of `number_of`."""
        self._in_flight = {layer: handle(number) for layer, number in state}

    def set_uses(self, uses: Sequence[WeightUse]) -> None:
        """Replace the remaining uses of weights."""
        self._uses, self._at = uses, 0

    def unshard(self, layers: Iterable[int]) -> None:
        """Start to gather the weights of layers, for a step of the schedule."""
        if self._plan.gather_axes:
            for layer in map(self._plan.weight_of, layers):
                skip = layer in self._in_flight or layer in self._plan.weightless
                if not skip and (layer, "full") not in self._rank.weights:
                    self._in_flight[layer] = self._gather(layer)

    async def reshard(self, layers: Iterable[int]) -> None:
        """Free the gathered weights of layers, for a step of the schedule."""
        for layer in map(self._plan.weight_of, layers):
            if layer in self._in_flight:
                await self._in_flight.pop(layer)
            if (layer, "full") in self._rank.weights:
                del self._rank.weights[layer, "full"]

    async def fetch_weight(self, layer: int) -> V:
        """Return the whole weight for the next use, which must be by this layer, and prefetch the next weights."""
        rank, axes = self._rank, self._plan.gather_axes
        whole = self._whole.get(layer)
        if whole is not None:
            return rank.weights[whole]
        layer, is_kept, run = self._uses[self._at]
        self._at += 1
        is_kept = is_kept or self._explicit
        if (layer, "full") in rank.weights:
            full = rank.weights[layer, "full"] if is_kept else rank.weights.pop((layer, "full"))
        else:
            full = await (self._in_flight.pop(layer, None) or self._gather(layer))
            for axis in axes[1:]:
                full = await rank.all_gather(full, axis=axis)
            if is_kept:
                rank.weights[layer, "full"] = full
        index = self._at
        while not self._explicit and index < len(self._uses) and self._uses[index].run <= run + 1:
            ahead = self._uses[index].layer
            if ahead != layer and ahead not in self._in_flight and (ahead, "full") not in rank.weights:
                self._in_flight[ahead] = self._gather(ahead)
            index += 1
        return full

    def _gather(self, layer: int) -> Awaitable[V]:
        return self._rank.all_gather(self._rank.weights[layer], axis=self._plan.gather_axes[0])


class GradientReducer(Generic[V]):
    """Gradients of one rank: accumulated and reduced during backward passes, then clipped and applied.

    The reductions in flight over one axis hold at most as many elements as the rank's largest block
    (`RankPlan.reduction_buffer`). If another reduction would exceed this limit, the oldest ones are awaited first. When
    a reduction has ended, its result is immediately reduced over the next axis.

    If several pipeline stages use one weight, each of their ranks stores a replica. The replicas stay equal, because
    these ranks sum their gradients once a step. One of them adds the weight to the gradient norm. If one rank has
    several of these stages, it sums their gradients before it reduces them.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._trained = rank_plan.trained
        weights = self._trained.values()
        self._uses = {l: weight.users for l, weight in self._trained.items()}  # uses whose gradients are missing
        # Oldest first. An axis comes after the axes whose results are reduced over it.
        reduced_over = (*(w.reduce_every_microbatch for w in weights), *(w.reduce_once for w in weights))
        axes = dict.fromkeys(axis for axes in reduced_over for axis in axes)
        self._in_flight = {axis: deque[PendingReduction[V]]() for axis in axes}
        self._elements = dict.fromkeys(axes, 0)  # elements of the gradients in flight
        untrained = {*rank_plan.weightless, *rank_plan.frozen}
        owners = {l: rank_plan.weight_of(l) for l in rank_plan.layers if l not in untrained}
        self._reduced = {l: (owner, rank_plan.weights[owner].reduce_every_microbatch) for l, owner in owners.items()}
        self._reducing = Counter[int]()  # number of each layer's gradients that are being reduced
        self._complete: set[int] = set()  # layers whose last gradient is being reduced
        self._deferred: list[int] = []  # layers whose gradients are reduced after all backward passes

    def state(self, number_of: Callable[[Awaitable[V]], int]) -> ReducingState:
        """Return the state between two steps.

        Args:
            number_of: function that replaces a handle with a number.
        """
        in_flight = [
            (axis, tuple([(layer, number_of(handle), axes) for layer, handle, axes in pending]))
            for axis, pending in self._in_flight.items()
        ]
        uses, reducing = frozenset(self._uses.items()), frozenset((+self._reducing).items())
        return ReducingState(tuple(in_flight), uses, reducing, frozenset(self._complete), tuple(self._deferred))

    def restore(self, state: ReducingState, handle: Callable[[int], Awaitable[V]]) -> None:
        """Continue from a state; `handle` is the inverse of `number_of`."""
        self._in_flight = {
            axis: deque([PendingReduction(layer, handle(number), axes) for layer, number, axes in pending])
            for axis, pending in state.in_flight
        }
        weights = self._plan.weights
        self._elements = {
            axis: sum([weights[layer].elements for layer, _, _ in pending]) for axis, pending in state.in_flight
        }
        self._uses, self._reducing = dict(state.uses), Counter(dict(state.reducing))
        self._complete, self._deferred = set(state.complete), list(state.deferred)

    def load(self) -> None:
        """Load this rank's slices of the weights and of the optimizer state."""
        rank = self._rank
        for l, weight in self._plan.weights.items():
            rank.weights[l] = rank.load_weight(l, *weight.parameters)
            if l in self._trained:
                rank.opt_states[l] = rank.load_opt_state(l, *weight.optimizer)
        for l in self._plan.weightless:
            rank.weights[l] = rank.load_weight(l)

    async def add(self, layer: int, gradient: V, *, last: bool) -> None:
        """Add the gradient of a layer and microbatch. After the `last` microbatch, finish the sum."""
        if layer not in self._reduced:
            return
        weight, axes = self._reduced[layer]
        if axes:
            self._reducing[weight] += 1
            await self._reduce(weight, gradient, axes)
        else:
            self._rank.accumulate(gradient)
        if last:
            await self.finish(layer)

    async def finish(self, layer: int) -> None:
        """Reduce the gradient of a layer's weight, summed over microbatches, over the axes of `reduce_once`.

        The reduction starts when the gradients of all layers that use the weight are complete, or after all backward
        passes if `reduce_at` is "step".
        """
        if layer in self._plan.weightless:
            return
        layer = self._plan.weight_of(layer)
        self._uses[layer] -= 1
        if self._uses[layer]:
            return
        if self._plan.plan.reduce_at == "step":
            self._deferred.append(layer)
        elif self._reducing[layer]:
            self._complete.add(layer)
        else:
            await self._reduce_once(layer)

    async def update(self) -> None:
        """Finish all reductions, clip by the norm of the whole gradient, and update the weights."""
        rank, weights = self._rank, self._trained
        await self._land_all()
        for l in self._deferred:
            await self._reduce_once(l)
        await self._land_all()
        for l, weight in weights.items():
            if weight.shared_by:
                rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights.pop(l), among=weight.shared_by)
        counted = [l for l, weight in weights.items() if weight.counted]
        for axis in ("cp", "ep", "tp"):  # experts first: up to three axes split them
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
        """Add the squared gradients of some layers to the norm, and sum the norm over the axes that split them."""
        rank = self._rank
        for l in layers:
            squares = rank.norm(l, rank.grad_weights[l])
            rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
        for axis in axes:
            if "norm" in rank.scalars and len(rank.group(axis).ranks) > 1:
                rank.scalars["norm"] = await rank.all_reduce(rank.scalars["norm"], axis=axis)

    async def _directions(self) -> AsyncIterator[tuple[int, V | None]]:
        """Yield each trained weight's layer, with the gathered direction of the update (None: it needs none).

        The next direction is prefetched.
        """
        rank, weights = self._rank, self._trained
        queue = [l for l, weight in weights.items() if weight.direction_axes]
        in_flight: dict[int, Awaitable[V]] = {}
        for l, weight in weights.items():
            for ahead in queue[: 2 - len(in_flight)]:
                part = rank.direction(ahead, rank.grad_weights[ahead], rank.opt_states[ahead], rank.scalars["norm"])
                in_flight[queue.pop(0)] = rank.all_gather(part, axis=weights[ahead].direction_axes[0])
            direction = await in_flight.pop(l) if l in in_flight else None
            for axis in weight.direction_axes[1:]:
                assert direction is not None
                direction = await rank.all_gather(direction, axis=axis)
            yield l, direction

    async def _gather(self, axis: str) -> None:
        """All-gather the updated weights over an axis, at most two at a time to bound the memory."""
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
        """Start to reduce a gradient over the first of some axes, as soon as the reduction buffer has space."""
        axis, in_flight, size = axes[0], self._in_flight[axes[0]], self._plan.weights[layer].elements
        while in_flight and size + self._elements[axis] > self._plan.reduction_buffer:
            await self._land(axis)
        start = self._rank.reduce_scatter if axis in self._plan.scatter_axes else self._rank.all_reduce
        in_flight.append(PendingReduction(layer, start(gradient, axis=axis), axes[1:]))
        self._elements[axis] += size

    async def _land(self, axis: str) -> None:
        """Wait for the oldest reduction over an axis. Reduce its result over the next axis, or accumulate it."""
        layer, handle, axes = self._in_flight[axis].popleft()
        self._elements[axis] -= self._plan.weights[layer].elements
        gradient = await handle
        if axes:
            await self._reduce(layer, gradient, axes)
            return
        self._rank.accumulate(gradient)
        self._reducing[layer] -= 1
        if layer in self._complete and not self._reducing[layer]:
            self._complete.remove(layer)
            await self._reduce_once(layer)

    async def _land_all(self) -> None:
        for axis, in_flight in self._in_flight.items():
            while in_flight:
                await self._land(axis)


def weight_uses(rank_plan: RankPlan, steps: Iterable[ShardedStep]) -> list[WeightUse]:
    """Return the uses of weights in some steps of a rank, in order. `reshard_after` decides which weights are kept."""
    model, reshard_after = rank_plan.model, rank_plan.plan.reshard_after
    visits: list[tuple[int, int, int, bool]] = []  # owner, run, number of the row of steps on one stage, forward
    row, run, last_stage, last_block = -1, -1, None, None
    for step in steps:
        if not isinstance(step, (Forward, Backward, BackwardInput)):
            continue
        row += step.stage != last_stage
        last_stage, forward = step.stage, isinstance(step, Forward)
        for layer in rank_plan.stages[step.stage] if forward else rank_plan.backward_order(step.stage):
            if layer in rank_plan.weightless:
                continue
            owner = model.layers[layer].weight
            block = model.gathered_with[owner], row
            run += block != last_block
            last_block = block
            visits.append((owner, run, row, forward))
    uses: list[WeightUse] = []
    next_use: dict[int, tuple[int, int]] = {}  # owner to run and row
    for owner, run, row, forward in reversed(visits):
        following = next_use.get(owner)
        next_use[owner] = run, row
        is_kept = False
        if following is not None:
            same_run, same_row = following[0] == run, following[1] == row
            options = {"layer": same_run, "forward": same_run or not forward, "stage": same_row}
            is_kept = options.get(reshard_after, True)
        uses.append(WeightUse(owner, is_kept, run))
    return uses[::-1]


class WeightUse(NamedTuple):
    """Use of a whole weight.

    Attributes:
        layer: owner of the weight.
        is_kept: whether the whole weight is kept for its next use.
        run: number of the run to which the use belongs: consecutive uses of one block. The next run is prefetched
            during this one.
    """

    layer: int
    is_kept: bool
    run: int


GatheringState = frozenset[tuple[int, int]]
"""Weights whose all-gathers are in flight, as (layer, number of the handle)."""


class PendingReduction(NamedTuple, Generic[V]):
    """Reduction of a gradient over one axis, in flight.

    Attributes:
        layer: owner of the weight.
        handle: handle of the collective.
        axes: axes over which the result is reduced next.
    """

    layer: int
    handle: Awaitable[V]
    axes: tuple[str, ...]


class ReducingState(NamedTuple):
    """State of a `GradientReducer` between two steps: its private attributes with the same names.

    Handles are replaced with numbers, and maps with tuples or sets of pairs.
    """

    in_flight: tuple[tuple[str, tuple[tuple[int, int, tuple[str, ...]], ...]], ...]
    uses: frozenset[tuple[int, int]]
    reducing: frozenset[tuple[int, int]]
    complete: frozenset[int]
    deferred: tuple[int, ...]

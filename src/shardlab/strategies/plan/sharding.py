"""Gathering and freeing of a plan's sharded weights, decided from the order in which a rank will use them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple

from shardlab.strategies.plan.plan import Reshard
from shardlab.strategies.plan.rank_plan import ModelLayers, PlanRank, RankPlan, V
from shardlab.strategies.schedules import Backward, BackwardInput, Forward
from shardlab.strategies.schedules.steps import ShardedStep


class Visit(NamedTuple):
    """A computation with a weight, among others of its stage in a row.

    Attributes:
        layer: whose weight.
        block: a number that weights share which are gathered together.
        row: which row it is in.
    """

    layer: int
    block: int
    row: int


class Use(NamedTuple):
    """A computation that wants a layer's complete weight.

    Attributes:
        layer: which one.
        kept: whether it stays for the next use.
        run: which uses in a row of layers of one block this is among.
    """

    layer: int
    kept: bool
    run: int


def uses(rank_plan: RankPlan, steps: Iterable[ShardedStep]) -> list[Use]:
    """The uses of weights in some steps of a rank, in order."""
    visits: list[Visit] = []
    row, last_stage = -1, None
    for step in steps:
        if not isinstance(step, Forward | Backward | BackwardInput):
            continue
        row += step.stage != last_stage
        last_stage = step.stage
        forward = isinstance(step, Forward)
        order = rank_plan.stages[step.stage] if forward else rank_plan.backward_order(step.stage)
        visits += visited(rank_plan.model, order, rank_plan.bare, row)
    return uses_of(visits, rank_plan.plan.reshard_after)


def visited(model: ModelLayers, order: Iterable[int], bare: Collection[int], row: int = 0) -> Iterator[Visit]:
    """The weights that layers compute with; those that are `bare` have none."""
    for layer in order:
        if layer not in bare:
            weight = model.layers[layer].weight
            yield Visit(weight, model.gathered_with(weight), row)


def uses_of(visits: Sequence[Visit], reshard_after: Reshard) -> list[Use]:
    """Find how long each weight stays that is gathered for a visit."""
    run: list[int] = []
    for place, visit in enumerate(visits):
        run.append(run[-1] + (visit[1:] != visits[place - 1][1:]) if run else 0)
    kept: list[bool] = []
    next_use: dict[int, int] = {}  # layer -> place
    for place in reversed(range(len(visits))):
        layer, _, row = visits[place]
        after = next_use.get(layer)
        next_use[layer] = place
        near = after is not None and {"layer": run[after] == run[place], "stage": visits[after].row == row}
        kept.append(bool(near and near.get(reshard_after, True)))
    return [Use(visit.layer, keep, number) for visit, keep, number in zip(visits, reversed(kept), run, strict=True)]


GatheringState = frozenset[tuple[int, int]]
"""Weights that are on their way: of which layers, by which handles."""


class ParameterGatherer(Generic[V]):
    """Weights of one rank while it follows its steps.

    If the steps say when a stage's weights are gathered and freed, so it is; otherwise the plan decides, and the next
    layer is gathered while the present one computes; of half-blocks, the next block while the present one does.
    """

    def __init__(self, rank: PlanRank[V], rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._explicit = rank_plan.explicit_gathers
        self._uses: Sequence[Use] = uses(rank_plan, rank_plan.steps) if rank_plan.gather_axes else ()
        gathered = set(rank_plan.layers).difference(rank_plan.bare) if rank_plan.gather_axes else ()
        self._whole = {l: rank_plan.weight_of(l) for l in rank_plan.layers if l not in gathered}  # to their weights
        self._at = 0
        self._coming: dict[int, Awaitable[V]] = {}

    def state(self, told: Callable[[Awaitable[V]], int]) -> GatheringState:
        """All that decides how it goes on, but for the uses that are left; handles as they are told."""
        return frozenset([(layer, told(handle)) for layer, handle in self._coming.items()])

    def restore(self, state: GatheringState, handle: Callable[[int], Awaitable[V]]) -> None:
        """Go on from a state."""
        self._coming = {layer: handle(told) for layer, told in state}

    def follow(self, uses: Sequence[Use]) -> None:
        """Have these uses come next."""
        self._uses, self._at = uses, 0

    def unshard(self, layers: Iterable[int]) -> None:
        """Start to gather."""
        if self._plan.gather_axes:
            for layer in map(self._plan.weight_of, layers):
                known = layer in self._coming or layer in self._plan.bare or (layer, "full") in self._rank.weights
                if not known:
                    self._coming[layer] = self._gather(layer)

    async def reshard(self, layers: Iterable[int]) -> None:
        """Free what was gathered."""
        for layer in map(self._plan.weight_of, layers):
            if layer in self._coming:
                await self._coming.pop(layer)
            if (layer, "full") in self._rank.weights:
                del self._rank.weights[layer, "full"]

    async def next(self, layer: int) -> V:
        """The complete weight for the next use, with which this layer computes."""
        rank, axes = self._rank, self._plan.gather_axes
        whole = self._whole.get(layer)
        if whole is not None:
            return rank.weights[whole]
        layer, kept, run = self._uses[self._at]
        self._at += 1
        kept = kept or self._explicit
        if (layer, "full") in rank.weights:
            full = rank.weights[layer, "full"] if kept else rank.weights.pop((layer, "full"))
        else:
            full = await (self._coming.pop(layer, None) or self._gather(layer))
            for axis in axes[1:]:
                full = await rank.all_gather(full, axis=axis)
            if kept:
                rank.weights[layer, "full"] = full
        at = self._at
        while not self._explicit and at < len(self._uses) and self._uses[at].run <= run + 1:
            ahead = self._uses[at].layer
            if ahead != layer and ahead not in self._coming and (ahead, "full") not in rank.weights:
                self._coming[ahead] = self._gather(ahead)
            at += 1
        return full

    def _gather(self, layer: int) -> Awaitable[V]:
        return self._rank.all_gather(self._rank.weights[layer], axis=self._plan.gather_axes[0])


# Sums of a plan's gradients over microbatches and data-parallel ranks, and the updates that follow.


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

"""Gathering and freeing of a plan's sharded weights, decided from the order in which a rank will use them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple

from shardlab.strategies.model_layers import ModelLayers
from shardlab.strategies.plan import Reshard
from shardlab.strategies.plan_rank import PlanRank, V
from shardlab.strategies.rank_plan import RankPlan
from shardlab.strategies.schedules import Backward, BackwardInput, Forward
from shardlab.strategies.schedules.sharding import ShardedStep


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

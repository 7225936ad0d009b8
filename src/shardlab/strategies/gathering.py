"""Gathering and freeing of a plan's sharded weights, decided from the order in which a rank will use them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardlab.program import Handle, Rank, Value
from shardlab.strategies.rank_plan import RankPlan
from shardlab.strategies.schedules import Backward, BackwardInput, Forward


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


def uses(rank_plan: RankPlan) -> list[Use]:
    """The uses of weights in a rank's steps, in order."""
    model = rank_plan.model
    visits: list[tuple[int, int]] = []  # (layer, number of the visit)
    visit, last_stage = -1, None
    in_a_row: list[int] = []
    for step in rank_plan.steps:
        if not isinstance(step, Forward | Backward | BackwardInput):
            continue
        visit += step.stage != last_stage
        last_stage = step.stage
        forward = isinstance(step, Forward)
        order = rank_plan.stages[step.stage] if forward else rank_plan.backward_order(step.stage)
        for layer in (layer for layer in order if layer not in rank_plan.bare):
            last = visits[-1] if visits else None
            weight = rank_plan.weight_of(layer)
            visits.append((weight, visit))
            block = model.gathered_with(weight)
            same = last is not None and (model.gathered_with(last[0]), last[1]) == (block, visit)
            in_a_row.append(in_a_row[-1] + (not same) if in_a_row else 0)
    kept: list[bool] = []
    next_use: dict[int, tuple[int, int]] = {}  # layer -> (place, visit)
    for place, (layer, visit) in reversed(list(enumerate(visits))):
        after = next_use.get(layer)
        next_use[layer] = (place, visit)
        near = {"layer": after and in_a_row[after[0]] == in_a_row[place], "stage": after and after[1] == visit}
        kept.append(after is not None and bool(near.get(rank_plan.plan.reshard_after, True)))
    return [Use(layer, keep, run) for (layer, _), keep, run in zip(visits, reversed(kept), in_a_row, strict=True)]


class ParameterGatherer:
    """Weights of one rank while it follows its steps.

    If the steps say when a stage's weights are gathered and freed, so it is; otherwise the plan decides, and the next
    layer is gathered while the present one computes; of half-blocks, the next block while the present one does.
    """

    def __init__(self, rank: Rank, rank_plan: RankPlan) -> None:
        self._rank = rank
        self._plan = rank_plan
        self._explicit = rank_plan.explicit_gathers
        self._uses = uses(rank_plan) if rank_plan.gather_axes else []
        gathered = set(rank_plan.layers).difference(rank_plan.bare) if rank_plan.gather_axes else ()
        self._whole = {l: rank_plan.weight_of(l) for l in rank_plan.layers if l not in gathered}  # to their weights
        self._at = 0
        self._coming: dict[int, Handle[Value]] = {}

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

    async def next(self, layer: int) -> Value:
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

    def _gather(self, layer: int) -> Handle[Value]:
        return self._rank.all_gather(self._rank.weights[layer], axis=self._plan.gather_axes[0])

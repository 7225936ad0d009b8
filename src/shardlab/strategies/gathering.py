"""When a plan's sharded weights are gathered and freed: decided from the order in which a rank will use them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shardlab.program import Handle, Rank, Value
from shardlab.strategies.plan import Plan, Reshard
from shardlab.strategies.schedules import BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.messages import Message


class Use(NamedTuple):
    """A computation that wants a layer's complete weight.

    Attributes:
        layer: which one.
        kept: whether it stays for the next use.
    """

    layer: int
    kept: bool


def uses(steps: Iterable[Work], bounds: Sequence[int], reshard_after: Reshard) -> list[Use]:
    """The uses of weights in a rank's steps, in order."""
    visits: list[tuple[int, int]] = []  # (layer, number of the visit)
    visit, last_stage = -1, None
    for step in steps:
        if isinstance(step, Message | BackwardWeight):
            continue
        visit += step.stage != last_stage
        last_stage = step.stage
        layers = range(bounds[step.stage], bounds[step.stage + 1])
        visits += [(layer, visit) for layer in (layers if isinstance(step, Forward) else reversed(layers))]
    kept: list[bool] = []
    next_use: dict[int, tuple[int, int]] = {}  # layer -> (place, visit)
    for place, (layer, visit) in reversed(list(enumerate(visits))):
        after = next_use.get(layer)
        next_use[layer] = (place, visit)
        near = {"layer": (place + 1, visit), "stage": (after and after[0], visit), "step": after}[reshard_after]
        kept.append(after is not None and after == near)
    return [Use(layer, keep) for (layer, _), keep in zip(visits, reversed(kept), strict=True)]


class Weights:
    """One rank's weights while it follows its steps; the next gather runs while the present layer computes."""

    def __init__(self, rank: Rank, plan: Plan, order: Sequence[Use]) -> None:
        self._rank = rank
        self._axes = [axis for axis in reversed(plan.shard_parameters) if len(rank.group(axis).ranks) > 1]
        self._order = order
        self._at = 0
        self._coming: Handle[Value] | None = None

    async def next(self) -> Value:
        """The complete weight for the next use, as it was announced."""
        rank, (layer, kept) = self._rank, self._order[self._at]
        self._at += 1
        if not self._axes:
            return rank.weights[layer]
        if (layer, "full") in rank.weights:
            full = rank.weights[layer, "full"] if kept else rank.weights.pop((layer, "full"))
        else:
            full = await (self._coming or self._gather(layer))
            self._coming = None
            for axis in self._axes[1:]:
                full = await rank.all_gather(full, axis=axis)
            if kept:
                rank.weights[layer, "full"] = full
        self._fetch_ahead(layer)
        return full

    def _fetch_ahead(self, present: int) -> None:
        if self._at < len(self._order):
            layer = self._order[self._at].layer
            if layer != present and (layer, "full") not in self._rank.weights:
                self._coming = self._gather(layer)

    def _gather(self, layer: int) -> Handle[Value]:
        return self._rank.all_gather(self._rank.weights[layer], axis=self._axes[0])

"""Gathering and freeing of a plan's sharded weights, decided from the order in which a rank will use them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardlab.program import Handle, Rank, Value
from shardlab.strategies.plan import Plan, Reshard
from shardlab.strategies.recomputing import backward_order
from shardlab.strategies.schedules import Backward, BackwardInput, Forward
from shardlab.strategies.schedules.sharding import ShardedStep, Unshard


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


def uses(
    steps: Iterable[ShardedStep],
    bounds: Sequence[int],
    reshard_after: Reshard,
    owner: Callable[[int], int],
    runs: Mapping[int, range] | None = None,
    blocks: Sequence[int] = (),
) -> list[Use]:
    """The uses of weights in a rank's steps, in order; `owner` gives the layer whose weight a layer computes with.

    `runs` are the layers that are computed again before their backward pass (see `recomputed`), and `blocks` where the
    blocks of half-blocks begin: what FSDP wraps is a block.
    """
    visits: list[tuple[int, int]] = []  # (layer, number of the visit)
    visit, last_stage = -1, None
    in_a_row: list[int] = []
    for step in steps:
        if not isinstance(step, Forward | Backward | BackwardInput):
            continue
        visit += step.stage != last_stage
        last_stage = step.stage
        layers = range(bounds[step.stage], bounds[step.stage + 1])
        order = layers if isinstance(step, Forward) else backward_order(layers, runs or {})
        for layer in order:
            last = visits[-1] if visits else None
            visits.append((owner(layer), visit))
            block = _block(owner(layer), blocks)
            same = last is not None and (_block(last[0], blocks), last[1]) == (block, visit)
            in_a_row.append(in_a_row[-1] + (not same) if in_a_row else 0)
    kept: list[bool] = []
    next_use: dict[int, tuple[int, int]] = {}  # layer -> (place, visit)
    for place, (layer, visit) in reversed(list(enumerate(visits))):
        after = next_use.get(layer)
        next_use[layer] = (place, visit)
        near = {"layer": after and in_a_row[after[0]] == in_a_row[place], "stage": after and after[1] == visit}
        kept.append(after is not None and bool(near.get(reshard_after, True)))
    return [Use(layer, keep, run) for (layer, _), keep, run in zip(visits, reversed(kept), in_a_row, strict=True)]


def _block(layer: int, blocks: Sequence[int]) -> int:
    """A layer's block; without any, each is one."""
    return bisect_right(blocks, layer) if blocks else layer


class Weights:
    """One rank's weights while it follows its steps.

    If the steps say when a stage's weights are gathered and freed, so it is; otherwise the plan decides, and the next
    layer is gathered while the present one computes; of half-blocks, the next block while the present one does.
    """

    def __init__(
        self, rank: Rank, plan: Plan, steps: Sequence[ShardedStep], bounds: Sequence[int], runs: Mapping[int, range]
    ) -> None:
        self._rank = rank
        self._axes = [axis for axis in reversed(plan.shard_parameters) if len(rank.group(axis).ranks) > 1]
        self._owner = rank.sizes.weight_of
        self._uses = uses(steps, bounds, plan.reshard_after, self._owner, runs, rank.sizes.blocks) if self._axes else []
        self._told = any(isinstance(step, Unshard) for step in steps)
        self._at = 0
        self._coming: dict[int, Handle[Value]] = {}

    def unshard(self, layers: Iterable[int]) -> None:
        """Start to gather."""
        if self._axes:
            for layer in map(self._owner, layers):
                if layer not in self._coming and (layer, "full") not in self._rank.weights:
                    self._coming[layer] = self._gather(layer)

    async def reshard(self, layers: Iterable[int]) -> None:
        """Free what was gathered."""
        for layer in map(self._owner, layers):
            if layer in self._coming:
                await self._coming.pop(layer)
            if (layer, "full") in self._rank.weights:
                del self._rank.weights[layer, "full"]

    async def next(self, layer: int) -> Value:
        """The complete weight for the next use, with which this layer computes."""
        rank = self._rank
        if not self._axes:
            return rank.weights[self._owner(layer)]
        layer, kept, run = self._uses[self._at]
        self._at += 1
        kept = kept or self._told
        if (layer, "full") in rank.weights:
            full = rank.weights[layer, "full"] if kept else rank.weights.pop((layer, "full"))
        else:
            full = await (self._coming.pop(layer, None) or self._gather(layer))
            for axis in self._axes[1:]:
                full = await rank.all_gather(full, axis=axis)
            if kept:
                rank.weights[layer, "full"] = full
        at = self._at
        while not self._told and at < len(self._uses) and self._uses[at].run <= run + 1:
            ahead = self._uses[at].layer
            if ahead != layer and ahead not in self._coming and (ahead, "full") not in rank.weights:
                self._coming[ahead] = self._gather(ahead)
            at += 1
        return full

    def _gather(self, layer: int) -> Handle[Value]:
        return self._rank.all_gather(self._rank.weights[layer], axis=self._axes[0])

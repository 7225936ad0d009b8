"""What every way to share a model exchanges over the axes of its mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from shardlab.planner.arrays import Array, Places
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.stage_ends import StageEnds, StageSums
from shardlab.planner.traffic import Collective, StepTraffic, gathered, reduced
from shardlab.strategies.plan import Reshard

RESHARDS: tuple[Reshard, ...] = get_args(Reshard)
"""When gathered weights are let go of."""


class StageTraffic(NamedTuple):
    """Seconds of what the ways to share a model exchange on a pipeline's stages and ranks.

    Attributes:
        gathers: over each axis that has any: (axes, gatherings, stages).
        ahead, awaited: over the first axis, and over others: (gatherings, stages) each.
        often, once: reductions over each axis at every microbatch, and once a step before all passes have ended:
            (axes, reductions, ranks) each.
    """

    gathers: StageSums
    ahead: StageSums
    awaited: StageSums
    often: Array
    once: Array


@dataclass(frozen=True, eq=False)
class WayTraffic:
    """What each way to share a model exchanges; the collectives of a gathering or a reduction are told by their rows.

    Attributes:
        sums: seconds of each collective on the layers' weights, as sums up to each layer, and of none in the last row:
            (collectives + 1, layers + 1).
        gathers: over each axis that has any: (axes, gatherings).
        ahead: over the first axis: (gatherings,).
        often, once: reductions over each axis at every microbatch, and once a step before all passes have ended:
            (axes, reductions) each.
        gathering, reshard, reduction: of each way, by their places: (ways,) each.
    """

    sums: Array
    gathers: Places
    ahead: Places
    often: Places
    once: Places
    gathering: Places
    reshard: Places
    reduction: Places

    @property
    def totals(self) -> tuple[Array, Array]:
        """Seconds of what each way exchanges once, and of what it exchanges at every microbatch: (axes, ways) each."""
        all = self.sums[:, -1]
        once = all[self.gathers][:, self.gathering] + all[self.once][:, self.reduction]
        return once, all[self.often][:, self.reduction]

    def on(self, stages: StageEnds) -> StageTraffic:
        """Share it out among a pipeline's stages and ranks."""
        sums = stages.sums(self.sums)
        gathers, ahead = (StageSums(*(part[rows] for part in sums)) for rows in (self.gathers, self.ahead))
        awaited = StageSums(*(each.sum(axis=0) - first for each, first in zip(gathers, ahead, strict=True)))
        of_ranks = sums.all @ stages.placed
        return StageTraffic(gathers, ahead, awaited, of_ranks[self.often], of_ranks[self.once])


def exchanged(
    layers: ShapeLayers, traffic: StepTraffic, shape: PlanShape, candidates: Sequence[Candidate]
) -> WayTraffic:
    """List what some ways to share a model exchange.

    Args:
        layers: of the problem's shapes.
        traffic: what collectives on their weights take.
        shape: whose ways they are.
        candidates: one that shares it so, of each way.
    """
    floors = layers.floors(shape)
    gathers = [tuple(gathered(each)) for each in candidates]
    often = [tuple(reduced(each, often=True)) for each in candidates]
    once = [tuple(reduced(each, often=False)) if each.plan.reduce_at != "step" else () for each in candidates]
    meshes = [each.plan.mesh for each in candidates]
    gatherings, gathering = _distinct(list(zip(meshes, gathers, strict=True)))
    reductions, reduction = _distinct(list(zip(meshes, often, once, strict=True)))
    axes = sorted({on.axis for each in (*gathers, *often, *once) for on in each})
    rows: dict[Hashable, int] = {}
    sums: list[Array] = []

    def row(way: int, on: Collective) -> int:
        key = meshes[way], on
        if key not in rows:
            rows[key] = len(sums)
            sums.append(traffic.sums(shape, candidates[way], floors, on))
        return rows[key]

    def of_axes(ways: Sequence[int], collectives: Sequence[tuple[Collective, ...]]) -> Places:
        """Rows of the collectives over each axis; the last one where there are none: (axes, ways)."""
        found = np.full((len(axes), len(ways)), -1)
        for place, way in enumerate(ways):
            for on in collectives[way]:
                found[axes.index(on.axis), place] = row(way, on)
        return found

    return WayTraffic(
        gathers=of_axes(gatherings, gathers),
        ahead=np.array([row(way, gathers[way][0]) if gathers[way] else -1 for way in gatherings], np.intp),
        often=of_axes(reductions, often),
        once=of_axes(reductions, once),
        gathering=gathering,
        reshard=np.array([RESHARDS.index(each.plan.reshard_after) for each in candidates], np.intp),
        reduction=reduction,
        sums=np.array([*sums, np.zeros(len(floors.weights))]),
    )


def _distinct(keys: Sequence[Hashable]) -> tuple[list[int], Places]:
    """The places of keys that come for the first time, and of each key its place among these."""
    first = dict[Hashable, tuple[int, int]]()
    found = [first.setdefault(key, (len(first), place))[0] for place, key in enumerate(keys)]
    return [place for _, place in first.values()], np.array(found, np.intp)

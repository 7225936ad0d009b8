"""What every way to share a model exchanges over the axes of its mesh."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, get_args

import numpy as np

from shardlab.planner.layer_floors import Array, ShapeLayers
from shardlab.planner.order_times import Places
from shardlab.planner.problem import Candidate
from shardlab.planner.sharing_floors import SharingTable
from shardlab.planner.space import PlanShape
from shardlab.planner.traffic import Collective, StepTraffic, gathered, reduced
from shardlab.strategies.plan import Reshard

RESHARDS: tuple[Reshard, ...] = get_args(Reshard)
"""When gathered weights are let go of."""


class WayTraffic(NamedTuple):
    """What each way to share a model exchanges, in seconds, as sums up to each layer.

    Attributes:
        gathers: over each axis that has any: (axes, gatherings, layers + 1).
        ahead, awaited: over the first axis, and over others: (gatherings, layers + 1) each.
        often, once: reductions over each axis at every microbatch, and once a step before all passes have ended:
            (axes, reductions, layers + 1) each.
        gathering, reshard, reduction: of each way, by their places: (ways,) each.
    """

    gathers: Array
    ahead: Array
    awaited: Array
    often: Array
    once: Array
    gathering: Places
    reshard: Places
    reduction: Places

    def of(self, ways: Places) -> WayTraffic:
        """What some of the ways exchange."""
        gatherings, gathering = np.unique(self.gathering[ways], return_inverse=True)
        reductions, reduction = np.unique(self.reduction[ways], return_inverse=True)
        return WayTraffic(
            self.gathers[:, gatherings],
            self.ahead[gatherings],
            self.awaited[gatherings],
            self.often[:, reductions],
            self.once[:, reductions],
            gathering,
            self.reshard[ways],
            reduction,
        )


def exchanged(layers: ShapeLayers, traffic: StepTraffic, shape: PlanShape, table: SharingTable) -> WayTraffic:
    """List what the ways of a table exchange.

    Args:
        layers: of the problem's shapes.
        traffic: what collectives on their weights take.
        shape: whose ways they are.
        table: the ways.
    """
    floors, candidates = layers.floors(shape), [Candidate(w, 1, shape.precision) for w in table.ways.values()]
    gathers = [tuple(gathered(each)) for each in candidates]
    often = [tuple(reduced(each, often=True)) for each in candidates]
    once = [tuple(reduced(each, often=False)) if each.plan.reduce_at != "step" else () for each in candidates]
    meshes = [each.plan.mesh for each in candidates]
    gatherings, gathering = _distinct(list(zip(meshes, gathers, strict=True)))
    reductions, reduction = _distinct(list(zip(meshes, often, once, strict=True)))
    axes = sorted({on.axis for each in (*gathers, *often, *once) for on in each})
    none = np.zeros(len(floors.weights))

    def of_axes(ways: Sequence[int], collectives: Sequence[tuple[Collective, ...]]) -> Array:
        """Sums of collectives over each axis: (axes, ways, layers + 1)."""
        found = np.zeros((len(axes), len(ways), len(none)))
        for place, way in enumerate(ways):
            for on in collectives[way]:
                found[axes.index(on.axis), place] = traffic.sums(shape, candidates[way], floors, on)
        return found

    gathers_of = of_axes(gatherings, gathers)
    first = [axes.index(gathers[way][0].axis) if gathers[way] else None for way in gatherings]
    ahead = np.array([none if axis is None else gathers_of[axis, place] for place, axis in enumerate(first)])
    return WayTraffic(
        gathers_of,
        ahead,
        gathers_of.sum(axis=0) - ahead,
        of_axes(reductions, often),
        of_axes(reductions, once),
        gathering,
        np.array([RESHARDS.index(each.plan.reshard_after) for each in candidates], np.intp),
        reduction,
    )


def _distinct(keys: Sequence[Hashable]) -> tuple[list[int], Places]:
    """The places of keys that come for the first time, and of each key its place among these."""
    first = dict[Hashable, tuple[int, int]]()
    found = [first.setdefault(key, (len(first), place))[0] for place, key in enumerate(keys)]
    return [place for _, place in first.values()], np.array(found, np.intp)

"""Floors of steps of every way to share a model on a pipeline, from how often its ranks do what; all in one go.

Nothing is followed from pass to pass. A rank has all of its passes to do after the stages before it have passed a
microbatch, and all of its backward passes after all stages have. What it gathers and reduces over an axis takes turns.
These floors are lower than `StepFloors`, and discard most plans in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple, get_args

import numpy as np

from shardlab.planner.layer_floors import Array, LayerFloors, ShapeLayers
from shardlab.planner.memory_floors import SURE
from shardlab.planner.order_times import Places
from shardlab.planner.pass_counts import UNSPLIT, PassCounts
from shardlab.planner.problem import Candidate
from shardlab.planner.rank_orders import Pipelines
from shardlab.planner.sharing_floors import SharingTable
from shardlab.planner.space import PlanShape
from shardlab.planner.stage_ends import PlacedEnds, StageEnds, gathering_passes
from shardlab.planner.step_floors import sure
from shardlab.planner.traffic import Collective, StepTraffic, gathered, reduced
from shardlab.strategies.plan import Plan, Reshard

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


class RankTimes(NamedTuple):
    """When passes end at the earliest, if weights are gathered so: (reshards, gatherings, ranks) each.

    Attributes:
        done: the last one of each rank, and what other ranks do after it.
        begun: the first backward pass; the same for all ranks.
        gathers: seconds of each axis's gathers: (axes, reshards, gatherings, ranks).
    """

    done: Array
    begun: Array
    gathers: Array


class WayFloors:
    """Floors of steps of all ways to share a problem's model on its pipelines."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines, traffic: StepTraffic, ends: PlacedEnds) -> None:
        self._layers, self._pipelines, self._traffic, self._ends = layers, pipelines, traffic, ends
        self._known: dict[int, WayTraffic] = {}

    def of(self, shape: PlanShape, plan: Plan, table: SharingTable, ways: Places) -> Array:
        """Seconds below which no candidate with this pipeline is that shares the model in one of some ways: (ways,).

        Args:
            shape, plan: the pipeline.
            table: all ways.
            ways: the places of those that are asked for.
        """
        traffic, stages = self._of_ways(shape, table).of(ways), self._ends.of(shape, plan)
        (few, more), pp = self._pipelines.timed(shape, plan), plan.mesh.pp
        floors = self._layers.floors(shape, plan.recompute)
        times = rank_times(plan, floors, stages, self._pipelines.counts(shape, plan), more, traffic)
        reduced = ((few + more) * stages.all(traffic.often) + stages.all(traffic.once)) @ _placed(stages, pp)
        way, reduction = (traffic.reshard, traffic.gathering), traffic.reduction
        seconds = times.done[way].max(-1)
        for gathers, reductions in zip(times.gathers, reduced, strict=True):
            busy = reductions[reduction] + np.maximum(gathers[way], times.begun[way])
            seconds = np.maximum(seconds, busy.max(-1))
        return sure(plan, more) * (seconds + SURE * table.after[ways])

    def _of_ways(self, shape: PlanShape, table: SharingTable) -> WayTraffic:
        """What the ways of a table exchange."""
        if id(table) not in self._known:
            self._known[id(table)] = self._exchanged(shape, table)
        return self._known[id(table)]

    def _exchanged(self, shape: PlanShape, table: SharingTable) -> WayTraffic:
        floors, candidates = self._layers.floors(shape), [Candidate(w, 1, shape.precision) for w in table.ways.values()]
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
                    found[axes.index(on.axis), place] = self._traffic.sums(shape, candidates[way], floors, on)
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


def rank_times(
    plan: Plan, floors: LayerFloors, stages: StageEnds, counts: PassCounts, more: int, traffic: WayTraffic
) -> RankTimes:
    """Tell when the ranks of a pipeline have done their passes at the earliest, however weights are gathered.

    Args:
        plan: the pipeline.
        floors: of its layers.
        stages: where they are.
        counts: of passes.
        more: microbatches that are not counted.
        traffic: what is gathered.
    """
    plain = np.array([stages.all(sums) for sums in floors.arrays[:4]])
    again, opening, begins = gathering_passes(floors, stages, plain, traffic.ahead, traffic.awaited)
    placed = _placed(stages, plan.mesh.pp)
    # The first forward pass on a stage gathers all of its weights; no other one on it is earlier
    first = opening[:, 0].copy()
    first[:, counts.begins] = begins[:, counts.begins]
    entered = np.cumsum(first, axis=1)
    loose = np.broadcast_to(plain, opening.shape)
    work: list[Array] = []
    for reshard in RESHARDS:
        base = again if reshard == "layer" else loose
        passes = counts.all * base + more * _each(base)
        if reshard != "step":
            passes = passes + counts.visits * (opening - base)
        else:
            passes[:, 0] += opening[:, 0] - plain[0]
        passes[:, 0] += first - opening[:, 0]
        work.append(passes)
    all = np.array(work)
    begun = entered[:, -1][:, None]
    unsplit = isinstance(plan.schedule, str) and plan.schedule in UNSPLIT
    lowest, highest = _ends(stages.rank)
    after = floors.arrays.backward[stages.start[lowest]] if unsplit else 0.0
    handed = np.minimum(plain[1], plain[2])
    later = handed.sum() - np.cumsum(handed)  # backward passes on the stages after each one
    done = np.maximum(
        (entered - first)[:, counts.begins] + all.sum(axis=2) @ placed,
        begun + later[highest] + all[:, :, 1:].sum(axis=2) @ placed,
    )
    return RankTimes(done + after, np.broadcast_to(begun, done.shape), _gathers(stages, counts, more, traffic, placed))


def _each(passes: Array) -> Array:
    """Seconds of a microbatch's passes, of the kinds of which there is one at least: (..., kinds, stages)."""
    found = np.zeros_like(passes)
    found[..., 0, :] = passes[..., 0, :]
    found[..., 1, :] = np.minimum(passes[..., 1, :], passes[..., 2, :] + passes[..., 3, :])
    return found


def _gathers(stages: StageEnds, counts: PassCounts, more: int, traffic: WayTraffic, placed: Array) -> Array:
    """Seconds of each rank's gathers over each axis, but for blocks that may be there already:
    (axes, reshards, gatherings, ranks)."""
    all, but_head, but_tail = (part(traffic.gathers) for part in (stages.all, stages.but_head, stages.but_tail))
    visits, again = counts.visits.sum(axis=0), counts.all - counts.visits
    visited = visits * all
    kept = visited + (again[0] + more) * but_head + (again[1] + again[2] + more) * but_tail
    of = {"layer": kept, "stage": visited, "step": all}
    return np.stack([of[reshard] @ placed for reshard in RESHARDS], axis=1)


def _ends(ranks: Places) -> tuple[Places, Places]:
    """The lowest and the highest stage of each rank."""
    lowest = np.unique(ranks, return_index=True)[1]
    return lowest, len(ranks) - 1 - np.unique(ranks[::-1], return_index=True)[1]


def _placed(stages: StageEnds, ranks: int) -> Array:
    """Which stage is on which rank: (stages, ranks)."""
    return (stages.rank[:, None] == np.arange(ranks)).astype(float)

"""Lower bounds of the communication of data-parallel ranks: gathered weights and reduced gradients, in seconds.

Collectives over one axis follow one another, so their sum is a lower bound of the step time, whatever runs beside them.
The parts: the collectives of one plan (`gathered`, `reduced`), the traffic of all sharding options (`OptionTraffic`),
the reductions at the end of a step (`reduced_at`), and passes while weights are gathered (`gathering_passes`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from shardlab.language import Kind, OpKind
from shardlab.planner.bounds.layers import Array, LayerBounds, Places, ShapeLayers, between
from shardlab.planner.bounds.memory import shards
from shardlab.planner.bounds.pipelines import StageEnds, StageSums
from shardlab.planner.bounds.schedule_order import LaidOrder
from shardlab.planner.problem import Candidate, PlanShape, blocks_of
from shardlab.strategies.plan.plan import CUT_AXES, Plan, Reshard
from shardlab.strategies.schedules.steps import Steps


class Collective(NamedTuple):
    """A collective on the weights of every layer, or on their gradients.

    Attributes:
        kind, axis: which, and over which axis.
        bytes: for each element of a layer's parameters.
    """

    kind: OpKind
    axis: str
    bytes: float


class StepTraffic:
    """What the ranks of a problem's candidates exchange, in seconds; each worked out once."""

    def __init__(self, layers: ShapeLayers) -> None:
        self.problem = layers.problem
        self._layers = layers
        self._known: dict[Hashable, Array] = {}

    def sums(self, shape: PlanShape, candidate: Candidate, bounds: LayerBounds, on: Collective) -> Array:
        """Seconds of a collective on each layer's weight, as sums up to each layer."""
        mesh = candidate.plan.mesh
        key = id(bounds.weights), on, mesh
        if key not in self._known:
            model, prices, group = (
                blocks_of(self.problem, shape).layers,
                self._layers.prices(candidate),
                mesh.group(0, on.axis),
            )
            layers, of_layers = bounds.kinds
            seconds = np.zeros(len(layers))
            for place, layer in enumerate(layers.tolist()):
                bytes = on.bytes * between(bounds.weights, range(layer, layer + 1))
                apart = not bytes or on.axis in model.cut_axes(layer)  # experts are not on all of the axis's ranks
                seconds[place] = 0.0 if apart else prices.collective_time(on.kind, bytes, group)
            self._known[key] = np.concatenate([[0.0], np.cumsum(seconds[of_layers])])
        return self._known[key]


def _among_several(plan: Plan, axes: Sequence[str]) -> list[str]:
    sizes = plan.mesh.sizes()
    return [axis for axis in dict.fromkeys(axes) if sizes[axis] > 1]


def gathered(candidate: Candidate) -> Iterator[Collective]:
    """The gathers of a weight for its use, one after the other."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    share = 1 / shards(plan, plan.shard_parameters)
    if isinstance(plan.order, Steps):  # which may say itself what is gathered when
        return
    for axis in _among_several(plan, plan.shard_parameters[::-1]):
        share *= sizes[axis]
        yield Collective(OpKind.ALL_GATHER, axis, share * candidate.precision.bytes(Kind.WEIGHT))


def gathered_after(candidate: Candidate) -> Iterator[Collective]:
    """The gathers of a weight after the optimizer's step."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    share = 1 / shards(plan, plan.shard_optimizer)
    for axis in _among_several(plan, plan.shard_optimizer[::-1]):
        if axis not in plan.shard_parameters:
            share *= sizes[axis]
            yield Collective(OpKind.ALL_GATHER, axis, share * candidate.precision.bytes(Kind.WEIGHT))


def reduced(candidate: Candidate, *, often: bool) -> Iterator[Collective]:
    """The reductions of a gradient, one after the other: of those at each microbatch, or of those once a step."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    axes = _among_several(plan, (*plan.shard_optimizer, *CUT_AXES))
    every = plan.axes_of_every_microbatch
    whole = [axis in every and axis not in plan.shard_gradients for axis in axes]
    scattered = axes[: whole.index(True) if True in whole else len(axes)]
    bytes = float(candidate.precision.bytes(Kind.GRAD_WEIGHT))
    for axis in sorted(axes, key=lambda axis: axis not in every):
        scatters = axis in scattered and axis in plan.shard_optimizer
        if (axis in every) == often:
            yield Collective(OpKind.REDUCE_SCATTER if scatters else OpKind.ALL_REDUCE, axis, bytes)
        bytes /= sizes[axis] if scatters else 1


RESHARDS: tuple[Reshard, ...] = get_args(Reshard)
"""When gathered weights are let go of."""


class StageTraffic(NamedTuple):
    """Seconds of what the sharding options exchange on a pipeline's stages and ranks.

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
class OptionTraffic:
    """What each sharding option exchanges; the collectives of a gathering or a reduction are told by their rows.

    Attributes:
        sums: seconds of each collective on the layers' weights, as sums up to each layer, and of none in the last row:
            (collectives + 1, layers + 1).
        gathers: over each axis that has any: (axes, gatherings).
        ahead: over the first axis: (gatherings,).
        often, once: reductions over each axis at every microbatch, and once a step before all passes have ended:
            (axes, reductions) each.
        gathering, reshard, reduction: of each option, by their places: (options,) each.
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
        """Seconds of communication of each option, once a step and once a microbatch: (axes, options) each."""
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
) -> OptionTraffic:
    """List what some sharding options exchange.

    Args:
        layers: of the problem's shapes.
        traffic: what collectives on their weights take.
        shape: whose options they are.
        candidates: one that shares it so, of each option.
    """
    bounds = layers.bounds(shape)
    gathers = [tuple(gathered(each)) for each in candidates]
    often = [tuple(reduced(each, often=True)) for each in candidates]
    once = [tuple(reduced(each, often=False)) if each.plan.reduce_at != "step" else () for each in candidates]
    meshes = [each.plan.mesh for each in candidates]
    gatherings, gathering = _distinct(list(zip(meshes, gathers, strict=True)))
    reductions, reduction = _distinct(list(zip(meshes, often, once, strict=True)))
    axes = sorted({on.axis for each in (*gathers, *often, *once) for on in each})
    rows: dict[Hashable, int] = {}
    sums: list[Array] = []

    def row(option: int, on: Collective) -> int:
        key = meshes[option], on
        if key not in rows:
            rows[key] = len(sums)
            sums.append(traffic.sums(shape, candidates[option], bounds, on))
        return rows[key]

    def of_axes(options: Sequence[int], collectives: Sequence[tuple[Collective, ...]]) -> Places:
        """Rows of the collectives over each axis; the last one where there are none: (axes, options)."""
        found = np.full((len(axes), len(options)), -1)
        for place, option in enumerate(options):
            for on in collectives[option]:
                found[axes.index(on.axis), place] = row(option, on)
        return found

    return OptionTraffic(
        gathers=of_axes(gatherings, gathers),
        ahead=np.array([row(option, gathers[option][0]) if gathers[option] else -1 for option in gatherings], np.intp),
        often=of_axes(reductions, often),
        once=of_axes(reductions, once),
        gathering=gathering,
        reshard=np.array([RESHARDS.index(each.plan.reshard_after) for each in candidates], np.intp),
        reduction=reduction,
        sums=np.array([*sums, np.zeros(len(bounds.weights))]),
    )


def _distinct(keys: Sequence[Hashable]) -> tuple[list[int], Places]:
    """The places of keys that come for the first time, and of each key its place among these."""
    first = dict[Hashable, tuple[int, int]]()
    found = [first.setdefault(key, (len(first), place))[0] for place, key in enumerate(keys)]
    return [place for _, place in first.values()], np.array(found, np.intp)


class Spent(NamedTuple):
    """Seconds of a collective on all weights.

    Attributes:
        layers: sums up to each layer.
        stages, ranks: of each stage, and of each rank.
    """

    layers: Array
    stages: Array
    ranks: Array


class LastGradients(NamedTuple):
    """When the stages of a pipeline make the last gradients of their weights.

    Attributes:
        turns: the stages of each rank after those of the one before, those first that make their last gradient last:
            (stages,).
        made: when their last gradients are made: (stages,).
        starts: where each rank's stages begin: (ranks,).
    """

    turns: Places
    made: Array
    starts: Places


def reduced_at(axes: Sequence[Spent], gradients: LastGradients, weights: Array) -> Array:
    """When every rank's last gradients are reduced, over one axis after the other: (ranks,).

    Args:
        axes: of the collectives over each axis.
        gradients: when they are made.
        weights: elements of weights, as sums up to each layer: (layers + 1,).
    """
    turns, starts = gradients.turns, gradients.starts
    ready = np.zeros(len(starts))
    counts = np.diff(starts, append=len(turns))
    for place, axis in enumerate(axes):
        taken = axis.stages[turns]
        sums = np.cumsum(taken)
        busy = sums - np.repeat(sums[starts] - taken[starts], counts)  # of this stage and those of its rank before it
        ready = np.maximum(ready, np.maximum.reduceat(gradients.made + busy, starts) + _beside(axes, place, weights))
    return ready


def seconds_in_turn(axes: Sequence[Spent], weights: Array, ranks: int) -> Array:
    """Seconds of collectives on all weights, over one axis after the other, when nothing runs beside: (ranks,).

    Args:
        axes: of the collectives over each axis.
        weights: elements of weights, as sums up to each layer: (layers + 1,).
        ranks: of the pipeline.
    """
    found = np.zeros(ranks)
    for place, axis in enumerate(axes):
        found = np.maximum(found, _beside(axes, place, weights) + axis.ranks)
    return found


def _beside(axes: Sequence[Spent], place: int, weights: Array) -> float:
    """Seconds of the collectives over all axes but one, of the layer for which these are fewest."""
    sums = [axis.layers for axis in axes]
    return _least(sums[:place], weights) + _least(sums[place + 1 :], weights)


def _least(axes: Sequence[Array], weights: Array) -> float:
    """Seconds of the collectives over some axes, one after the other, of the layer for which these are fewest."""
    return float(np.diff(np.sum(axes, axis=0))[np.diff(weights) > 0].min()) if axes else 0.0


class GatheringPasses(NamedTuple):
    """Seconds of each kind of pass on each stage, when weights are gathered.

    Attributes:
        again: if all are gathered but for the block with which the pass begins: (..., kinds, stages).
        opening: if all are: (..., kinds, stages).
        begins: of a rank's first pass, if it is on this stage: (..., stages).
    """

    again: Array
    opening: Array
    begins: Array


def gathering_passes(
    bounds: LayerBounds, stages: StageEnds, plain: Array, ahead: StageSums, awaited: StageSums
) -> GatheringPasses:
    """Time passes while weights are gathered.

    Over the first axis a block is gathered while the one before it computes, over others when it is wanted. The block
    with which a pass begins may be there already, if the pass before was on the same stage.

    Args:
        lower bounds: of the layers.
        stages: where they are.
        plain: seconds of each kind of pass without gathers: (kinds, stages).
        ahead, awaited: seconds of gathers over the first axis and over others.
    """
    forward, backward, inputs, _ = bounds.passes
    again = np.array(np.broadcast_to(plain, (*ahead.all.shape[:-1], *plain.shape)))
    opening = again.copy()
    for kind, layer in ((0, forward[stages.last]), (1, backward[stages.first]), (2, inputs[stages.first])):
        there, waited = (ahead.but_tail, awaited.but_tail) if kind else (ahead.but_head, awaited.but_head)
        beside = there + layer
        again[..., kind, :] = np.maximum(plain[kind] + waited, beside)
        opening[..., kind, :] = np.maximum(plain[kind] + awaited.all, beside)
    begins = np.maximum(opening[..., 0, :], ahead.all + forward[stages.last])
    return GatheringPasses(again, opening, begins)


def while_gathering(
    plan: Plan, order: LaidOrder, plain: Array, stages: StageEnds, bounds: LayerBounds, gathers: Sequence[Array]
) -> tuple[Array, Array]:
    """Seconds of each pass when weights are gathered, and of each kind of pass on each stage that always gathers
    them: (passes,) and (kinds, stages).

    Args:
        plan: says when gathered weights are freed.
        order: of the passes.
        plain: seconds of each kind of pass without gathers: (kinds, stages).
        stages: where they are.
        lower bounds: of their layers.
        gathers: seconds of gathers over each axis, as sums up to each layer.
    """
    ahead, awaited = gathers[0], np.sum(gathers[1:], axis=0) if gathers[1:] else np.zeros(len(gathers[0]))
    again, opening, begins = gathering_passes(bounds, stages, plain, stages.sums(ahead), stages.sums(awaited))
    seconds = plain[order.kind, order.stage]
    if plan.reshard_after != "step":
        if plan.reshard_after == "layer":
            seconds = again[order.kind, order.stage]
        seconds = np.where(order.visits, opening[order.kind, order.stage], seconds)
    seconds = np.where(order.opens, np.maximum(seconds, opening[order.kind, order.stage]), seconds)
    seconds = np.where(order.begins, np.maximum(seconds, begins[order.stage]), seconds)
    return seconds, again if plan.reshard_after == "layer" else plain


def gathers_of_ranks(plan: Plan, order: LaidOrder, more: int, stages: StageEnds, sums: Array) -> Array:
    """Seconds of each rank's gathers over an axis, but for blocks that may be there already: (ranks,).

    Args:
        plan: says when gathered weights are freed.
        order: of the passes.
        more: microbatches that pass beside those of the order.
        stages: where they are.
        sums: seconds of gathers, up to each layer.
    """
    of_stages = stages.sums(sums)
    again = np.zeros(len(order.kind))
    if plan.reshard_after == "layer":
        again = np.where(order.kind == 0, of_stages.but_head[order.stage], of_stages.but_tail[order.stage])
        again[order.kind == 3] = 0.0
    all = order.opens if plan.reshard_after == "step" else order.visits
    taken = np.where(all, of_stages.all[order.stage], again)
    found = np.zeros(plan.mesh.pp)
    found += np.bincount(stages.rank[order.stage], taken, plan.mesh.pp)
    if plan.reshard_after == "layer":
        found += more * np.bincount(stages.rank, of_stages.but_head + of_stages.but_tail, plan.mesh.pp)
    return found

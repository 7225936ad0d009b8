"""Passes while weights are gathered for them: how long they take, and how long the gathers of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.layer_floors import LayerFloors
from shardlab.planner.order_times import LaidOrder
from shardlab.planner.stage_ends import StageEnds, StageSums
from shardlab.strategies.plan import Plan


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
    floors: LayerFloors, stages: StageEnds, plain: Array, ahead: StageSums, awaited: StageSums
) -> GatheringPasses:
    """Time passes while weights are gathered.

    Over the first axis a block is gathered while the one before it computes, over others when it is wanted. The block
    with which a pass begins may be there already, if the pass before was on the same stage.

    Args:
        floors: of the layers.
        stages: where they are.
        plain: seconds of each kind of pass without gathers: (kinds, stages).
        ahead, awaited: seconds of gathers over the first axis and over others.
    """
    forward, backward, inputs, _ = floors.passes
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
    plan: Plan, order: LaidOrder, plain: Array, stages: StageEnds, floors: LayerFloors, gathers: Sequence[Array]
) -> tuple[Array, Array]:
    """Seconds of each pass when weights are gathered, and of each kind of pass on each stage that always gathers
    them: (passes,) and (kinds, stages).

    Args:
        plan: says when gathered weights are freed.
        order: of the passes.
        plain: seconds of each kind of pass without gathers: (kinds, stages).
        stages: where they are.
        floors: of their layers.
        gathers: seconds of gathers over each axis, as sums up to each layer.
    """
    ahead, awaited = gathers[0], np.sum(gathers[1:], axis=0) if gathers[1:] else np.zeros(len(gathers[0]))
    again, opening, begins = gathering_passes(floors, stages, plain, stages.sums(ahead), stages.sums(awaited))
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

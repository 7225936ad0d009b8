"""Floors of all pipelines of a shape at once: their ranks' passes, whatever is sharded and in which order they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.planner.arrays import Array, Places
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.memory_floors import SURE
from shardlab.planner.pass_counts import hands_back_last
from shardlab.planner.pipelines import Pipelines
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.strategies.plan import Plan


class LaidPipelines(NamedTuple):
    """Pipelines with as many ranks, side by side.

    Attributes:
        plans: one of each.
        again: whether each layer is computed again: (pipelines, layers).
        place, start, stop, rank: of the stages of all of them, one pipeline after the other: whose it is, its layers,
            and its rank: (stages,) each.
        first: the first layer of each rank: (pipelines, ranks).
        hands_back: whether each rank ends with a pass that the stage before waits for: (pipelines, 1).
    """

    plans: Sequence[Plan]
    again: NDArray[np.bool_]
    place: Places
    start: Places
    stop: Places
    rank: Places
    first: Places
    hands_back: NDArray[np.bool_]


class PipelineFloors:
    """Floors of the pipelines of a problem's shapes."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self._layers, self._pipelines = layers, pipelines

    def laid(self, shape: PlanShape, plans: Sequence[Plan]) -> LaidPipelines:
        """Lay a shape's pipelines side by side; microbatches of any size and precision may pass them."""
        model = blocks_of(self._layers.problem, shape).layers
        again = np.zeros((len(plans), len(model.layers)), bool)
        for row, plan in zip(again, plans, strict=True):
            if plan.recompute == "full":
                row[:] = True
            elif isinstance(plan.recompute, tuple):
                row[[layer for block in plan.recompute for layer in model.recomputable[block]]] = True
        placed = [self._pipelines.placed(shape, plan) for plan in plans]
        stages = [(each.start, each.stop, each.rank) for each in placed]
        start, stop, rank = (np.concatenate([each[part] for each in stages]) for part in range(3))
        return LaidPipelines(
            plans,
            again,
            np.repeat(np.arange(len(plans)), [len(each.rank) for each in placed]),
            start,
            stop,
            rank,
            np.array([each.first for each in placed]),
            np.array([[hands_back_last(plan)] for plan in plans]),
        )

    def seconds(self, shape: PlanShape, laid: LaidPipelines) -> Array:
        """Seconds below which no candidate with each pipeline is, whatever is sharded: (pipelines,).

        A rank begins when those before it have passed a microbatch; what its order says is left out.
        """
        floors = self._layers.floors(shape, "selective" if shape.recompute == "selective" else "none")
        each = self._pipelines.each(shape)
        forward, backward = floors.arrays[:2]
        sums = np.broadcast_to(backward, (len(laid.plans), len(backward)))
        if laid.again.any():
            full = self._layers.floors(shape, "full").arrays.backward
            sums = np.zeros(sums.shape)
            np.cumsum(np.where(laid.again, np.diff(full), np.diff(backward)), axis=1, out=sums[:, 1:])
        work = forward[laid.stop] - forward[laid.start] + sums[laid.place, laid.stop] - sums[laid.place, laid.start]
        pipelines, ranks = laid.first.shape
        of_ranks = np.bincount(laid.place * ranks + laid.rank, work, pipelines * ranks).reshape(pipelines, ranks)
        after = np.where(laid.hands_back, np.take_along_axis(sums, laid.first, axis=1), 0.0)
        return SURE * (forward[laid.first] + each * of_ranks + after).max(axis=1)

"""Where a pipeline's stages begin and end, and what their layers add."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array, Places
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.pipelines import Pipelines
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.strategies.plan import Plan


class StageSums(NamedTuple):
    """What a pipeline's stages add to sums up to each layer: (..., stages) each.

    Attributes:
        all: all layers of the stage.
        but_head: those after its first block.
        but_tail: those before its last block.
    """

    all: Array
    but_head: Array
    but_tail: Array


@dataclass(frozen=True, eq=False)
class StageEnds:
    """Where a pipeline's stages begin and end, in layers: (stages,) each.

    Attributes:
        start, stop: of the stage.
        rank: where it is.
        first, last: its first and last layer that has weights.
        head, tail: the end of the block of the first one, the beginning of the block of the last one.
    """

    start: Places
    stop: Places
    rank: Places
    first: Places
    last: Places
    head: Places
    tail: Places

    def all(self, sums: Array) -> Array:
        """What a stage's layers add to sums up to each layer: (..., layers + 1) to (..., stages)."""
        return sums[..., self.stop] - sums[..., self.start]

    def sums(self, sums: Array) -> StageSums:
        """What all of a stage's layers add, and those but for the first block or the last."""
        start, stop = sums[..., self.start], sums[..., self.stop]
        return StageSums(stop - start, stop - sums[..., self.head], sums[..., self.tail] - start)

    @cached_property
    def placed(self) -> Array:
        """Tell which stage is on which rank, by 1 and 0: (stages, ranks)."""
        return (self.rank[:, None] == np.arange(int(self.rank.max()) + 1)).astype(float)

    @cached_property
    def lowest(self) -> Places:
        """Find the first stage of each rank: (ranks,)."""
        return np.unique(self.rank, return_index=True)[1]


class PlacedEnds:
    """Where the stages of a problem's pipelines begin and end, each worked out once."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self._layers, self._pipelines = layers, pipelines
        self._known: dict[Hashable, StageEnds] = {}

    def of(self, shape: PlanShape, plan: Plan) -> StageEnds:
        """Where a pipeline's stages are."""
        placed = self._pipelines.placed(shape, plan)
        key = id(placed), shape.mesh.tp, shape.mesh.ep
        if key not in self._known:
            model = blocks_of(self._layers.problem, shape).layers
            weights = self._layers.floors(shape).weights
            block = [model.gathered_with(layer) for layer in range(len(weights) - 1)]
            ends: list[list[int]] = []
            for start, stop in zip(placed.start.tolist(), placed.stop.tolist(), strict=True):
                layers = [layer for layer in range(start, stop) if weights[layer + 1] > weights[layer]] or [start]
                first, last = layers[0], layers[-1]
                head = next((layer for layer in layers if block[layer] != block[first]), stop)
                tail = next((layer + 1 for layer in reversed(layers) if block[layer] != block[last]), start)
                ends.append([first, last, head, tail])
            self._known[key] = StageEnds(placed.start, placed.stop, placed.rank, *np.array(ends, np.intp).T)
        return self._known[key]

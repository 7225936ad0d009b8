"""Seconds of the messages between a pipeline's stages, alone on their links."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.stage_ends import StageEnds
from shardlab.program import Kind
from shardlab.rules.layer import GRADIENT_OF


class StageMessages:
    """Messages between the stages of a problem's pipelines, each priced once."""

    def __init__(self, layers: ShapeLayers) -> None:
        self._layers = layers
        self._known: dict[Hashable, Array] = {}
        self._between: dict[Hashable, dict[Hashable, tuple[float, float]]] = {}

    def of(self, shape: PlanShape, stages: StageEnds) -> Array:
        """Seconds of messages from each stage: of activations to the next one, of gradients to the one before:
        (2, stages)."""
        key = stages, shape.mesh, shape.micro_batch_size, shape.precision.name, shape.recompute == "selective"
        key = (*key, shape.sequence_parallel, shape.context, shape.ulysses_degree, shape.stripes)
        if key not in self._known:
            self._known[key] = self._priced(shape, stages)
        return self._known[key]

    def _priced(self, shape: PlanShape, stages: StageEnds) -> Array:
        prices, apart = self._layers.prices(shape.candidate), shape.mesh.world // shape.mesh.pp
        found, given = np.zeros((2, len(stages.rank))), self._layers.floors(shape).given
        model, least = blocks_of(self._layers.problem, shape).layers, min(each for each in given if each)
        known = self._between.setdefault((shape.mesh, shape.precision.name), {})
        ranks: list[int] = stages.rank.tolist()
        starts: list[int] = stages.start.tolist()
        for stage in range(1, len(ranks)):
            start, ends = starts[stage], (ranks[stage - 1] * apart, ranks[stage] * apart)
            if ends[0] == ends[1]:
                continue
            kinds = tuple([port.kind for port in model.layers[start].inputs])
            key = kinds, given[start], least, ends
            if key not in known:
                there = back = 0.0
                for kind in kinds:  # they take turns
                    bytes = given[start] if kind is Kind.ACTIVATION else least
                    there += prices.message_times(kind, bytes, *ends)[0]
                    back += prices.message_times(GRADIENT_OF[kind], bytes, *ends[::-1])[0]
                known[key] = there, back
            found[0, stage - 1], found[1, stage] = known[key]
        return found

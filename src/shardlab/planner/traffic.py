"""Floors of what the ranks that see different tokens exchange: gathered weights and reduced gradients, in seconds.

Collectives of one axis take turns. So together they are a floor of a step, whatever runs beside them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.layer_floors import LayerFloors, ShapeLayers, between
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.problem import Candidate
from shardlab.planner.sharing import shards
from shardlab.program import Kind, OpKind
from shardlab.strategies.plan import CUT_AXES, Plan
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

    def sums(self, shape: PlanShape, candidate: Candidate, floors: LayerFloors, on: Collective) -> Array:
        """Seconds of a collective on each layer's weight, as sums up to each layer."""
        mesh = candidate.plan.mesh
        key = id(floors.weights), on, mesh
        if key not in self._known:
            model, prices, group = (
                blocks_of(self.problem, shape).layers,
                self._layers.prices(candidate),
                mesh.group(0, on.axis),
            )
            layers, of_layers = floors.kinds
            seconds = np.zeros(len(layers))
            for place, layer in enumerate(layers.tolist()):
                bytes = on.bytes * between(floors.weights, range(layer, layer + 1))
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

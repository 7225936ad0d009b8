"""How long the reductions of a step's gradients take at least: over one axis in turn, beside passes or after them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array, Places


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

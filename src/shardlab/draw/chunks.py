"""Model chunks: the one of its rank that each layer belongs to, and the model's layer that it is part of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

from shardlab.program import OpKind, Sizes
from shardlab.timeline import Timeline

Chunks = list[dict[int, int]]
"""Chunk, counted from 0, of each layer that a row of a timeline computes, for each row."""


def chunks_of(timeline: Timeline) -> Chunks | None:
    """The chunks of a pipeline's ranks; None if all ranks compute the same layers, so that nothing is a pipeline."""
    own = [sorted({e.layer for e in events if e.kind is OpKind.FORWARD}) for events in timeline.events]
    if len({tuple(layers) for layers in own if layers}) <= 1:
        return None
    runs = [_runs(layers) for layers in own]
    most = max(max(each, default=0) for each in runs) + 1
    return [dict(zip(layers, _spread(each, most), strict=True)) for layers, each in zip(own, runs, strict=True)]


def _runs(layers: list[int]) -> list[int]:
    """Find for each layer the run of successive ones that it stands in."""
    found = [0] * len(layers)
    for place, (one, other) in enumerate(pairwise(layers)):
        found[place + 1] = found[place] + (other != one + 1)
    return found


def _spread(runs: list[int], most: int) -> list[int]:
    """The chunks of a rank whose last stages follow each other, as where a V turns: its layers in equal parts."""
    if not runs or runs[-1] + 1 == most:
        return runs
    return [place * most // len(runs) for place in range(len(runs))]


def model_layer_count(sizes: Sizes) -> int:
    """Layers of the model in a reader's words: a program may cut each into several."""
    if sizes.blocks:
        return len(sizes.blocks) - 1
    return len(_experts(sizes)) or sizes.layers


def model_layer(sizes: Sizes, layer: int) -> int:
    """Which of the model's layers a program's layer is part of; what stands before the first or after the last is
    counted to it."""
    if sizes.blocks:
        found = bisect_right(sizes.blocks, layer) - 1
    elif experts := _experts(sizes):
        found = bisect_left(experts, layer)
    else:
        return layer
    return max(0, min(model_layer_count(sizes) - 1, found))


def _experts(sizes: Sizes) -> list[int]:
    """The program's layers that are a mixture's experts, one of each of the model's."""
    return [number for number, layer in enumerate(sizes.signatures) if "expert" in layer.cut]

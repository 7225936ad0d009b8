"""The look of every box of a timeline: by pass, or by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from shardlab.draw.chunks import chunks_of, model_layer, model_layer_count
from shardlab.draw.palette import BACKWARD_INPUT, BACKWARD_WEIGHT, COLORS, FORWARD, SHADES, layer_color, pale, shade
from shardlab.program import OpKind
from shardlab.program.picture import ColorBy
from shardlab.timeline import Event, Timeline


class Paint(NamedTuple):
    """A look that many boxes share.

    Attributes:
        color, hatch: of the whole box.
        top, bottom: colours of stripes along its edges, if it has them.
    """

    color: str
    hatch: str = ""
    top: str = ""
    bottom: str = ""


class Looks:
    """The looks of one timeline's boxes.

    Attributes:
        by: what the colour tells first.
        layers: how many the model has.
        chunks: how many model chunks a rank of a pipeline has; 0 if the ranks are no pipeline.
    """

    def __init__(self, timeline: Timeline, by: ColorBy) -> None:
        self.by = by
        self._sizes = timeline.program.sizes
        self._chunks = chunks_of(timeline)
        self.layers = model_layer_count(self._sizes)
        self.chunks = 1 + max((n for row in self._chunks for n in row.values()), default=0) if self._chunks else 0
        self._layer_of: Callable[[int], int] = cache(partial(model_layer, self._sizes))
        self.compute_paint = cache(self._compute_paint)

    def chunk(self, event: Event) -> int:
        """The model chunk that an event is about; 0 if the ranks are no pipeline."""
        return self._chunks[event.rank].get(event.layer, 0) if self._chunks else 0

    def paint(self, event: Event) -> Paint:
        """The look of an event's box."""
        row = event.kind.row
        if not row.part_of:
            return Paint(COLORS[row.color])
        if self.by == "layer" or not self.chunks:
            return self.compute_paint(event.kind, self._layer_of(event.layer))
        return self.compute_paint(event.kind, self.chunk(event))

    def _compute_paint(self, kind: OpKind, place: int) -> Paint:
        """The look of a pass through a layer of the model, or through a chunk of a pipeline's rank."""
        hatch, family = kind.row.hatch, SHADES[kind.row.color]
        if self.by == "pass":
            of = self.chunks or self.layers
            return Paint(shade(family, place / (of - 1) if of > 1 else 0.2), hatch)
        color = layer_color(place, self.layers)
        if family == FORWARD:
            return Paint(color, hatch)
        top = color if family != BACKWARD_WEIGHT else ""
        bottom = color if family != BACKWARD_INPUT else ""
        return Paint(pale(color), hatch, top, bottom)

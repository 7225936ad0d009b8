"""The look of every box of a timeline: by pass, or by layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from shardlab.draw.chunks import chunks_of, model_layer, model_layers
from shardlab.draw.palette import COMMUNICATION_LOOKS, FAMILIES, LOSS, OTHER, UPDATE, layer_color, pale, shade
from shardlab.program import OpKind
from shardlab.program.picture import ColorBy
from shardlab.simulate import Event, Timeline

HATCHES = {OpKind.RECOMPUTE: "////", OpKind.ATTEND: "....", OpKind.ATTEND_BACKWARD: "...."}


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
        self.layers = model_layers(self._sizes)
        self.chunks = 1 + max((n for row in self._chunks for n in row.values()), default=0) if self._chunks else 0
        self._layer_of: Callable[[int], int] = cache(partial(model_layer, self._sizes))
        self.compute_paint = cache(self._compute_paint)

    def chunk(self, event: Event) -> int:
        """The model chunk that an event is about; 0 if the ranks are no pipeline."""
        return self._chunks[event.rank].get(event.layer, 0) if self._chunks else 0

    def paint(self, event: Event) -> Paint:
        """The look of an event's box."""
        if event.kind in COMMUNICATION_LOOKS:
            return Paint(COMMUNICATION_LOOKS[event.kind].color)
        if event.kind not in FAMILIES:
            return Paint({OpKind.UPDATE: UPDATE, OpKind.LOSS: LOSS}.get(event.kind, OTHER))
        if self.by == "layer" or not self.chunks:
            return self.compute_paint(event.kind, self._layer_of(event.layer))
        return self.compute_paint(event.kind, self.chunk(event))

    def _compute_paint(self, kind: OpKind, place: int) -> Paint:
        """The look of a pass through a layer of the model, or through a chunk of a pipeline's rank."""
        hatch = HATCHES.get(kind, "")
        if self.by == "pass":
            of = self.chunks or self.layers
            return Paint(shade(FAMILIES[kind], place / (of - 1) if of > 1 else 0.2), hatch)
        color = layer_color(place, self.layers)
        if kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.ATTEND):
            return Paint(color, hatch)
        top = color if kind is not OpKind.BACKWARD_WEIGHT else ""
        bottom = color if kind is not OpKind.BACKWARD_INPUT else ""
        return Paint(pale(color), hatch, top, bottom)

"""The upper panel of a timeline: a row for each rank, compute above and communication below it in a thinner lane."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from shardlab.draw.canvas import FAINT, IDLE, Box, fill, fitting
from shardlab.draw.palette import COMMUNICATION_LOOKS, LOSS, UPDATE, ink_on, layer_color, pale
from shardlab.program import OpKind
from shardlab.rules.pieces import bits, listed
from shardlab.simulate import Event, Timeline
from shardlab.simulate.traced import rank_of

TOP, MIDDLE, BOTTOM = 0.09, 0.66, 0.91
"""A row is 1 high: compute lies between the first two, communication between the last two."""

STRIPE = 0.3
"""Share of a backward box that carries the layer's full colour."""

LINKED_RANKS = 32
"""Up to so many ranks a line joins each send to its receive."""

LOSS_WIDTH = 0.025
"""Inches; in unit costs the loss takes no time."""


class Scale(NamedTuple):
    """Points of one unit of time, and of one row."""

    time: float
    row: float


class Paint(NamedTuple):
    """One look of many boxes."""

    color: str
    hatch: str = ""
    flat: bool = False


class Label(NamedTuple):
    """What is written on a box, and how far below the top of its row."""

    text: str
    size: float
    color: str
    middle: float


def draw_lanes(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """Draw every event of a timeline; labels are written where they fit."""
    ranks = timeline.program.ranks
    fill(axes, [(0, rank + TOP, timeline.end, rank + BOTTOM) for rank in range(ranks)], IDLE)
    boxes: dict[Paint, list[Box]] = defaultdict(list)
    for events in timeline.events:
        for event in events:
            for paint, box in _boxes(event, timeline.program.layers, scale):
                boxes[paint].append(box)
    thinnest = min((e.end - e.start for events in timeline.events for e in events if e.end > e.start), default=1.0)
    gap = min(0.7, 0.1 * thinnest * scale.time)
    for paint, places in boxes.items():
        edge = "none" if paint.flat else "white"
        fill(axes, places, paint.color, edge=edge, width=0 if paint.flat else gap, hatch=paint.hatch)
    if ranks <= LINKED_RANKS:
        _draw_messages(axes, timeline, scale)
    for events in timeline.events:
        for event in events:
            label = label_of(timeline, event, scale)
            if label is not None:
                place = ((event.start + event.end) / 2, event.rank + label.middle)
                axes.text(*place, label.text, size=label.size, color=label.color, ha="center", va="center_baseline")


def _boxes(event: Event, layers: int, scale: Scale) -> Iterator[tuple[Paint, Box]]:
    start, end, row = event.start, event.end, event.rank
    lane = (start, row + TOP, end, row + MIDDLE)
    if event.kind in COMMUNICATION_LOOKS:
        yield Paint(COMMUNICATION_LOOKS[event.kind].color), (start, row + MIDDLE, end, row + BOTTOM)
    elif event.kind is OpKind.LOSS:
        width = LOSS_WIDTH * 72 / scale.time
        yield Paint(LOSS, flat=True), (start - width / 2, row + TOP, max(end, start + width / 2), row + MIDDLE)
    elif end <= start:
        return
    elif event.kind is OpKind.UPDATE:
        yield Paint(UPDATE), lane
    else:
        color = layer_color(event.layer, layers)
        if event.kind is OpKind.BACKWARD or event.kind is OpKind.ATTEND_BACKWARD:
            hatch = "...." if event.kind is OpKind.ATTEND_BACKWARD else ""
            yield Paint(pale(color), hatch), lane
            yield Paint(color, flat=True), (start, row + MIDDLE - STRIPE * (MIDDLE - TOP), end, row + MIDDLE)
        else:
            yield Paint(color, _HATCHES.get(event.kind, "")), lane


_HATCHES = {OpKind.RECOMPUTE: "////", OpKind.ATTEND: "...."}


def label_of(timeline: Timeline, event: Event, scale: Scale) -> Label | None:
    """The microbatches on compute, letters and the peer on communication; None where they do not fit."""
    width = (event.end - event.start) * scale.time
    if event.kind in COMMUNICATION_LOOKS:
        look = COMMUNICATION_LOOKS[event.kind]
        op = timeline.program.tapes[event.rank][event.op]
        peer = max(op.peer, op.root)
        text, color = look.letters + (str(peer) if peer >= 0 else ""), ink_on(look.color)
        top, bottom = MIDDLE, BOTTOM
    elif event.kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD):
        text, color = listed(bits(event.microbatches)), ink_on(layer_color(event.layer, timeline.program.layers))
        top, bottom = TOP, MIDDLE
        if event.kind is OpKind.BACKWARD:
            color, bottom = "#1b1f24", MIDDLE - STRIPE * (MIDDLE - TOP)
    else:
        return None
    height = (bottom - top) * scale.row
    size = min(9.0, 0.78 * height, fitting(text, width))
    return Label(text, size, color, (top + bottom) / 2) if size >= min(5.2, 0.7 * height) else None


def _draw_messages(axes: Axes, timeline: Timeline, scale: Scale) -> None:
    """A line from the end of each send to the start of its receive: messages of one channel arrive in order."""
    vertices: list[tuple[float, float]] = []
    for sent, received in messages(timeline):
        vertices += [
            (sent.end, sent.rank + (MIDDLE + BOTTOM) / 2),
            (received.start, received.rank + (MIDDLE + BOTTOM) / 2),
        ]
    if vertices:
        path = Path(vertices, [Path.MOVETO, Path.LINETO] * (len(vertices) // 2))
        width = min(0.7, 0.02 * scale.row)
        axes.add_artist(PathPatch(path, facecolor="none", edgecolor=FAINT, linewidth=width))


def messages(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Every send with its receive; one whose sender is not in the timeline is left out."""
    program = timeline.program
    sent: dict[tuple[int, int], deque[Event]] = defaultdict(deque)
    for events in timeline.events:
        for event in events:
            if event.kind is OpKind.SEND:
                sent[rank_of(program, event.rank), program.tapes[event.rank][event.op].peer].append(event)
    for events in timeline.events:
        for event in events:
            if event.kind is OpKind.RECV:
                channel = sent[program.tapes[event.rank][event.op].peer, rank_of(program, event.rank)]
                if channel:
                    yield channel.popleft(), event

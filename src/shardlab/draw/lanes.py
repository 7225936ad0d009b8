"""A panel of a timeline: compute of each row above, and communication below it in a thinner lane."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from shardlab.draw.canvas import FAINT, IDLE, Box, Page, fill, fitting
from shardlab.draw.looks import Looks, Paint
from shardlab.draw.palette import LOSS, ink_on
from shardlab.draw.rows import Row, row_name
from shardlab.draw.spans import Detail, Span, detail_of, tracks
from shardlab.program.ops import POINT_TO_POINT, Stream
from shardlab.timeline import Event, Timeline

TOP, MIDDLE, BOTTOM = 0.09, 0.66, 0.91
"""A row is 1 high: compute lies between the first two, communication between the last two."""

STRIPE = 0.3
"""Share of a box's height that a stripe along its edge takes."""

LINKED_ROWS = 32
"""Rows up to which a line joins each send to its receive."""

LOSS_WIDTH = 0.025
"""Inches; in unit costs the loss takes no time."""

Boxes = dict[tuple[str, str, bool], list[Box]]
"""The boxes of each colour and hatch, apart those without an edge."""


@dataclass(frozen=True)
class Panel:
    """A panel: what is drawn between two moments.

    Attributes:
        rows: from the top.
        start, end: of its time.
        points: of a unit of time.
        height: points of a row.
        detail: what one box stands for.
    """

    timeline: Timeline
    rows: Sequence[Row]
    looks: Looks
    start: float
    end: float
    points: float
    height: float
    detail: Detail

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        rows: Sequence[Row],
        looks: Looks,
        window: tuple[float, float],
        size: tuple[float, float],
    ) -> Panel:
        """The rows between two moments, as finely as can be read; `size` is the width of all, and a row's height."""
        start, end = window
        points = size[0] * 72 / ((end - start) or 1.0)
        inside = [row._replace(events=[e for e in row.events if e.end >= start and e.start <= end]) for row in rows]
        return cls(timeline, inside, looks, start, end, points, size[1] * 72, detail_of(inside, looks, points))

    def text_size(self, text: str, width: float, height: float) -> float:
        """Points of a text on a box of so much time and such a part of its row; 0 where it does not fit."""
        height *= self.height
        size = min(9.0, 0.78 * height, fitting(text, width * self.points)) if text else 0.0
        return size if size >= min(5.2, 0.7 * height) else 0.0


def draw_lanes(page: Page, axes: Axes, panel: Panel) -> bool:
    """Draw a panel; labels are written where they fit. Whether any microbatch is named is returned."""
    rows = panel.rows
    axes.set_xlim(panel.start, panel.end or 1.0)
    axes.set_ylim(len(rows), 0)
    names = [row_name(panel.timeline.program, row) for row in rows]
    axes.set_yticks([place + 0.5 for place in range(len(rows))], names, size=min(8.0, 0.75 * panel.height))
    axes.tick_params(axis="y", length=0)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#d8dee4", linewidth=0.6)
    last = min(panel.end, panel.timeline.end)
    fill(axes, [(panel.start, place + TOP, last, place + BOTTOM) for place in range(len(rows))], IDLE)
    drawn = tracks(rows, panel.looks, panel.detail, panel.points, lambda row, event: _letters(panel, row, event))
    boxes: Boxes = defaultdict(list)
    for place, track in enumerate(drawn):
        _stack(boxes, panel, track.compute, place + TOP, place + MIDDLE)
        _stack(boxes, panel, track.communication, place + MIDDLE, place + BOTTOM)
        for start, end in track.losses:
            half = max(end - start, LOSS_WIDTH * 72 / panel.points) / 2
            middle = (start + end) / 2
            boxes[LOSS, "", True].append((middle - half, place + TOP, middle + half, place + MIDDLE))
    widths = [span.end - span.start for track in drawn for span in (*track.compute, *track.communication)]
    gap = min(0.7, 0.1 * min(widths, default=1.0) * panel.points) if panel.detail is not Detail.SHARES else 0.0
    for (color, hatch, flat), places in boxes.items():
        fill(axes, places, color, edge="none" if flat else "white", width=0 if flat else gap, hatch=hatch)
    if len(rows) <= LINKED_ROWS and panel.detail is not Detail.SHARES:
        _draw_messages(axes, panel)
    named = [_write(page, axes, panel, track.compute, place, (TOP, MIDDLE)) for place, track in enumerate(drawn)]
    for place, track in enumerate(drawn):
        _write(page, axes, panel, track.communication, place, (MIDDLE, BOTTOM))
    return any(named)


def _stack(boxes: Boxes, panel: Panel, spans: Iterable[Span], top: float, bottom: float) -> None:
    """The boxes of a lane's spans, whose shares stand on each other."""
    for span in spans:
        start, end = max(span.start, panel.start), min(span.end, panel.end)
        under = bottom
        for paint, share in span.shares:
            over = under - share * (bottom - top)
            box = (start, over, end, under)
            boxes[paint.color, paint.hatch, False].append(box)
            for color, stripe in stripes(paint, box):
                boxes[color, "", True].append(stripe)
            under = over


def stripes(paint: Paint, box: Box) -> Iterator[tuple[str, Box]]:
    """The stripes along a box's edges, each with its colour."""
    left, top, right, bottom = box
    width = STRIPE * (bottom - top)
    if paint.top:
        yield paint.top, (left, top, right, top + width)
    if paint.bottom:
        yield paint.bottom, (left, bottom - width, right, bottom)


def _write(page: Page, axes: Axes, panel: Panel, spans: Iterable[Span], row: int, lane: tuple[float, float]) -> bool:
    """Write the texts that fit; whether there was one is returned."""
    wrote = False
    for span in spans:
        start, end = max(span.start, panel.start), min(span.end, panel.end)
        filled = sum(share for _, share in span.shares)
        if size := panel.text_size(span.text, end - start, (lane[1] - lane[0]) * filled):
            paint = max(span.shares, key=lambda share: share[1])[0]
            middle = row + lane[1] - filled * (lane[1] - lane[0]) / 2
            page.write(axes, ((start + end) / 2, middle), span.text, size, ink_on(paint.color))
            wrote = True
    return wrote


def _letters(panel: Panel, row: Row, event: Event) -> str:
    """The letters of a communication, with its peer or root where the row is one rank's."""
    op = panel.timeline.program.tapes[event.rank][event.op]
    peer = max(op.peer, op.root) if len(row.ranks) == 1 else -1
    return event.kind.row.letters + (str(peer) if peer >= 0 else "")


def _draw_messages(axes: Axes, panel: Panel) -> None:
    """A line from the end of each send to the start of its receive: messages of one channel arrive in order."""
    place_of = {row.row: place + (MIDDLE + BOTTOM) / 2 for place, row in enumerate(panel.rows)}
    vertices: list[tuple[float, float]] = []
    for sent, received in messages(panel.timeline):
        inside = panel.start <= sent.end and received.start <= panel.end
        if inside and sent.rank in place_of and received.rank in place_of:
            vertices += [(sent.end, place_of[sent.rank]), (received.start, place_of[received.rank])]
    if vertices:
        path = Path(vertices, [Path.MOVETO, Path.LINETO] * (len(vertices) // 2))
        axes.add_artist(PathPatch(path, facecolor="none", edgecolor=FAINT, linewidth=min(0.7, 0.02 * panel.height)))


def messages(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Pair every send with its receive; one whose sender is not in the timeline is left out."""
    events = {(event.rank, event.op): event for row in timeline.events for event in row if event.kind in POINT_TO_POINT}
    for communication in timeline.communications:
        if communication.stream is Stream.MESSAGE:
            sent, received = (events.get((row, at)) for row, _, at in communication.participants)
            if sent is not None and received is not None:
                yield sent, received

"""Panels of a page: lanes of boxes for each row, with the legend above them and the memory below.

- `draw_lanes` draws a `Panel`. Each of its rows has a lane for compute, and below it a thinner lane for communication.
- `draw_memory` draws the live memory of every rank as a step curve, and marks the peak.
- `legend_items` lists the styles that occur in some panels, `flow` breaks them into lines, `draw_legend` draws them.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from shardlab.common.text import byte_unit, bytes_text
from shardlab.draw.canvas import (
    COLORS,
    FAINT,
    FORWARD,
    IDLE,
    LOSS,
    OTHER,
    PEAK,
    Box,
    Looks,
    Page,
    Paint,
    fill,
    fit_size,
    ink_on,
)
from shardlab.draw.rows import UNFOLDED, Detail, Row, Span, detail_of, ranks_text, row_name, sample_rows, tracks
from shardlab.language import OpKind
from shardlab.language.ops import COMMUNICATION, POINT_TO_POINT, Stream
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.run import moments_of

SIZE = 8.0

ROW = 0.24

SWATCH = (0.26, 0.15)

NAMED_LAYERS = 12
"""Largest number of layers for which each layer has a numbered swatch."""

LEGEND_ORDER = sorted(OpKind, key=lambda kind: (kind is not OpKind.FORWARD, kind is not OpKind.LOSS))
"""Ops in the order of the legend: the forward pass, the loss, and the others as in `OpKind`."""

TOP, MIDDLE, BOTTOM = 0.09, 0.66, 0.91
"""Edges of the lanes in a row of height 1. Compute is between the first two, communication between the last two."""

STRIPE = 0.3
"""Height of a stripe along the edge of a box, as a share of the height of the box."""

LINKED_ROWS = 32
"""Largest number of rows of a picture with an arrow from each send to its receive."""

HEAD = 3.5
"""Length of the head of a message's arrow in points."""

LOSS_WIDTH = 0.025
"""Smallest width of a loss in inches, because the loss takes no time in teaching costs."""

Boxes = dict[tuple[str, str, bool], list[Box]]
"""Boxes by style: colour, hatch, and whether they have no edge."""

NAMED_CURVES = 8
"""Largest number of different curves for which every curve is named beside the panel."""

KEY = (10.0, 24.0, 29.0)
"""Distances from the panel in points: start and end of a line in its key, and start of the text."""

VISIBLE_STEP = 1.0
"""Smallest visible distance of two steps, in points."""

Vertices = NDArray[np.float64]
"""Points of a path, of the shape (points, 2)."""

Curve = tuple[tuple[float, int], ...]
"""Step curve: pairs of a time and the number of elements that are live from then on."""


class Item(NamedTuple):
    """Entry of the legend: a text, and a function that draws its swatch into a box of the page."""

    text: str
    paint: Callable[[Page, Box], None]
    width: float = SWATCH[0]


def legend_items(panels: Sequence[Panel], numbered: bool) -> list[Item]:
    """List the legend's entries for the styles that occur in some panels.

    Args:
        numbered: whether boxes are labelled with microbatch numbers.
    """
    looks = panels[0].looks
    drawn_kinds = {event.kind for panel in panels for row in panel.rows for event in row.events if _is_drawn(event)}
    kinds = [kind for kind in LEGEND_ORDER if kind in drawn_kinds]
    other = [kind for kind in kinds if kind not in COMMUNICATION and COLORS.get(kind.row.color) == OTHER]
    compute = [kind for kind in kinds if kind not in COMMUNICATION and kind not in other]
    items = [Item(kind.row.legend, _typical_swatch(looks, kind)) for kind in compute]
    if other:
        items.append(Item(", ".join(sorted(kind.row.legend for kind in other)), _swatch(Paint(OTHER))))
    for row in [kind.row for kind in kinds if kind in COMMUNICATION]:
        items.append(Item(row.legend, _swatch(Paint(COLORS[row.color]), row.letters)))
    items += _places(looks)
    if any(panel.detail is not Detail.OPS for panel in panels):
        items.append(Item("height: share of the time", _share))
    return [*items, Item(f"microbatches{_numbering_note(panels[0])}", _number)] if numbered else items


def flow(items: list[Item], width: float) -> list[list[Item]]:
    """Break entries into lines that are at most `width` inches wide."""
    rows: list[list[Item]] = [[]]
    line_width = 0.0
    for item in items:
        item_width = _width(item)
        if line_width + item_width > width and rows[-1]:
            rows.append([])
            line_width = 0.0
        rows[-1].append(item)
        line_width += item_width
    return rows


def draw_legend(page: Page, rows: list[list[Item]], left: float, top: float) -> None:
    """Draw the lines of a legend. `left` and `top` are its position on the page in inches."""
    for number, row in enumerate(rows):
        x, middle = left, top + (number + 0.5) * ROW
        for item in row:
            box = (x, middle - SWATCH[1] / 2, x + item.width, middle + SWATCH[1] / 2)
            item.paint(page, box)
            page.ink.text(box[2] + 0.06, middle, item.text, size=SIZE, color=FAINT, va="center_baseline")
            x += _width(item)


@dataclass(frozen=True)
class Panel:
    """Rows of a timeline between two times, with the scale of their drawing.

    Attributes:
        rows: rows from top to bottom.
        start, end: first and last time that is shown.
        points: width of a unit of time, in points.
        height: height of a row, in points.
        detail: meaning of one box.
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
        """Make the panel of a time window, with the finest legible detail.

        Args:
            window: first and last time that is shown.
            size: width of the panel and height of a row, in inches.
        """
        start, end = window
        points = size[0] * 72 / ((end - start) or 1.0)
        visible_rows = [
            row._replace(events=[e for e in row.events if e.end >= start and e.start <= end]) for row in rows
        ]
        return cls(
            timeline, visible_rows, looks, start, end, points, size[1] * 72, detail_of(visible_rows, looks, points)
        )

    def text_size(self, text: str, width: float, height: float) -> float:
        """Return the font size in points at which a text fits into a box (0: it does not fit).

        Args:
            width: width of the box in units of time.
            height: height of the box as a fraction of its row.
        """
        height *= self.height
        size = min(9.0, 0.78 * height, fit_size(text, width * self.points)) if text else 0.0
        return size if size >= min(5.2, 0.7 * height) else 0.0


def draw_lanes(page: Page, axes: Axes, panel: Panel) -> bool:
    """Draw the rows of a panel, with all labels that fit.

    Returns:
        Whether any box is labelled with its microbatch number.
    """
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
    row_tracks = tracks(rows, panel.looks, panel.detail, panel.points, lambda row, event: _letters(panel, row, event))
    boxes: Boxes = defaultdict(list)
    for place, track in enumerate(row_tracks):
        _stack(boxes, panel, track.compute, place + TOP, place + MIDDLE)
        _stack(boxes, panel, track.communication, place + MIDDLE, place + BOTTOM)
        for start, end in track.losses:
            half = max(end - start, LOSS_WIDTH * 72 / panel.points) / 2
            middle = (start + end) / 2
            boxes[LOSS, "", True].append((middle - half, place + TOP, middle + half, place + MIDDLE))
    widths = [span.end - span.start for track in row_tracks for span in (*track.compute, *track.communication)]
    gap = min(0.7, 0.1 * min(widths, default=1.0) * panel.points) if panel.detail is not Detail.SHARES else 0.0
    for (color, hatch, flat), places in boxes.items():
        fill(axes, places, color, edge="none" if flat else "white", width=0 if flat else gap, hatch=hatch)
    if len(rows) <= LINKED_ROWS and panel.detail is not Detail.SHARES:
        _draw_messages(axes, panel)
    labelled_rows = [
        _write(page, axes, panel, track.compute, place, (TOP, MIDDLE)) for place, track in enumerate(row_tracks)
    ]
    for place, track in enumerate(row_tracks):
        _write(page, axes, panel, track.communication, place, (MIDDLE, BOTTOM))
    return any(labelled_rows)


def stripes(paint: Paint, box: Box) -> Iterator[tuple[str, Box]]:
    """Yield the stripes along the edges of a box, each with its colour."""
    left, top, right, bottom = box
    width = STRIPE * (bottom - top)
    if paint.top:
        yield paint.top, (left, top, right, top + width)
    if paint.bottom:
        yield paint.bottom, (left, bottom - width, right, bottom)


def messages(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Yield each send with its receive, if both are in the timeline."""
    events = {(event.rank, event.op): event for row in timeline.events for event in row if event.kind in POINT_TO_POINT}
    for communication in timeline.communications:
        if communication.stream is Stream.MESSAGE:
            send, receive = (events.get((row, index)) for row, _, index in communication.participants)
            if send is not None and receive is not None:
                yield send, receive


def draw_memory(axes: Axes, timeline: Timeline, rows: Sequence[Row], width: float) -> None:
    """Draw the live memory of the rows as step curves, and mark the peak.

    Rows with the same memory share one curve. Of many rows, only five and a row with the peak are drawn.

    Args:
        width: width of the panel, in points.
    """
    peak = timeline.peak_memory
    peaks = [row for row in rows if timeline.peak_memory_by_rank[row.row] == peak]
    drawn_rows = (
        rows if len(rows) <= UNFOLDED else sorted({row.row: row for row in (*sample_rows(rows, 5), peaks[0])}.values())
    )
    rows_of: dict[Curve, list[Row]] = {}
    for row in drawn_rows:
        rows_of.setdefault(curve(timeline, row.row), []).append(row)
    size = byte_unit(peak)[1] if timeline.in_seconds else 1
    axes.set_ylim(0, max(1.0, peak * 1.22) / size)
    width_of_line = 1.6 if len(rows_of) <= NAMED_CURVES else 0.9
    for place, steps in enumerate(rows_of):
        color = rank_color(place, len(rows_of))
        times, live = zip(*_thin_out(steps, timeline.end / width), (timeline.end, steps[-1][1]), strict=True)
        heights = [amount / size for amount in live]
        axes.step(times, heights, where="post", color=color, linewidth=width_of_line, solid_joinstyle="miter")
    _write_key(axes, timeline, list(rows_of.values()), width)
    if len(drawn_rows) < len(rows):
        text = f"{len(drawn_rows)} of {len(rows)} rows"
        axes.text(1 + KEY[0] / width, 1.04, text, size=7, color=FAINT, transform=axes.transAxes)
    first = min(_when_highest(steps) for steps, group in rows_of.items() if any(row in peaks for row in group))
    _mark_peak(axes, timeline, first, [rank for row in peaks for rank in row.ranks], size)
    if not timeline.in_seconds:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylabel(f"live memory ({byte_unit(peak)[0]})" if timeline.in_seconds else "live elements")


def key_width(rows: Sequence[Row]) -> float:
    """Return the width in inches of the key beside the memory panel."""
    return (KEY[2] + 4.4 * (max(len(ranks_text(row.ranks)) for row in rows) + len(": 74.99 GiB  "))) / 72


def curve(timeline: Timeline, rank: int) -> Curve:
    """Return the memory curve of a row. Memory changes at the start of compute, and when communication is issued."""
    times = moments_of(timeline, rank)
    return _simplify([(times[event.op], event.memory) for event in timeline.events[rank]]) or ((0.0, 0),)


def memory_text(timeline: Timeline, amount: int, *, unit: bool = True) -> str:
    """Return `75.11 GiB` for a timeline in seconds, otherwise `3.41 M elements` or, without `unit`, `3.41 M`."""
    if timeline.in_seconds:
        return bytes_text(amount)
    return short(amount) + " elements" * unit


def short(elements: int) -> str:
    """Return a number of elements in three digits: 3407872 as `3.41 M`."""
    digits = len(str(elements)) % 3 or 3
    return EngFormatter(places=None if elements < 1000 else 3 - digits, sep=" ").format_eng(elements).strip()


def _numbering_note(panel: Panel) -> str:
    """Return a note that microbatch numbers are those of a row's first rank ("": they are those of all its ranks)."""
    mesh = panel.timeline.program.mesh
    splits_batch = mesh.dp_replicate * mesh.dp_shard * mesh.ep > 1
    return " of a row's first rank" if splits_batch and mesh.world > panel.timeline.program.ranks else ""


def _is_drawn(event: Event) -> bool:
    return event.end > event.start or event.kind is OpKind.LOSS


def _width(item: Item) -> float:
    return item.width + 0.06 + len(item.text) * 0.54 * SIZE / 72 + 0.18


def _swatch(look: Paint, letters: str = "") -> Callable[[Page, Box], None]:
    def paint(page: Page, box: Box) -> None:
        fill(page.ink, [box], look.color, edge="white", width=0.5, hatch=look.hatch)
        for color, stripe in stripes(look, box):
            fill(page.ink, [stripe], color)
        _center(page, box, letters, ink_on(look.color))

    return paint


def _typical_swatch(looks: Looks, kind: OpKind) -> Callable[[Page, Box], None]:
    """Return the swatch of an op, in the style of the first chunk or of a middle layer."""
    if kind is OpKind.LOSS:
        return _loss
    if not kind.row.part_of:
        return _swatch(Paint(COLORS[kind.row.color]))
    return _swatch(looks.compute_paint(kind, 0 if looks.chunks and looks.by == "pass" else looks.layers // 2))


def _center(page: Page, box: Box, text: str, color: str) -> None:
    center = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    page.ink.text(*center, text, size=6.5, color=color, ha="center", va="center_baseline")


def _loss(page: Page, box: Box) -> None:
    middle = (box[0] + box[2]) / 2
    fill(page.ink, [(middle - 0.01, box[1], middle + 0.01, box[3])], LOSS)


def _number(page: Page, box: Box) -> None:
    fill(page.ink, [box], "white", edge=FAINT, width=0.6)
    _center(page, box, "0-3", FAINT)


def _share(page: Page, box: Box) -> None:
    left, top, right, bottom = box
    fill(page.ink, [box], IDLE)
    fill(page.ink, [(left, bottom - 0.6 * (bottom - top), right, bottom)], FORWARD[0])


def _places(looks: Looks) -> list[Item]:
    """Return the entry for the shades of chunks or layers, or for the colours of layers (empty: there is only one)."""
    if looks.by == "pass" and looks.chunks:
        count, noun = looks.chunks, "model chunk of the rank"
    else:
        count, noun = looks.layers, "layer"
    if count == 1:
        return []
    return [_ramp([looks.compute_paint(OpKind.FORWARD, place).color for place in range(count)], noun)]


def _ramp(colors: list[str], noun: str) -> Item:
    """Return an entry with numbered swatches for a few colours, or a ramp for many."""
    is_numbered = len(colors) <= NAMED_LAYERS
    swatch_width = 0.19 if is_numbered else 1.6 / len(colors)

    def paint(page: Page, box: Box) -> None:
        left, top, _, bottom = box
        for place, color in enumerate(colors):
            swatch_box = (left + place * swatch_width, top, left + (place + 1) * swatch_width, bottom)
            fill(page.ink, [swatch_box], color)
            if is_numbered:
                _center(page, swatch_box, str(place), ink_on(color))

    return Item(noun if is_numbered else f"{noun}s 0-{len(colors) - 1}", paint, len(colors) * swatch_width)


def _stack(boxes: Boxes, panel: Panel, spans: Iterable[Span], top: float, bottom: float) -> None:
    """Add the boxes of a lane's spans. Shares of a span are stacked from the bottom of the lane."""
    for span in spans:
        start, end = max(span.start, panel.start), min(span.end, panel.end)
        high, lower = (top + part * (bottom - top) for part in span.part)
        height = lower - high
        for paint, share in span.shares:
            upper = lower - share * height
            box = (start, upper, end, lower)
            boxes[paint.color, paint.hatch, False].append(box)
            for color, stripe in stripes(paint, box):
                boxes[color, "", True].append(stripe)
            lower = upper


def _write(page: Page, axes: Axes, panel: Panel, spans: Iterable[Span], row: int, lane: tuple[float, float]) -> bool:
    """Write the texts of a lane that fit, and return whether any did."""
    wrote = False
    for span in spans:
        start, end = max(span.start, panel.start), min(span.end, panel.end)
        high, low = (lane[0] + part * (lane[1] - lane[0]) for part in span.part)
        filled = sum(share for _, share in span.shares) * (low - high)
        if size := panel.text_size(span.text, end - start, filled):
            paint = max(span.shares, key=lambda share: share[1])[0]
            middle = row + low - filled / 2
            page.write(axes, ((start + end) / 2, middle), span.text, size, ink_on(paint.color))
            wrote = True
    return wrote


def _letters(panel: Panel, row: Row, event: Event) -> str:
    """Return the label of a communication. It includes the peer or root if the row represents a single rank."""
    op = panel.timeline.program.tapes[event.rank][event.op]
    peer = max(op.peer, op.root) if len(row.ranks) == 1 else -1
    return event.kind.row.letters + (str(peer) if peer >= 0 else "")


def _draw_messages(axes: Axes, panel: Panel) -> None:
    """Draw an arrow for each message, from the end of its send to the start of its receive.

    If send and receive overlap, the arrow is from the start of the send to the end of the receive.
    """
    place_of = {row.row: place + (MIDDLE + BOTTOM) / 2 for place, row in enumerate(panel.rows)}
    vertices: list[tuple[float, float]] = []
    for send, receive in messages(panel.timeline):
        start, end = (send.end, receive.start) if send.end <= receive.start else (send.start, receive.end)
        is_inside = panel.start <= start and end <= panel.end
        if is_inside and send.rank in place_of and receive.rank in place_of:
            vertices += [(start, place_of[send.rank]), (end, place_of[receive.rank])]
    if vertices:
        path = Path(*_arrows(axes, vertices))
        width = min(0.7, 0.02 * panel.height)
        axes.add_artist(PathPatch(path, facecolor=FAINT, edgecolor=FAINT, linewidth=width, joinstyle="miter"))


def _arrows(axes: Axes, vertices: Sequence[tuple[float, float]]) -> tuple[Vertices, Sequence[int]]:
    """Return the vertices and codes of a path with an arrow, whose head is a triangle, for each pair of vertices."""
    points = axes.transData.transform(vertices).reshape(-1, 2, 2)
    tail, tip = points[:, 0], points[:, 1]
    along = tip - tail
    along /= np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-9)
    across = along[:, ::-1] * [1, -1]
    length = HEAD * axes.figure.dpi / 72
    sides = [tip - length * along + side * length / 3 * across for side in (-1, 1)]
    corners = axes.transData.inverted().transform(np.stack([tail, tip, *sides, tip], axis=1).reshape(-1, 2))
    codes = [Path.MOVETO, *[Path.LINETO] * 4]
    return corners, [int(code) for code in codes] * len(points)


def _write_key(axes: Axes, timeline: Timeline, groups: list[list[Row]], width: float) -> None:
    """Name the curves beside the panel. Of many curves, name the first, the middle and the last one."""
    curve_numbers = range(len(groups)) if len(groups) <= NAMED_CURVES else (0, len(groups) // 2, len(groups) - 1)
    for place, number in enumerate(curve_numbers):
        ranks = ranks_text(sorted(rank for row in groups[number] for rank in row.ranks))
        top = memory_text(timeline, timeline.peak_memory_by_rank[groups[number][0].row], unit=False)
        _name(axes, place, width, rank_color(number, len(groups)), f"{ranks}: {top}")


def _when_highest(steps: Curve) -> float:
    return max(steps, key=lambda step: step[1])[0]


def _thin_out(steps: Curve, gap: float) -> Curve:
    """Remove invisible steps of a curve. In each interval of length `gap`, the highest and the last step remain."""
    if len(steps) * gap <= 2 * (steps[-1][0] or 1.0) * VISIBLE_STEP:
        return steps
    points: list[tuple[float, int]] = []
    for time, live in steps:
        if len(points) >= 2 and time - points[-2][0] < gap * VISIBLE_STEP:
            if live >= points[-2][1]:
                points[-2:] = [(points[-2][0], live), (time, live)]
            else:
                points[-1] = (time, live)
        else:
            points.append((time, live))
    return tuple(points)


def _simplify(moments: list[tuple[float, int]]) -> Curve:
    """Reduce the values at each time to the last one and those that exceed all later ones at this time."""
    steps: list[tuple[float, int]] = []
    for time, live in reversed(moments):
        if not steps or steps[-1][0] > time or live > steps[-1][1]:
            steps.append((time, live))
    return tuple(reversed(steps))


def rank_color(place: int, count: int) -> str:
    """Return the colour of one of `count` memory curves. It is visible on a light and on a dark ground."""
    return to_hex(mpl.colormaps["Blues"](0.4 + 0.4 * (place / (count - 1) if count > 1 else 0.75)))


def _name(axes: Axes, place: int, width: float, color: str, text: str) -> None:
    """Write a line of the key beside a panel that is `width` points wide."""
    x, y = 1 + KEY[0] / width, 0.95 - 0.125 * place
    axes.plot([x, 1 + KEY[1] / width], [y, y], color=color, linewidth=2, transform=axes.transAxes, clip_on=False)
    axes.text(1 + KEY[2] / width, y, text, size=7, va="center", color=FAINT, transform=axes.transAxes)


def _mark_peak(axes: Axes, timeline: Timeline, time: float, ranks: Sequence[int], size: int) -> None:
    """Mark the peak of all ranks where it is first reached, and name the ranks that reach it."""
    peak = timeline.peak_memory
    axes.axhline(peak / size, color=PEAK, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
    axes.plot([time], [peak / size], marker="o", markersize=5, color=PEAK, markeredgecolor="white", zorder=5)
    in_left_half = time < timeline.end / 2
    exactly = "" if timeline.in_seconds else f" ({peak:,})"
    axes.annotate(
        f"peak {memory_text(timeline, peak)}{exactly} on {ranks_text(sorted(ranks))}",
        (time, peak / size),
        (6 if in_left_half else -6, 5),
        textcoords="offset points",
        ha="left" if in_left_half else "right",
        color=PEAK,
        weight="bold",
    )

"""Legend of a timeline: what its looks mean, in rows above it."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter

from shardlab.common.text import bytes_text, unit_of
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
    fitting,
    ink_on,
)
from shardlab.draw.rows import UNFOLDED, Detail, Row, Span, detail_of, ranks_text, row_name, spaced, tracks
from shardlab.language import OpKind
from shardlab.language.ops import COMMUNICATION, POINT_TO_POINT, Stream
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.run import moments_of

SIZE = 8.0

ROW = 0.24

SWATCH = (0.26, 0.15)

NAMED_LAYERS = 12
"""Layers up to which each gets a numbered swatch."""

USUAL = sorted(OpKind, key=lambda kind: (kind is not OpKind.FORWARD, kind is not OpKind.LOSS))
"""Ops as they are usually met: as in their table, but the loss, which ends the forward passes, after these."""

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

NAMED_CURVES = 8
"""Different curves up to which each is named beside the panel."""

KEY = (10.0, 24.0, 29.0)
"""Points beside the panel at which a line of its key begins and ends, and its text begins."""

SEEN = 1.0
"""Points: what is closer in time is one step to the eye."""

Curve = tuple[tuple[float, int], ...]
"""Times and the elements live from then on."""


class Item(NamedTuple):
    """A word, and what draws its swatch into a box."""

    text: str
    paint: Callable[[Page, Box], None]
    width: float = SWATCH[0]


def legend_items(panels: Sequence[Panel], numbered: bool) -> list[Item]:
    """List what occurs in these panels, in the usual order; `numbered` if boxes name their microbatches."""
    looks = panels[0].looks
    drawn = {event.kind for panel in panels for row in panel.rows for event in row.events if _is_drawn(event)}
    seen = [kind for kind in USUAL if kind in drawn]
    other = [kind for kind in seen if kind not in COMMUNICATION and COLORS.get(kind.row.color) == OTHER]
    compute = [kind for kind in seen if kind not in COMMUNICATION and kind not in other]
    items = [Item(kind.row.legend, _usual(looks, kind)) for kind in compute]
    if other:
        items.append(Item(", ".join(sorted(kind.row.legend for kind in other)), _swatch(Paint(OTHER))))
    for row in [kind.row for kind in seen if kind in COMMUNICATION]:
        items.append(Item(row.legend, _swatch(Paint(COLORS[row.color]), row.letters)))
    items += _places(looks)
    if any(panel.detail is not Detail.OPS for panel in panels):
        items.append(Item("height: share of the time", _share))
    return [*items, Item(f"microbatches{_whose(panels[0])}", _number)] if numbered else items


def flow(items: list[Item], width: float) -> list[list[Item]]:
    """The items in rows no wider than the page."""
    rows: list[list[Item]] = [[]]
    used = 0.0
    for item in items:
        needed = _width(item)
        if used + needed > width and rows[-1]:
            rows.append([])
            used = 0.0
        rows[-1].append(item)
        used += needed
    return rows


def draw_legend(page: Page, rows: list[list[Item]], left: float, top: float) -> None:
    """Lay out the rows from a place on the page."""
    for number, row in enumerate(rows):
        x, middle = left, top + (number + 0.5) * ROW
        for item in row:
            box = (x, middle - SWATCH[1] / 2, x + item.width, middle + SWATCH[1] / 2)
            item.paint(page, box)
            page.ink.text(box[2] + 0.06, middle, item.text, size=SIZE, color=FAINT, va="center_baseline")
            x += _width(item)


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


def stripes(paint: Paint, box: Box) -> Iterator[tuple[str, Box]]:
    """The stripes along a box's edges, each with its colour."""
    left, top, right, bottom = box
    width = STRIPE * (bottom - top)
    if paint.top:
        yield paint.top, (left, top, right, top + width)
    if paint.bottom:
        yield paint.bottom, (left, bottom - width, right, bottom)


def messages(timeline: Timeline) -> Iterator[tuple[Event, Event]]:
    """Pair every send with its receive; one whose sender is not in the timeline is left out."""
    events = {(event.rank, event.op): event for row in timeline.events for event in row if event.kind in POINT_TO_POINT}
    for communication in timeline.communications:
        if communication.stream is Stream.MESSAGE:
            sent, received = (events.get((row, at)) for row, _, at in communication.participants)
            if sent is not None and received is not None:
                yield sent, received


def draw_memory(axes: Axes, timeline: Timeline, rows: Sequence[Row], width: float) -> None:
    """A step for every event; rows whose memory is the same share one curve, and of many rows some are drawn.

    Args:
        width: of the panel, in points.
    """
    peak = timeline.peak_memory
    peaks = [row for row in rows if timeline.peak_memory_by_rank[row.row] == peak]
    drawn = rows if len(rows) <= UNFOLDED else sorted({row.row: row for row in (*spaced(rows, 5), peaks[0])}.values())
    rows_of: dict[Curve, list[Row]] = {}
    for row in drawn:
        rows_of.setdefault(curve(timeline, row.row), []).append(row)
    size = unit_of(peak)[1] if timeline.in_seconds else 1
    axes.set_ylim(0, max(1.0, peak * 1.22) / size)
    width_of_line = 1.6 if len(rows_of) <= NAMED_CURVES else 0.9
    for place, steps in enumerate(rows_of):
        color = _color(place, len(rows_of))
        times, live = zip(*_fewer(steps, timeline.end / width), (timeline.end, steps[-1][1]), strict=True)
        heights = [each / size for each in live]
        axes.step(times, heights, where="post", color=color, linewidth=width_of_line, solid_joinstyle="miter")
    _write_key(axes, timeline, list(rows_of.values()), width)
    if len(drawn) < len(rows):
        text = f"{len(drawn)} of {len(rows)} rows"
        axes.text(1 + KEY[0] / width, 1.04, text, size=7, color=FAINT, transform=axes.transAxes)
    first = min(_when_highest(steps) for steps, same in rows_of.items() if any(row in peaks for row in same))
    _mark_peak(axes, timeline, first, [rank for row in peaks for rank in row.ranks], size)
    if not timeline.in_seconds:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylabel(f"live memory ({unit_of(peak)[0]})" if timeline.in_seconds else "live elements")


def key_width(rows: Sequence[Row]) -> float:
    """Inches beside the panel that its key needs."""
    return (KEY[2] + 4.4 * (max(len(ranks_text(row.ranks)) for row in rows) + len(": 74.99 GiB  "))) / 72


def curve(timeline: Timeline, rank: int) -> Curve:
    """Memory in tape order: compute counts from its start, a communication from its issue, which may be earlier."""
    times = moments_of(timeline, rank)
    return _rising([(times[event.op], event.memory) for event in timeline.events[rank]]) or ((0.0, 0),)


def memory_text(timeline: Timeline, amount: int, *, unit: bool = True) -> str:
    """`3.41 M elements`, or in seconds `75.11 GiB`; of elements the word is left out without `unit`."""
    if timeline.in_seconds:
        return bytes_text(amount)
    return short(amount) + " elements" * unit


def short(elements: int) -> str:
    """`3407872` as `3.41 M`."""
    digits = len(str(elements)) % 3 or 3
    return EngFormatter(places=None if elements < 1000 else 3 - digits, sep=" ").format_eng(elements).strip()


def _whose(panel: Panel) -> str:
    """Name the rank whose microbatches are shown, if folded ranks share out the batch: each has others."""
    mesh = panel.timeline.program.mesh
    shared = mesh.dp_replicate * mesh.dp_shard * mesh.ep > 1
    return " of a row's first rank" if shared and mesh.world > panel.timeline.program.ranks else ""


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


def _usual(looks: Looks, kind: OpKind) -> Callable[[Page, Box], None]:
    """A box as it is usually met: of the first chunk, or of a layer in the middle."""
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
    """Explain what a colour's lightness tells, or the layers' colours."""
    if looks.by == "pass" and looks.chunks:
        of, what = looks.chunks, "model chunk of the rank"
    else:
        of, what = looks.layers, "layer"
    if of == 1:
        return []
    return [_ramp([looks.compute_paint(OpKind.FORWARD, place).color for place in range(of)], what)]


def _ramp(colors: list[str], what: str) -> Item:
    """Numbered swatches for a few, a ramp for many."""
    named = len(colors) <= NAMED_LAYERS
    each = 0.19 if named else 1.6 / len(colors)

    def paint(page: Page, box: Box) -> None:
        left, top, _, bottom = box
        for place, color in enumerate(colors):
            each_box = (left + place * each, top, left + (place + 1) * each, bottom)
            fill(page.ink, [each_box], color)
            if named:
                _center(page, each_box, str(place), ink_on(color))

    return Item(what if named else f"{what}s 0-{len(colors) - 1}", paint, len(colors) * each)


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


def _write_key(axes: Axes, timeline: Timeline, groups: list[list[Row]], width: float) -> None:
    """Name the curves beside the panel; of many the first, the middle and the last."""
    named = range(len(groups)) if len(groups) <= NAMED_CURVES else (0, len(groups) // 2, len(groups) - 1)
    for place, number in enumerate(named):
        ranks = ranks_text(sorted(rank for row in groups[number] for rank in row.ranks))
        top = memory_text(timeline, timeline.peak_memory_by_rank[groups[number][0].row], unit=False)
        _name(axes, place, width, _color(number, len(groups)), f"{ranks}: {top}")


def _when_highest(steps: Curve) -> float:
    return max(steps, key=lambda step: step[1])[0]


def _fewer(steps: Curve, apart: float) -> Curve:
    """A curve without what cannot be seen: of all steps in one such time the highest and the last."""
    if len(steps) * apart <= 2 * (steps[-1][0] or 1.0) * SEEN:
        return steps
    kept: list[tuple[float, int]] = []
    for time, live in steps:
        if len(kept) >= 2 and time - kept[-2][0] < apart * SEEN:
            if live >= kept[-2][1]:
                kept[-2:] = [(kept[-2][0], live), (time, live)]
            else:
                kept[-1] = (time, live)
        else:
            kept.append((time, live))
    return tuple(kept)


def _rising(moments: list[tuple[float, int]]) -> Curve:
    """Keep of each moment the last value, and any that is higher than all that follows."""
    steps: list[tuple[float, int]] = []
    for time, live in reversed(moments):
        if not steps or steps[-1][0] > time or live > steps[-1][1]:
            steps.append((time, live))
    return tuple(reversed(steps))


def _color(place: int, count: int) -> str:
    return to_hex(mpl.colormaps["Blues"](0.35 + 0.6 * (place / (count - 1) if count > 1 else 0.75)))


def _name(axes: Axes, place: int, width: float, color: str, text: str) -> None:
    """A line of the key beside the panel, which has such a width in points."""
    x, y = 1 + KEY[0] / width, 0.95 - 0.125 * place
    axes.plot([x, 1 + KEY[1] / width], [y, y], color=color, linewidth=2, transform=axes.transAxes, clip_on=False)
    axes.text(1 + KEY[2] / width, y, text, size=7, va="center", color=FAINT, transform=axes.transAxes)


def _mark_peak(axes: Axes, timeline: Timeline, time: float, ranks: Sequence[int], size: int) -> None:
    """The largest of all, where it is first reached, with the ranks that reach it."""
    peak = timeline.peak_memory
    axes.axhline(peak / size, color=PEAK, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
    axes.plot([time], [peak / size], marker="o", markersize=5, color=PEAK, markeredgecolor="white", zorder=5)
    left = time < timeline.end / 2
    exactly = "" if timeline.in_seconds else f" ({peak:,})"
    axes.annotate(
        f"peak {memory_text(timeline, peak)}{exactly} on {ranks_text(sorted(ranks))}",
        (time, peak / size),
        (6 if left else -6, 5),
        textcoords="offset points",
        ha="left" if left else "right",
        color=PEAK,
        weight="bold",
    )

"""The lower panel of a timeline: live memory of every rank, with the peak marked."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import EngFormatter

from shardlab.draw.canvas import FAINT
from shardlab.draw.palette import PEAK
from shardlab.draw.rows import UNFOLDED, Row, ranks_text, spaced
from shardlab.timeline import Timeline
from shardlab.timeline.counters import moments_of
from shardlab.timeline.units import bytes_text, unit_of

NAMED_CURVES = 8
"""Different curves up to which each is named beside the panel."""

KEY = (10.0, 24.0, 29.0)
"""Points beside the panel at which a line of its key begins and ends, and its text begins."""

SEEN = 1.0
"""Points: what is closer in time is one step to the eye."""

Curve = tuple[tuple[float, int], ...]
"""Times and the elements live from then on."""


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


def key_width(rows: Sequence[Row]) -> float:
    """Inches beside the panel that its key needs."""
    return (KEY[2] + 4.4 * (max(len(ranks_text(row.ranks)) for row in rows) + len(": 74.99 GiB  "))) / 72


def curve(timeline: Timeline, rank: int) -> Curve:
    """Memory in tape order: compute counts from its start, a communication from its issue, which may be earlier."""
    times = moments_of(timeline, rank)
    return _rising([(times[event.op], event.memory) for event in timeline.events[rank]]) or ((0.0, 0),)


def _rising(moments: list[tuple[float, int]]) -> Curve:
    """Keep of each moment the last value, and any that is higher than all that follows."""
    steps: list[tuple[float, int]] = []
    for time, live in reversed(moments):
        if not steps or steps[-1][0] > time or live > steps[-1][1]:
            steps.append((time, live))
    return tuple(reversed(steps))


def memory_text(timeline: Timeline, amount: int, *, unit: bool = True) -> str:
    """`3.41 M elements`, or in seconds `75.11 GiB`; of elements the word is left out without `unit`."""
    if timeline.in_seconds:
        return bytes_text(amount)
    return short(amount) + " elements" * unit


def short(elements: int) -> str:
    """`3407872` as `3.41 M`."""
    digits = len(str(elements)) % 3 or 3
    return EngFormatter(places=None if elements < 1000 else 3 - digits, sep=" ").format_eng(elements).strip()


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

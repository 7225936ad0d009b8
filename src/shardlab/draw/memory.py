"""The lower panel of a timeline: live memory of every rank, with the peak marked."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.ticker import EngFormatter

from shardlab.draw.canvas import FAINT
from shardlab.draw.palette import PEAK
from shardlab.rules.pieces import listed
from shardlab.simulate import Timeline
from shardlab.simulate.counters import moments_of

NAMED_CURVES = 8
"""Up to so many different curves are named beside the panel."""

Curve = tuple[tuple[float, int], ...]
"""Times and the elements live from then on."""


def draw_memory(axes: Axes, timeline: Timeline) -> None:
    """A step for every event; ranks whose memory is the same share one curve."""
    ranks_of: dict[Curve, list[int]] = {}
    for rank in range(timeline.program.ranks):
        ranks_of.setdefault(curve(timeline, rank), []).append(rank)
    peak = timeline.peak_memory
    axes.set_ylim(0, max(1.0, peak * 1.22))
    for place, (steps, ranks) in enumerate(ranks_of.items()):
        color = _color(place, len(ranks_of))
        times, elements = zip(*steps, (timeline.end, steps[-1][1]), strict=True)
        width = 1.6 if len(ranks_of) <= NAMED_CURVES else 0.9
        axes.step(times, elements, where="post", color=color, linewidth=width, solid_joinstyle="miter")
        if len(ranks_of) <= NAMED_CURVES:
            top = max(live for _, live in steps)
            _name(axes, place, color, f"{ranks_text(ranks)}: {short(top)}")
    if len(ranks_of) > NAMED_CURVES:
        for place, rank in ((0, 0), (1, timeline.program.ranks // 2), (2, timeline.program.ranks - 1)):
            _name(axes, place, _color(rank, timeline.program.ranks), f"rank {rank}")
    _mark_peak(axes, ranks_of, peak, timeline)
    axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.set_ylabel(f"live {memory_unit(timeline)}")


def curve(timeline: Timeline, rank: int) -> Curve:
    """Memory in tape order: compute counts from its start, a communication from its issue, which may be earlier."""
    times = moments_of(timeline, rank)
    return _rising([(times[event.op], event.memory) for event in timeline.events[rank]]) or ((0.0, 0),)


def _rising(moments: list[tuple[float, int]]) -> Curve:
    """Of what happens at one moment only the last is kept, and what is higher than all that follows."""
    steps: list[tuple[float, int]] = []
    for time, live in reversed(moments):
        if not steps or steps[-1][0] > time or live > steps[-1][1]:
            steps.append((time, live))
    return tuple(reversed(steps))


def ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def memory_unit(timeline: Timeline) -> str:
    return "bytes" if timeline.in_seconds else "elements"


def short(elements: int) -> str:
    """`3407872` as `3.41 M`."""
    digits = len(str(elements)) % 3 or 3
    return EngFormatter(places=None if elements < 1000 else 3 - digits, sep=" ").format_eng(elements).strip()


def _color(place: int, count: int) -> str:
    return to_hex(mpl.colormaps["Blues"](0.35 + 0.6 * (place / (count - 1) if count > 1 else 0.75)))


def _name(axes: Axes, place: int, color: str, text: str) -> None:
    """A line of the key beside the panel."""
    y = 0.95 - 0.125 * place
    axes.plot([1.012, 1.03], [y, y], color=color, linewidth=2, transform=axes.transAxes, clip_on=False)
    axes.text(1.037, y, text, size=7, va="center", color=FAINT, transform=axes.transAxes)


def _mark_peak(axes: Axes, ranks_of: dict[Curve, list[int]], peak: int, timeline: Timeline) -> None:
    ranks = sorted(
        rank for steps, group in ranks_of.items() if max(live for _, live in steps) == peak for rank in group
    )
    time = min(time for steps in ranks_of for time, live in steps if live == peak)
    axes.axhline(peak, color=PEAK, linewidth=0.8, linestyle=(0, (3, 3)), zorder=1)
    axes.plot([time], [peak], marker="o", markersize=5, color=PEAK, markeredgecolor="white", zorder=5)
    left = time < timeline.end / 2
    axes.annotate(
        f"peak {short(peak)} {memory_unit(timeline)} ({peak:,}) on {ranks_text(ranks)}",
        (time, peak),
        (6 if left else -6, 5),
        textcoords="offset points",
        ha="left" if left else "right",
        color=PEAK,
        weight="bold",
    )

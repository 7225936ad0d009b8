"""A close-up of a few rows in the middle of a step, where its whole shows no single microbatch."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from statistics import median

from matplotlib.axes import Axes

from shardlab.draw.canvas import FAINT, Page
from shardlab.draw.lanes import Panel, draw_lanes
from shardlab.draw.rows import spaced
from shardlab.draw.spans import Detail, passes
from shardlab.program import OpKind

ROWS = 8
ROW = 0.36
HEADING, FOOT = 0.3, 0.5
"""Inches above and below the rows."""

PASS = 22.0
"""Points of the usual forward pass."""


def close_up_of(panel: Panel, width: float) -> Panel | None:
    """A panel of the same width (inches) between the last rank's first backward pass and the first one's last forward
    pass, when a pipeline runs steadily; None if the whole shows single microbatches."""
    if panel.detail is not Detail.SHARES:
        return None
    forwards = [s.end - s.start for row in panel.rows for kind, s in passes(row, panel.looks) if kind is OpKind.FORWARD]
    last = [max((e.start for e in row.events if e.kind is OpKind.FORWARD), default=0.0) for row in panel.rows]
    first = [min((e.start for e in row.events if "backward" in e.kind.value), default=panel.end) for row in panel.rows]
    middle = (min(last) + max(first)) / 2 if max(first) < min(last) else panel.end / 2
    half = min(panel.end, width * 72 / PASS * median(forwards)) / 2
    start = max(0.0, min(panel.end - 2 * half, middle - half))
    rows = spaced(panel.rows, ROWS)
    return Panel.of(panel.timeline, rows, panel.looks, (start, start + 2 * half), (width, ROW))


def close_up_height(panel: Panel) -> float:
    """Inches."""
    return HEADING + ROW * len(panel.rows) + FOOT


def draw_close_up(page: Page, whole: Axes, panel: Panel, box: tuple[float, float, float], time_unit: str) -> bool:
    """Draw it below a place of the page (left, top and right, in inches), and mark it in the panel of the whole step.
    Whether any microbatch is named is returned."""
    left, top, right = box
    rows = "" if len(panel.rows) == len(whole.get_yticks()) else f", {len(panel.rows)} of the rows"
    heading = f"Close-up of the time from {panel.start:.4g} to {panel.end:.4g}{rows}"
    page.ink.text(left, top + HEADING / 2, heading, size=9, weight="bold", va="center")
    axes = page.panel((left, top + HEADING, right, top + HEADING + ROW * len(panel.rows)))
    named = draw_lanes(page, axes, panel)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(time_unit)
    for moment in (panel.start, panel.end):
        whole.axvline(moment, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
    return named

"""Pages with the timeline of one step, or of several steps on a common time axis.

`timeline_svg` draws one step. From top to bottom, its page has a header with the sizes and figures, the legend, a row
for each rank, and the memory. If the rows are too coarse to show single microbatches, a close-up of the middle of the
step follows. `comparison_svg` draws several steps below each other, such as a prediction and a measurement, or a step
before and after each pass.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes

from shardlab.common.files import write_atomically
from shardlab.common.text import counted, seconds_text
from shardlab.draw.canvas import FAINT, Looks, Page, model_layer_count, style
from shardlab.draw.panels import (
    ROW,
    Panel,
    draw_lanes,
    draw_legend,
    draw_memory,
    flow,
    key_width,
    legend_items,
    memory_text,
)
from shardlab.draw.rows import MOST_ROWS, Detail, Row, passes, ranks_text, row_name, rows_of, sample_rows
from shardlab.language import OpKind
from shardlab.language.ops import ColorBy
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import stands_for

UNIT_TIME = "time (1 = forward of one microbatch through one layer)"

MEMORY = 1.7
"""Height of the memory panel in inches."""

RIGHT = 1.3
"""Smallest right margin in inches. It contains the key of the memory curves."""

MARGIN, HEADER = 0.2, 0.62
"""Margin around a picture, and height of its header, in inches."""

CLOSEUP_ROWS, CLOSEUP_ROW = 8, 0.36
"""Largest number of rows of a close-up, and their height in inches."""

HEADING, FOOT = 0.3, 0.5
"""Space above and below the rows of a close-up, in inches."""

CLOSEUP_PASS = 22.0
"""Width of the median forward pass in a close-up, in points."""

COMPARISON_RIGHT, PLOT, COMPARISON_HEADING = 0.3, 12.0, 0.3
"""Right margin, width of the panels, and height of the heading of each timeline in a comparison, in inches."""

FEWEST_ROWS = 16
"""Number of rows that a timeline of a comparison may have even if there are many timelines."""

MILLISECONDS = "milliseconds since the first rank began"


def save_timeline(
    timeline: Timeline, path: Path | str, title: str = "", time_unit: str = UNIT_TIME, color_by: ColorBy = "pass"
) -> None:
    """Write the picture of `timeline_svg` to a file atomically."""
    write_atomically(Path(path), timeline_svg(timeline, title, time_unit, color_by))


def timeline_svg(timeline: Timeline, title: str = "", time_unit: str = UNIT_TIME, color_by: ColorBy = "pass") -> str:
    """Draw a step as an SVG document: the ops of each rank over time, and its live memory.

    Args:
        title: title of the picture, such as the name of the strategy.
        time_unit: label of the time axis. Seconds replace the default if the timeline is in seconds.
        color_by: meaning of a box's colour. "pass": the pass (forward, backward, input or weight gradient), in a
            lightness that shows the layer or, in a pipeline, the model chunk (stage of the rank). "layer": the layer.
    """
    if timeline.in_seconds and time_unit == UNIT_TIME:
        time_unit = "time (seconds)"
    with style():
        return _page(timeline, title, time_unit, color_by).svg()


def save_comparison(
    timelines: Mapping[str, Timeline],
    path: Path,
    title: str,
    color_by: ColorBy = "pass",
    time_unit: str = MILLISECONDS,
) -> None:
    """Write the picture of `comparison_svg` to a file atomically."""
    write_atomically(path, comparison_svg(timelines, title, color_by, time_unit))


def comparison_svg(
    timelines: Mapping[str, Timeline], title: str, color_by: ColorBy = "pass", time_unit: str = MILLISECONDS
) -> str:
    """Draw timelines below each other on a common time axis, as an SVG document.

    Args:
        timelines: timelines by name. With the default `time_unit`, they must be in seconds, and are drawn in
            milliseconds.
        time_unit: label of the time axis.
    """
    with style():
        if time_unit == MILLISECONDS:
            timelines = {name: _in_milliseconds(timeline) for name, timeline in timelines.items()}
        return _comparison_page(timelines, title, color_by, time_unit).svg()


def left_of(timeline: Timeline, rows: Sequence[Row]) -> float:
    """Return the width in inches of the row names to the left of the panels."""
    longest = max(len(row_name(timeline.program, row)) for row in rows)
    return MARGIN + 0.1 + max(0.5, 0.064 * longest)


def draw_header(page: Page, title: str, facts: list[str]) -> None:
    """Write the title of a page, and below it some facts in one line."""
    page.ink.text(MARGIN, 0.25, title, size=13, weight="bold", va="center")
    page.ink.text(MARGIN, 0.48, "  ·  ".join(facts), size=8.5, color=FAINT, va="center")


def summary(timeline: Timeline, rows: int, drawn_rows: int) -> list[str]:
    """Return the sizes and figures of a step for the header of a page.

    Args:
        rows: number of rows if ranks that do the same share a row.
        drawn_rows: number of rows in the picture.
    """
    program, mesh = timeline.program, timeline.program.mesh
    grid = f" ({mesh})" if len(mesh.used) > 1 else ""
    peak = [
        rank
        for row, live in enumerate(timeline.peak_memory_by_rank)
        if live == timeline.peak_memory
        for rank in stands_for(program, row)
    ]
    return [
        counted(mesh.world, "rank") + grid + _folded_text(mesh.world, rows, drawn_rows),
        counted(model_layer_count(program.sizes), "layer"),
        counted(program.microbatches, "microbatch"),
        f"ends at {seconds_text(timeline.end) if timeline.in_seconds else f'{timeline.end:g}'}",
        f"peak {memory_text(timeline, timeline.peak_memory)} on {ranks_text(peak)}",
    ]


def close_up_of(panel: Panel, width: float) -> Panel | None:
    """Return a panel that shows the middle of a step, the steady state of a pipeline, in finer detail.

    In the steady state, each rank has begun its first backward pass, and has not begun its last forward pass. The panel
    is centred on this time or, if there is none, on the middle of the step.

    Args:
        width: width of both panels in inches.

    Returns:
        The panel, or None if the panel of the whole step already shows single microbatches.
    """
    if panel.detail is not Detail.SHARES:
        return None
    forwards = [s.end - s.start for row in panel.rows for kind, s in passes(row, panel.looks) if kind is OpKind.FORWARD]
    last = [max((e.start for e in row.events if e.kind is OpKind.FORWARD), default=0.0) for row in panel.rows]
    first = [min((e.start for e in row.events if "backward" in e.kind.value), default=panel.end) for row in panel.rows]
    middle = (min(last) + max(first)) / 2 if max(first) < min(last) else panel.end / 2
    half = min(panel.end, width * 72 / CLOSEUP_PASS * median(forwards)) / 2
    start = max(0.0, min(panel.end - 2 * half, middle - half))
    rows = sample_rows(panel.rows, CLOSEUP_ROWS)
    return Panel.of(panel.timeline, rows, panel.looks, (start, start + 2 * half), (width, CLOSEUP_ROW))


def close_up_height(panel: Panel) -> float:
    """Return the height of a close-up in inches, with its heading and axis."""
    return HEADING + CLOSEUP_ROW * len(panel.rows) + FOOT


def draw_close_up(page: Page, whole: Axes, panel: Panel, box: tuple[float, float, float], time_unit: str) -> bool:
    """Draw a close-up, and mark its time window in the panel of the whole step.

    Args:
        whole: axes of the whole step.
        box: left, top and right of the close-up on the page, in inches.

    Returns:
        Whether any box is labelled with its microbatch number.
    """
    left, top, right = box
    rows = "" if len(panel.rows) == len(whole.get_yticks()) else f", {len(panel.rows)} of the rows"
    heading = f"Close-up of the time from {panel.start:.4g} to {panel.end:.4g}{rows}"
    page.ink.text(left, top + HEADING / 2, heading, size=9, weight="bold", va="center")
    axes = page.panel((left, top + HEADING, right, top + HEADING + CLOSEUP_ROW * len(panel.rows)))
    has_numbers = draw_lanes(page, axes, panel)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel(time_unit)
    for moment in (panel.start, panel.end):
        whole.axvline(moment, color=FAINT, linewidth=0.9, linestyle=(0, (2, 2)))
    return has_numbers


def _page(timeline: Timeline, title: str, time_unit: str, color_by: ColorBy) -> Page:
    all_rows = rows_of(timeline)
    rows = sample_rows(all_rows, MOST_ROWS)
    left = left_of(timeline, rows)
    plot, height = _plot_width(timeline), max(0.165, min(0.52, 8 / len(rows)))
    right = max(RIGHT, key_width(all_rows))
    width = left + plot + right
    looks = Looks(timeline, color_by)
    panel = Panel.of(timeline, rows, looks, (0.0, timeline.end), (plot, height))
    close_up = close_up_of(panel, plot)
    panels = [panel, close_up] if close_up else [panel]
    legend = flow(legend_items(panels, numbered=True), width - 2 * MARGIN)
    top = HEADER + len(legend) * ROW + 0.08
    bottom = top + height * len(rows)
    close_up_top = bottom + 0.12 + MEMORY + 0.5
    page = Page(width, close_up_top + 0.05 + (close_up_height(close_up) if close_up else 0.0))

    draw_header(page, title or "One optimizer step", summary(timeline, len(all_rows), len(rows)))
    lanes = page.panel((left, top, left + plot, bottom))
    numbered = draw_lanes(page, lanes, panel)
    lanes.tick_params(axis="x", length=0, labelbottom=False)

    memory = page.panel((left, bottom + 0.12, left + plot, bottom + 0.12 + MEMORY))
    memory.set_xlim(0, timeline.end or 1.0)
    memory.spines[["top", "right"]].set_visible(False)
    memory.grid(color="#e4e8ec", linewidth=0.6)
    draw_memory(memory, timeline, all_rows, plot * 72)
    memory.set_xlabel(time_unit)
    if close_up:
        numbered |= draw_close_up(page, lanes, close_up, (left, close_up_top, left + plot), time_unit)
    draw_legend(page, flow(legend_items(panels, numbered), width - 2 * MARGIN), MARGIN, HEADER)
    return page


def _plot_width(timeline: Timeline) -> float:
    """Choose the width of the panels in inches so that, if possible, the label of the shortest pass fits."""
    passes = [e.end - e.start for events in timeline.events for e in events if e.kind.row.part_of and e.end > e.start]
    return max(8.0, min(15.0, 0.16 * timeline.end / min(passes))) if passes else 8.0


def _folded_text(ranks: int, rows: int, drawn_rows: int) -> str:
    """Return a note about rows that represent several ranks, and about rows that are not drawn."""
    if rows == 1 < ranks:
        return " in one row, all alike"
    row_note = f" in {rows} rows, alike ones together" if rows < ranks else ""
    return row_note + (f", {drawn_rows} {'rows' if row_note else 'of them'} drawn" if drawn_rows < rows else "")


def _comparison_page(timelines: Mapping[str, Timeline], title: str, color_by: ColorBy, time_unit: str) -> Page:
    end = max(timeline.end for timeline in timelines.values()) or 1.0
    first = next(iter(timelines.values()))
    max_rows = MOST_ROWS if len(timelines) <= 2 else max(FEWEST_ROWS, 2 * MOST_ROWS // len(timelines))
    rows = {name: sample_rows(rows_of(timeline, fold=False), max_rows) for name, timeline in timelines.items()}
    count = max(map(len, rows.values()))
    left = left_of(first, rows_of(first, fold=False))
    row = max(0.165, min(0.52, 12 / count / max(2, len(timelines))))
    panels = {
        name: Panel.of(timeline, rows[name], Looks(timeline, color_by), (0.0, end), (PLOT, row))
        for name, timeline in timelines.items()
    }
    width = left + PLOT + COMPARISON_RIGHT - 2 * MARGIN
    top = HEADER + len(flow(legend_items([*panels.values()], numbered=True), width)) * ROW
    height = COMPARISON_HEADING + row * count
    page = Page(left + PLOT + COMPARISON_RIGHT, top + len(timelines) * height + 0.5)
    unit = " ms" if time_unit == MILLISECONDS else ""
    draw_header(page, title, [f"{name} {timeline.end:.4g}{unit}" for name, timeline in timelines.items()])
    numbered = False
    for place, (name, panel) in enumerate(panels.items()):
        bottom = top + (place + 1) * height
        page.ink.text(left, bottom - row * count - 0.1, name, size=9, weight="bold", va="center")
        lanes = page.panel((left, bottom - row * count, left + PLOT, bottom))
        numbered |= draw_lanes(page, lanes, panel)
        lanes.tick_params(axis="x", length=0, labelbottom=place == len(timelines) - 1)
        if place == len(timelines) - 1:
            lanes.set_xlabel(time_unit)
    draw_legend(page, flow(legend_items([*panels.values()], numbered), width), MARGIN, HEADER)
    return page


def _in_milliseconds(timeline: Timeline) -> Timeline:
    def scaled(event: Event) -> Event:
        return event._replace(start=1000 * event.start, end=1000 * event.end)

    return Timeline(timeline.program, [[scaled(event) for event in events] for events in timeline.events])

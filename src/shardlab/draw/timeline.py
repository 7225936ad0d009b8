"""A timeline as a picture: title, legend, a row for each rank, memory below, and of many microbatches a close-up."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from shardlab.draw.canvas import EM, Page, style
from shardlab.draw.closeup import close_up_height, close_up_of, draw_close_up
from shardlab.draw.header import HEADER, MARGIN, draw_header, summary
from shardlab.draw.lanes import Panel, draw_lanes
from shardlab.draw.legend import ROW, draw_legend, flow, legend_items
from shardlab.draw.looks import Looks
from shardlab.draw.memory import draw_memory, key_width
from shardlab.draw.rows import MOST_ROWS, Row, row_name, rows_of, spaced
from shardlab.program.files import write_whole
from shardlab.program.picture import ColorBy
from shardlab.timeline import Timeline

UNIT_TIME = "time (1 = forward of one microbatch through one layer)"

NOTE_SIZE, NOTE_LINE = 9.0, 0.19
"""Points, and inches."""
MEMORY = 1.7
RIGHT = 1.3
"""Least margin on the right; the key of the memory curves stands there."""


def timeline_svg(
    timeline: Timeline, title: str = "", time_unit: str = UNIT_TIME, color_by: ColorBy = "pass", note: str = ""
) -> str:
    """Draw what happened when, and how much memory was live, as an SVG document.

    Args:
        title: what the picture is of, such as the strategy's name.
        time_unit: how the time axis is labelled.
        color_by: whether a box's colour tells which pass it is (forward, backward, input or weight gradient), with the
            model chunk or the layer by lightness, or which layer.
        note: what is said below the figures.
    """
    with style():
        return _page(timeline, title, time_unit, color_by, note).svg()


def save_timeline(
    timeline: Timeline, path: Path | str, title: str = "", time_unit: str = UNIT_TIME, color_by: ColorBy = "pass"
) -> None:
    """Write the picture of `timeline_svg` to a file; it appears whole or not at all."""
    write_whole(Path(path), timeline_svg(timeline, title, time_unit, color_by))


def _page(timeline: Timeline, title: str, time_unit: str, color_by: ColorBy, note: str) -> Page:
    all_rows = rows_of(timeline)
    rows = spaced(all_rows, MOST_ROWS)
    left = left_of(timeline, rows)
    plot, height = _plot_width(timeline), max(0.165, min(0.52, 8 / len(rows)))
    right = max(RIGHT, key_width(all_rows))
    width = left + plot + right
    looks = Looks(timeline, color_by)
    panel = Panel.of(timeline, rows, looks, (0.0, timeline.end), (plot, height))
    close_up = close_up_of(panel, plot)
    panels = [panel, close_up] if close_up else [panel]
    legend = flow(legend_items(panels, numbered=True), width - 2 * MARGIN)
    lines = wrap(note, int((width - 2 * MARGIN) * 72 / (NOTE_SIZE * EM)))
    header = HEADER + len(lines) * NOTE_LINE
    top = header + len(legend) * ROW + 0.08
    bottom = top + height * len(rows)
    below = bottom + 0.12 + MEMORY + 0.5
    page = Page(width, below + 0.05 + (close_up_height(close_up) if close_up else 0.0))

    draw_header(page, title or "One optimizer step", summary(timeline, len(all_rows), len(rows)))
    for at, line in enumerate(lines):
        page.ink.text(MARGIN, HEADER + at * NOTE_LINE + 0.06, line, size=NOTE_SIZE, va="center")
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
        numbered |= draw_close_up(page, lanes, close_up, (left, below, left + plot), time_unit)
    draw_legend(page, flow(legend_items(panels, numbered), width - 2 * MARGIN), MARGIN, header)
    return page


def left_of(timeline: Timeline, rows: Sequence[Row]) -> float:
    """Inches to the left of the panels, for the rows' names."""
    longest = max(len(row_name(timeline.program, row)) for row in rows)
    return MARGIN + 0.1 + max(0.5, 0.064 * longest)


def _plot_width(timeline: Timeline) -> float:
    """Inches: wide enough that the shortest pass can carry its label, within reason."""
    passes = [e.end - e.start for events in timeline.events for e in events if e.kind.row.part_of and e.end > e.start]
    return max(8.0, min(15.0, 0.16 * timeline.end / min(passes))) if passes else 8.0

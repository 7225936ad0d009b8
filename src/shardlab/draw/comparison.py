"""Timelines of one step, one above the other on one axis: predicted and measured, or before and after each pass."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardlab.draw.canvas import Page, style
from shardlab.draw.header import HEADER, MARGIN, draw_header
from shardlab.draw.lanes import Panel, draw_lanes
from shardlab.draw.legend import ROW, draw_legend, flow, legend_items
from shardlab.draw.looks import Looks
from shardlab.draw.rows import MOST_ROWS, rows_of, spaced
from shardlab.draw.timeline import left_of
from shardlab.program.files import write_whole
from shardlab.program.picture import ColorBy
from shardlab.timeline import Event, Timeline

RIGHT, PLOT, HEADING = 0.3, 12.0, 0.3
"""Inches."""

FEWEST_ROWS = 16
"""Rows that each of many timelines may have in any case."""


MILLISECONDS = "milliseconds since the first rank began"


def comparison_svg(
    timelines: Mapping[str, Timeline], title: str, color_by: ColorBy = "pass", time_unit: str = MILLISECONDS
) -> str:
    """Timelines in seconds, each under its name, as an SVG document with an axis in milliseconds.

    Args:
        time_unit: of timelines in another unit, how the axis is labelled.
    """
    with style():
        if time_unit == MILLISECONDS:
            timelines = {name: _in_milliseconds(timeline) for name, timeline in timelines.items()}
        return _page(timelines, title, color_by, time_unit).svg()


def save_comparison(
    timelines: Mapping[str, Timeline],
    path: Path,
    title: str,
    color_by: ColorBy = "pass",
    time_unit: str = MILLISECONDS,
) -> None:
    """Write the picture to a file; it appears whole or not at all."""
    write_whole(path, comparison_svg(timelines, title, color_by, time_unit))


def _page(timelines: Mapping[str, Timeline], title: str, color_by: ColorBy, time_unit: str) -> Page:
    end = max(timeline.end for timeline in timelines.values()) or 1.0
    first = next(iter(timelines.values()))
    most = MOST_ROWS if len(timelines) <= 2 else max(FEWEST_ROWS, 2 * MOST_ROWS // len(timelines))
    rows = {name: spaced(rows_of(timeline, fold=False), most) for name, timeline in timelines.items()}
    count = max(map(len, rows.values()))
    left = left_of(first, rows_of(first, fold=False))
    row = max(0.165, min(0.52, 12 / count / max(2, len(timelines))))
    panels = {
        name: Panel.of(timeline, rows[name], Looks(timeline, color_by), (0.0, end), (PLOT, row))
        for name, timeline in timelines.items()
    }
    width = left + PLOT + RIGHT - 2 * MARGIN
    top = HEADER + len(flow(legend_items([*panels.values()], numbered=True), width)) * ROW
    height = HEADING + row * count
    page = Page(left + PLOT + RIGHT, top + len(timelines) * height + 0.5)
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

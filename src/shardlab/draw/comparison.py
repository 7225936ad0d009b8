"""Two timelines of one program, one above the other on one axis: what was predicted, and what was measured."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from pathlib import Path

from shardlab.draw.canvas import FAINT, Page, style
from shardlab.draw.lanes import Scale, draw_lanes, label_of
from shardlab.draw.legend import ROW, draw_legend, flow, legend_items
from shardlab.draw.timeline import rank_name, write_whole
from shardlab.program import OpKind
from shardlab.simulate import Event, Timeline

MARGIN, RIGHT, PLOT = 0.2, 0.3, 12.0
"""Inches."""

HEADER, HEADING = 0.62, 0.3


def comparison_svg(timelines: dict[str, Timeline], title: str) -> str:
    """Timelines in seconds, each under its name, as an SVG document with an axis in milliseconds."""
    with style():
        return _page({name: _in_milliseconds(timeline) for name, timeline in timelines.items()}, title).svg()


def save_comparison(timelines: dict[str, Timeline], path: Path, title: str) -> None:
    """Write the picture to a file; it appears whole or not at all."""
    write_whole(path, comparison_svg(timelines, title))


def _page(timelines: dict[str, Timeline], title: str) -> Page:
    first = next(iter(timelines.values()))
    program, end = first.program, max(timeline.end for timeline in timelines.values()) or 1.0
    names = [rank_name(program, rank) for rank in range(program.ranks)]
    left = MARGIN + 0.1 + max(0.5, 0.064 * max(map(len, names)))
    row = max(0.165, min(0.52, 6 / program.ranks))
    scale = Scale(PLOT * 72 / end, row * 72)
    forwards = [e for e in first.events[0] if e.kind is OpKind.FORWARD]
    items = legend_items(first, any(label_of(first, event, scale) for event in forwards))
    rows = flow(items, left + PLOT + RIGHT - 2 * MARGIN)
    top = HEADER + len(rows) * ROW
    height = HEADING + row * program.ranks
    page = Page(left + PLOT + RIGHT, top + len(timelines) * height + 0.5)
    page.ink.text(MARGIN, 0.25, title, size=13, weight="bold", va="center")
    lengths = [f"{name} {timeline.end:.4g} ms" for name, timeline in timelines.items()]
    page.ink.text(MARGIN, 0.48, "  ·  ".join(lengths), size=8.5, color=FAINT, va="center")
    draw_legend(page, rows, MARGIN, HEADER)
    for place, (name, timeline) in enumerate(timelines.items()):
        bottom = top + (place + 1) * height
        page.ink.text(left, bottom - row * program.ranks - 0.1, name, size=9, weight="bold", va="center")
        lanes = page.panel((left, bottom - row * program.ranks, left + PLOT, bottom))
        lanes.set_xlim(0, end)
        lanes.set_ylim(program.ranks, 0)
        lanes.set_yticks([rank + 0.5 for rank in range(program.ranks)], names, size=min(8.0, 0.75 * row * 72))
        lanes.tick_params(length=0, labelbottom=place == len(timelines) - 1)
        lanes.spines[:].set_visible(False)
        lanes.set_axisbelow(True)
        lanes.grid(axis="x", color="#d8dee4", linewidth=0.6)
        draw_lanes(lanes, timeline, scale)
        if place == len(timelines) - 1:
            lanes.set_xlabel("milliseconds since the first rank began")
    return page


def _in_milliseconds(timeline: Timeline) -> Timeline:
    def scaled(event: Event) -> Event:
        return event._replace(start=1000 * event.start, end=1000 * event.end)

    return Timeline(timeline.program, [[scaled(event) for event in events] for events in timeline.events])

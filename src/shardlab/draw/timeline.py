"""A timeline as a picture: title, legend, a row for each rank, and memory below."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from pathlib import Path
from textwrap import wrap

from shardlab.draw.canvas import EM, FAINT, Page, style
from shardlab.draw.lanes import Scale, draw_lanes, label_of
from shardlab.draw.legend import ROW, draw_legend, flow, legend_items
from shardlab.draw.memory import draw_memory, memory_unit, ranks_text, short
from shardlab.program import OpKind, Program
from shardlab.program.files import whole_file
from shardlab.program.mesh import AXES
from shardlab.simulate import Timeline
from shardlab.simulate.traced import rank_of, stands_for

UNIT_TIME = "time (1 = forward of one microbatch through one layer)"

MARGIN, RIGHT = 0.2, 1.45
"""Inches; the key of the memory curves stands in the right one."""

HEADER = 0.62
NOTE_SIZE, NOTE_LINE = 9.0, 0.19
"""Points, and inches."""
MEMORY = 1.7


def timeline_svg(timeline: Timeline, title: str = "", time_unit: str = UNIT_TIME, note: str = "") -> str:
    """What happened when, and how much memory was live, as an SVG document.

    Args:
        title: what the picture is of, such as the strategy's name.
        time_unit: how the time axis is labelled.
        note: what is said below the figures.
    """
    with style():
        return timeline_page(timeline, title, time_unit, note).svg()


def save_timeline(timeline: Timeline, path: Path | str, title: str = "", time_unit: str = UNIT_TIME) -> None:
    """Write the picture to a file; it appears whole or not at all."""
    write_whole(Path(path), timeline_svg(timeline, title, time_unit))


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def timeline_page(timeline: Timeline, title: str, time_unit: str, note: str = "") -> Page:
    """The page, for whoever wants another format than SVG; call it within `style()`."""
    program = timeline.program
    names = [rank_name(program, rank) for rank in range(program.ranks)]
    left = MARGIN + 0.1 + max(0.5, 0.064 * max(map(len, names)))
    plot = _plot_width(timeline)
    end = timeline.end or 1.0
    row = max(0.165, min(0.52, 8 / program.ranks))
    scale = Scale(plot * 72 / end, row * 72)
    numbered = any(label_of(timeline, event, scale) for event in timeline.events[0] if event.kind is OpKind.FORWARD)
    width = left + plot + RIGHT - 2 * MARGIN
    rows = flow(legend_items(timeline, numbered), width)
    lines = wrap(note, int(width * 72 / (NOTE_SIZE * EM)))
    header = HEADER + len(lines) * NOTE_LINE
    top = header + len(rows) * ROW + 0.08
    bottom = top + row * program.ranks
    page = Page(left + plot + RIGHT, bottom + 0.12 + MEMORY + 0.55)

    page.ink.text(MARGIN, 0.25, title or "One optimizer step", size=13, weight="bold", va="center")
    page.ink.text(MARGIN, 0.48, summary(timeline), size=8.5, color=FAINT, va="center")
    for at, line in enumerate(lines):
        page.ink.text(MARGIN, HEADER + at * NOTE_LINE + 0.06, line, size=NOTE_SIZE, va="center")
    draw_legend(page, rows, MARGIN, header)

    lanes = page.panel((left, top, left + plot, bottom))
    lanes.set_xlim(0, end)
    lanes.set_ylim(program.ranks, 0)
    lanes.set_yticks([rank + 0.5 for rank in range(program.ranks)], names, size=min(8.0, 0.75 * row * 72))
    lanes.tick_params(length=0, labelbottom=False)
    lanes.spines[:].set_visible(False)
    lanes.set_axisbelow(True)
    lanes.grid(axis="x", color="#d8dee4", linewidth=0.6)
    draw_lanes(lanes, timeline, scale)

    memory = page.panel((left, bottom + 0.12, left + plot, bottom + 0.12 + MEMORY))
    memory.set_xlim(0, end)
    memory.spines[["top", "right"]].set_visible(False)
    memory.grid(color="#e4e8ec", linewidth=0.6)
    draw_memory(memory, timeline)
    memory.set_xlabel(time_unit)
    return page


def rank_name(program: Program, row: int) -> str:
    """`rank 5`, with its coordinates where the mesh has several axes; `ranks 0-7` for which a folded one stands."""
    rank, ranks = rank_of(program, row), stands_for(program, row)
    if len(ranks) > 1:
        stage = f"pp {program.mesh.coordinate(rank, 'pp')}, " if program.ranks > 1 else ""
        return f"ranks {ranks[0]}-{ranks[-1]} ({stage}all as rank {rank})"
    axes = [axis for axis in AXES if program.mesh.sizes()[axis] > 1]
    if len(axes) < 2:
        return f"rank {rank}"
    return f"rank {rank} (" + ", ".join(f"{axis} {program.mesh.coordinate(rank, axis)}" for axis in axes) + ")"


def summary(timeline: Timeline) -> str:
    """The figures of a step in one line."""
    program = timeline.program
    peak = [rank for rank, live in enumerate(timeline.peak_memory_by_rank) if live == timeline.peak_memory]
    counts = [(program.ranks, "rank"), (program.layers, "layer"), (program.microbatches, "microbatch")]
    plurals = {"microbatch": "microbatches"}
    parts = [f"{n} {what if n == 1 else plurals.get(what, what + 's')}" for n, what in counts]
    parts += [
        f"ends at {timeline.end:g}",
        f"peak {short(timeline.peak_memory)} {memory_unit(timeline)} on {ranks_text(peak)}",
    ]
    return "  ·  ".join(parts)


def _plot_width(timeline: Timeline) -> float:
    """Inches: wide enough that the shortest compute can carry its label, within reason."""
    kinds = (OpKind.FORWARD, OpKind.BACKWARD)
    shortest = min((e.end - e.start for events in timeline.events for e in events if e.kind in kinds), default=1.0)
    return max(8.0, min(15.0, 0.16 * timeline.end / shortest if shortest else 0))

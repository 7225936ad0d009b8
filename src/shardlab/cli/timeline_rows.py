"""A timeline in a terminal or a pipe: a row of signs for each rank, whole or in parts, with what the signs mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console
from rich.text import Text

from shardlab.cli.activity import Activity
from shardlab.cli.stretches import Steady, parts, steady_state, whole_stretches
from shardlab.cli.timeline_text import legend, rank_row
from shardlab.rules.pieces import counted
from shardlab.timeline import Timeline
from shardlab.timeline.units import moment_text

SHOWN_ROWS, SHOWN_RANKS = 20, 16
"""Rows and ranks that are shown at most, evenly spaced; fewer ranks where one takes several rows."""

WIDEST, NARROWEST = 120, 20
"""Characters of a row; a wider terminal is left empty on the right."""

MARGIN = 2
"""Characters that are left empty on the right of a terminal that is not wider."""


def print_timeline(
    console: Console,
    timeline: Timeline,
    number_of: Callable[[int], int],
    columns: Sequence[tuple[str, Sequence[str]]],
    label: int,
) -> None:
    """Print the rows of a timeline and their legend.

    Args:
        number_of: the rank whose tape stands in a row of the timeline.
        columns: what stands to the right of each rank's first row: a heading, and a text for each row of the timeline.
        label: characters of a rank's number.
    """
    end = timeline.end
    if not end:
        return
    right = sum(2 + len(heading) for heading, _ in columns)
    width = min(WIDEST, max(NARROWEST, console.width - label - 2 - right - MARGIN))
    ranks = [Activity(events, end) for events in timeline.events]
    every = -(-len(ranks) // SHOWN_RANKS)
    shown = whole_stretches(ranks[::every], end, width)
    note = ""
    if not shown:
        steady = steady_state(timeline.events[::every], end)
        shown = parts(ranks[::every], end, width, steady)
        note = _parts_text(timeline, steady)
    every = max(every, -(-len(ranks) * len(shown) // SHOWN_ROWS))
    rows: list[Text] = []
    for stretch in shown:
        ends = [_time_text(timeline, moment, stretch.end - stretch.start) for moment in stretch]
        headings = "".join(f"  {heading}" for heading, _ in columns) if not rows else ""
        between = " " * max(1, width - sum(map(len, ends)))
        console.print(Text(f"{'rank':>{label}}  {between.join(ends)}{headings}", "dim"), no_wrap=True)
        for row in range(0, len(ranks), every):
            cells = (f"  {texts[row]:>{len(heading)}}" for heading, texts in columns)
            signs = rank_row(ranks[row], *stretch, width)
            shares = "".join(cells) if stretch is shown[0] else ""
            console.print(Text(f"{number_of(row):>{label}}  ") + signs + Text(shares), no_wrap=True)
            rows.append(signs)
    console.print(legend(rows, ranks, console.width))
    if every > 1:
        note = f"{note} Of {counted(len(ranks), 'rank')} one in {every} is shown."
    if note:
        console.print(note.strip(), style="dim")


def _parts_text(timeline: Timeline, steady: Steady | None) -> str:
    """Name the stretches that are shown of a step too long to be shown whole."""
    text = "The beginning, the middle and the end of the step are shown"
    if steady is None:
        return f"{text}."
    every, since, until = (_time_text(timeline, moment, steady.every) for moment in steady)
    return f"{text}; from {since} to {until} it repeats itself every {every}."


def _time_text(timeline: Timeline, moment: float, length: float) -> str:
    """A moment, or a time, where so long a stretch is shown."""
    return moment_text(moment, timeline.end, length) if timeline.in_seconds else f"{moment:.6g}"

"""A step before the first pass and after each, one below the other on one axis of time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Console
from rich.text import Text

from shardlab.cli.activity import Activity
from shardlab.cli.console import stdout_console
from shardlab.cli.timeline_rows import MARGIN, NARROWEST, WIDEST
from shardlab.cli.timeline_text import legend, rank_row
from shardlab.timeline import Timeline
from shardlab.timeline.traced import rank_of

SHOWN = 4
"""Ranks of which each strip has a row at most, evenly spaced."""

LABEL = 4
"""Characters of a rank's number."""


def print_strips(
    timelines: Mapping[str, Timeline], time_text: Callable[[float], str], console: Console | None = None
) -> None:
    """Print a strip for each timeline, as long as its step, and what the signs mean; nothing if there are none."""
    end = max((timeline.end for timeline in timelines.values()), default=0.0)
    if not end:
        return
    console = console or stdout_console()
    width = min(WIDEST, max(NARROWEST, console.width - LABEL - 2 - MARGIN))
    rows: list[Text] = []
    all_ranks: list[Activity] = []
    for name, timeline in timelines.items():
        console.print(Text.assemble((f"{'':{LABEL}}  {name}", "bold"), (f"  ends at {time_text(timeline.end)}", "dim")))
        ranks = [Activity(events, timeline.end) for events in timeline.events]
        cells = max(1, round(width * timeline.end / end))
        for row in range(0, len(ranks), -(-len(ranks) // SHOWN)):
            rows.append(rank_row(ranks[row], 0.0, timeline.end, cells))
            number = rank_of(timeline.program, row)
            console.print(Text(f"{number:>{LABEL}}  ") + rows[-1], no_wrap=True)
        all_ranks += ranks
    console.print(legend(rows, all_ranks, console.width))
    console.print()

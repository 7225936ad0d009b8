"""The head of a picture: its title, and in one line what it is of and the step's figures, in the model's words."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from shardlab.draw.canvas import FAINT, Page
from shardlab.draw.chunks import model_layer_count
from shardlab.draw.memory import memory_text
from shardlab.draw.rows import ranks_text
from shardlab.rules.pieces import counted
from shardlab.timeline import Timeline
from shardlab.timeline.traced import stands_for
from shardlab.timeline.units import seconds_text

MARGIN, HEADER = 0.2, 0.62
"""Inches beside a picture, and above it where the header stands."""


def draw_header(page: Page, title: str, facts: list[str]) -> None:
    """Write a title, and below it what is to be known first."""
    page.ink.text(MARGIN, 0.25, title, size=13, weight="bold", va="center")
    page.ink.text(MARGIN, 0.48, "  ·  ".join(facts), size=8.5, color=FAINT, va="center")


def summary(timeline: Timeline, rows: int, drawn: int) -> list[str]:
    """Sizes and figures of a step.

    Args:
        rows: rows of unlike ranks.
        drawn: rows in the picture.
    """
    program, mesh = timeline.program, timeline.program.mesh
    ranks = [rank for row in range(program.ranks) for rank in stands_for(program, row)]
    grid = f" ({mesh})" if len(mesh.used) > 1 else ""
    peak = [
        rank
        for row, live in enumerate(timeline.peak_memory_by_rank)
        if live == timeline.peak_memory
        for rank in stands_for(program, row)
    ]
    return [
        counted(len(ranks), "rank") + grid + _folded(len(ranks), rows, drawn),
        counted(model_layer_count(program.sizes), "layer"),
        counted(program.microbatches, "microbatch"),
        f"ends at {seconds_text(timeline.end) if timeline.in_seconds else f'{timeline.end:g}'}",
        f"peak {memory_text(timeline, timeline.peak_memory)} on {ranks_text(peak)}",
    ]


def _folded(ranks: int, rows: int, drawn: int) -> str:
    """Say how the rows stand for the ranks, where they are fewer."""
    if rows == 1 < ranks:
        return " in one row, all alike"
    alike = f" in {rows} rows, alike ones together" if rows < ranks else ""
    return alike + (f", {drawn} {'rows' if alike else 'of them'} drawn" if drawn < rows else "")

"""The rows of a picture: which ranks each stands for, and what it is called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardlab.program import Program
from shardlab.rules.pieces import listed
from shardlab.timeline import Event, Timeline
from shardlab.timeline.traced import rank_of, stands_for

UNFOLDED = 16
"""Rows up to which each rank has its own, even where ranks do the same at the same time."""

MOST_ROWS = 64
"""Rows that are drawn at most, evenly spaced."""

LONGEST_NAME = 24
"""Characters of a list of ranks; a longer one is counted."""


class Row(NamedTuple):
    """A row of a picture.

    Attributes:
        row: of the timeline.
        ranks: all that it stands for.
        events: of its first rank, with the microbatches of all.
    """

    row: int
    ranks: list[int]
    events: Sequence[Event]


def rows_of(timeline: Timeline, *, fold: bool = True) -> list[Row]:
    """A row for each rank, or of many for those that do the same at the same time."""
    program = timeline.program
    rows = [Row(row, list(stands_for(program, row)), events) for row, events in enumerate(timeline.events)]
    if not fold or len(rows) <= UNFOLDED:
        return rows
    groups: dict[object, list[Row]] = {}
    for row in rows:
        does = tuple([(e.kind, e.layer, round(e.start, 9), round(e.end, 9), e.memory) for e in row.events])
        groups.setdefault(does, []).append(row)
    return [_joined(group) for group in groups.values()]


def _joined(group: list[Row]) -> Row:
    first, *others = group
    if not others:
        return first
    events: list[Event] = []
    for same in zip(*(row.events for row in group), strict=True):
        microbatches = 0
        for event in same:
            microbatches |= event.microbatches
        events.append(same[0]._replace(microbatches=microbatches))
    return Row(first.row, sorted(rank for row in group for rank in row.ranks), events)


def spaced(rows: Sequence[Row], most: int) -> list[Row]:
    """Evenly spaced rows, the first and the last among them."""
    if len(rows) <= most:
        return list(rows)
    return [rows[place * (len(rows) - 1) // (most - 1)] for place in range(most)]


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7`, or `ranks 0, 8, ... (8 alike)` of many that do not follow each other."""
    text = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
    return text if len(text) <= LONGEST_NAME else f"ranks {ranks[0]}, {ranks[1]}, ... ({len(ranks)} alike)"


def row_name(program: Program, row: Row) -> str:
    """The ranks of a row, with the coordinates that they share where the mesh has several axes."""
    return _named(row.ranks, _shared(program, row.ranks))


def rank_name(program: Program, row: int) -> str:
    """The name of a timeline's row: `rank 5`, or of folded ranks `ranks 0-7 (all as rank 0)`."""
    ranks = stands_for(program, row)
    alike = [f"all as rank {rank_of(program, row)}"] if len(ranks) > 1 else []
    return _named(ranks, [*_shared(program, ranks), *alike])


def _shared(program: Program, ranks: Sequence[int]) -> list[str]:
    """The coordinates that some ranks share, where the mesh has several axes."""
    axes = program.mesh.used
    found = {axis: {program.mesh.coordinate(rank, axis) for rank in ranks} for axis in axes if len(axes) > 1}
    return [f"{axis} {min(places)}" for axis, places in found.items() if len(places) == 1]


def _named(ranks: Sequence[int], about: list[str]) -> str:
    return ranks_text(ranks) + (f" ({', '.join(about)})" if about else "")

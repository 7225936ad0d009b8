"""Rows of a picture and their boxes, in the finest legible detail.

`rows_of` makes a `Row` for each rank, or for a set of ranks that do the same at the same time. `row_name` names a row.
A row's boxes are ops, passes or shares of time (`Detail`). `detail_of` chooses among them by the width of a box on the
page, and `tracks` makes the boxes. A pass is the part of a step that a rank spends on one microbatch in one direction,
through the layers of a stage. A `Span` may represent several ops. The height of its box is then the share of the span's
time that the ops take, so the area of the box is proportional to their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

import numpy as np

from shardlab.common.text import listed
from shardlab.draw.canvas import Looks, Paint
from shardlab.language import OpKind, Program
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import bits
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import rank_of, stands_for

UNFOLDED = 16
"""Largest number of ranks for which each rank has its own row, even if some do the same at the same time."""

MOST_ROWS = 64
"""Largest number of rows in a picture. If there are more, evenly spaced ones are drawn."""

LONGEST_NAME = 24
"""Largest number of characters of a list of ranks. A longer list is abbreviated, with the number of ranks."""

MOST_BOXES = 6000
"""Largest number of boxes in a picture. With more, a coarser detail is chosen."""

NARROWEST_OP, NARROWEST_STAGE_OP, NARROWEST_PASS = 1.5, 5.0, 3.5
"""Smallest median widths in points. Boxes are ops if FORWARD ops are at least this wide, without a pipeline or in one
(where ops show microbatch numbers). Otherwise they are passes if passes are at least this wide."""

SAMPLED = 8
"""Number of rows whose passes are measured to choose the detail."""

NARROWEST_SHARE = 8.0
"""Smallest width in points of a box of shares."""

JOINED_DISTANCE = 2.0
"""Distance in points below which communications are joined into one span, if boxes are passes."""

ROUNDING = 1e-9
"""Relative difference of times below which a communication counts as beginning when another one ends."""

Shares = tuple[tuple[Paint, float], ...]
"""Shares of a span's time, by style."""

_PASS = {kind: OpKind(kind.row.part_of or kind.value) for kind in OpKind}
"""Pass that each op belongs to, or else the op itself. Recomputing a layer belongs to its backward pass."""


class Row(NamedTuple):
    """Row of a picture.

    Attributes:
        row: row of the timeline.
        ranks: all ranks that the row represents.
        events: events of the first of these ranks, with the microbatches of all of them.
    """

    row: int
    ranks: list[int]
    events: Sequence[Event]


def rows_of(timeline: Timeline, *, fold: bool = True) -> list[Row]:
    """Return a row for each rank or, if there are many ranks, for each set that does the same at the same time.

    Args:
        fold: whether ranks may share a row.
    """
    program = timeline.program
    rows = [Row(row, list(stands_for(program, row)), events) for row, events in enumerate(timeline.events)]
    if not fold or len(rows) <= UNFOLDED:
        return rows
    groups: dict[object, list[Row]] = {}
    for row in rows:
        key = tuple([(e.kind, e.layer, round(e.start, 9), round(e.end, 9), e.memory) for e in row.events])
        groups.setdefault(key, []).append(row)
    return [_join_rows(group) for group in groups.values()]


def sample_rows(rows: Sequence[Row], maximum: int) -> list[Row]:
    """Return at most `maximum` evenly spaced rows, including the first and the last."""
    if len(rows) <= maximum:
        return list(rows)
    return [rows[place * (len(rows) - 1) // (maximum - 1)] for place in range(maximum)]


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 0-7`, or `ranks 0, 8, ... (8 alike)` if the list would be too long."""
    text = f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
    return text if len(text) <= LONGEST_NAME else f"ranks {ranks[0]}, {ranks[1]}, ... ({len(ranks)} alike)"


def row_name(program: Program, row: Row) -> str:
    """Return the name of a row: its ranks and, if the mesh has several axes, the coordinates that they share."""
    return _name_with_notes(row.ranks, _shared_coordinates(program, row.ranks))


def rank_name(program: Program, row: int) -> str:
    """Return the name of a timeline's row: `rank 5`, or for folded ranks `ranks 0-7 (all as rank 0)`."""
    ranks = stands_for(program, row)
    folded = [f"all as rank {rank_of(program, row)}"] if len(ranks) > 1 else []
    return _name_with_notes(ranks, [*_shared_coordinates(program, ranks), *folded])


class Detail(Enum):
    """Meaning of one box of a row."""

    OPS = "op"
    PASSES = "pass"
    SHARES = "share"


class Span(NamedTuple):
    """Box of a row, or stack of boxes over the same time.

    Attributes:
        shares: shares of the time by style. The rest up to 1 is waiting.
        text: label, written only if it fits.
        part: upper and lower edge in the lane, from 0 (its top) to 1.
    """

    start: float
    end: float
    shares: Shares
    text: str = ""
    part: tuple[float, float] = (0.0, 1.0)


class Track(NamedTuple):
    """Spans of a row in its lanes for compute and communication, and the start and end of each loss."""

    compute: list[Span]
    communication: list[Span]
    losses: list[tuple[float, float]]


def detail_of(rows: Sequence[Row], looks: Looks, points: float) -> Detail:
    """Return the finest legible detail if a unit of time is `points` points wide."""
    ops = [e.end - e.start for row in rows for e in row.events if e.kind is OpKind.FORWARD and e.end > e.start]
    boxes = sum(e.end > e.start for row in rows for e in row.events)
    narrowest = NARROWEST_STAGE_OP if looks.chunks else NARROWEST_OP
    if not ops or (median(ops) * points >= narrowest and boxes <= MOST_BOXES):
        return Detail.OPS
    sample = sample_rows(rows, SAMPLED)
    widths = [span.end - span.start for row in sample for _, span in passes(row, looks)]
    fits = len(widths) * len(rows) <= MOST_BOXES * len(sample)
    return Detail.PASSES if fits and median(widths) * points >= NARROWEST_PASS else Detail.SHARES


def tracks(
    rows: Sequence[Row], looks: Looks, detail: Detail, points: float, letters: Callable[[Row, Event], str]
) -> list[Track]:
    """Return the boxes of each row.

    Args:
        points: width of a unit of time in points.
        letters: function that returns the label of a communication.
    """
    if detail is Detail.OPS:
        return [_ops(row, looks, letters) for row in rows]
    if detail is Detail.PASSES:
        return [
            Track(
                [span for _, span in passes(row, looks)],
                _join_close(row, looks, JOINED_DISTANCE / points),
                _losses(row),
            )
            for row in rows
        ]
    end = max((e.end for row in rows for e in row.events), default=0.0)
    period = _period(sample_rows(rows, SAMPLED), looks) or end / 100
    cell = period * max(1, -(-NARROWEST_SHARE // (period * points)))
    edges = np.arange(0.0, end + cell, cell)
    return [_shares(row, looks, edges) for row in rows]


def passes(row: Row, looks: Looks) -> list[tuple[OpKind, Span]]:
    """Return the passes and other computations of a row in order, each as one span.

    Sums of gradients are part of the pass before them.
    """
    spans: list[tuple[OpKind, Span]] = []
    last_key: object = None
    run: list[Event] = []

    def end_run() -> None:
        if run:
            spans.append((_PASS[run[0].kind], _join_events(run, looks, _microbatches(run[0]))))
            run.clear()

    for event in row.events:
        if event.kind in COMMUNICATION or event.kind is OpKind.LOSS or event.end <= event.start:
            continue
        if event.kind is not OpKind.ADD or not run:
            is_pass = bool(event.kind.row.part_of)
            key = _PASS[event.kind], is_pass and (event.microbatches, looks.chunk(event))
            if key != last_key:
                end_run()
            last_key = key
        run.append(event)
    end_run()
    return spans


def _join_rows(group: list[Row]) -> Row:
    first, *others = group
    if not others:
        return first
    events: list[Event] = []
    for matching_events in zip(*(row.events for row in group), strict=True):
        microbatches = 0
        for event in matching_events:
            microbatches |= event.microbatches
        events.append(matching_events[0]._replace(microbatches=microbatches))
    return Row(first.row, sorted(rank for row in group for rank in row.ranks), events)


def _shared_coordinates(program: Program, ranks: Sequence[int]) -> list[str]:
    """List the mesh coordinates that all these ranks share, if the mesh has several axes."""
    axes = program.mesh.used
    coordinates = {axis: {program.mesh.coordinate(rank, axis) for rank in ranks} for axis in axes if len(axes) > 1}
    return [f"{axis} {min(values)}" for axis, values in coordinates.items() if len(values) == 1]


def _name_with_notes(ranks: Sequence[int], notes: list[str]) -> str:
    return ranks_text(ranks) + (f" ({', '.join(notes)})" if notes else "")


def _ops(row: Row, looks: Looks, letters: Callable[[Row, Event], str]) -> Track:
    track = Track([], [], _losses(row))
    for event in row.events:
        if event.end <= event.start or event.kind is OpKind.LOSS:
            continue
        talks = event.kind in COMMUNICATION
        text = letters(row, event) if talks else _microbatches(event)
        span = Span(event.start, event.end, ((looks.paint(event), 1.0),), text)
        (track.communication if talks else track.compute).append(span)
    return track._replace(communication=_divide_lane(track.communication))


def _divide_lane(spans: Iterable[Span]) -> list[Span]:
    """Divide the lane among spans that overlap, so that none hides another one."""
    placed_spans: list[Span] = []
    run: list[tuple[int, Span]] = []  # overlapping spans, each with the number of its part
    ends: list[float] = []  # end of the last span in each part

    def end_run() -> None:
        placed_spans.extend(span._replace(part=(part / len(ends), (part + 1) / len(ends))) for part, span in run)
        run.clear()
        ends.clear()

    for span in sorted(spans, key=lambda span: span.start):
        free = [part for part, end in enumerate(ends) if end <= span.start * (1 + ROUNDING)]
        if len(free) == len(ends):
            end_run()
        part = free[0] if free and ends else len(ends)
        ends[part : part + 1] = [span.end]
        run.append((part, span))
    end_run()
    return placed_spans


def _microbatches(event: Event) -> str:
    return listed(bits(event.microbatches)) if event.kind.row.part_of else ""


def _losses(row: Row) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in row.events if event.kind is OpKind.LOSS]


def _join_events(run: Sequence[Event], looks: Looks, text: str = "") -> Span:
    start, stop = min(e.start for e in run), max(e.end for e in run)
    times: dict[Paint, float] = defaultdict(float)
    for event in run:
        times[looks.paint(event)] += event.end - event.start
    whole = max(stop - start, sum(times.values()))  # communications that overlap add up to more than the time
    return Span(start, stop, tuple((paint, time / whole) for paint, time in times.items()), text)


def _join_close(row: Row, looks: Looks, gap: float) -> list[Span]:
    """Return the communications of a row as spans. Communications less than `gap` apart are one span."""
    spans: list[Span] = []
    run: list[Event] = []
    until = 0.0
    events = [e for e in row.events if e.kind in COMMUNICATION and e.end > e.start]
    for event in sorted(events, key=lambda event: event.start):
        if run and event.start > until + gap:
            spans.append(_join_events(run, looks))
            run = []
        until = max(until, event.end) if run else event.end
        run.append(event)
    return [*spans, _join_events(run, looks)] if run else spans


def _period(rows: Sequence[Row], looks: Looks) -> float:
    """Return the median time from one forward pass of a rank to the next.

    In a steady state, the shares of such an interval are constant.
    """
    intervals: list[float] = []
    for row in rows:
        starts = [span.start for kind, span in passes(row, looks) if kind is OpKind.FORWARD]
        intervals += np.diff(starts).tolist()
    return median(intervals) if intervals else 0.0


def _shares(row: Row, looks: Looks, edges: np.ndarray) -> Track:
    busy: dict[bool, dict[Paint, list[Event]]] = {True: defaultdict(list), False: defaultdict(list)}
    for event in row.events:
        if event.end > event.start:
            busy[event.kind in COMMUNICATION][looks.paint(event)].append(event)
    return Track(_cells(busy[False], edges), _cells(busy[True], edges), [])


def _cells(busy: dict[Paint, list[Event]], edges: np.ndarray) -> list[Span]:
    """Return a span with the shares of each style for each interval between edges. Similar neighbours are joined."""
    shares = {paint: np.diff(_time_before(events, edges)) / np.diff(edges) for paint, events in busy.items()}
    total_shares = np.maximum(1.0, sum(shares.values(), np.zeros(len(edges) - 1)))
    rounded_shares = {paint: np.round(share / total_shares, 1) for paint, share in shares.items()}
    spans: list[Span] = []
    for place, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        cell_shares = tuple((paint, float(share[place])) for paint, share in rounded_shares.items() if share[place])
        if cell_shares and spans and spans[-1].end == start and _are_similar(spans[-1].shares, cell_shares):
            spans[-1] = spans[-1]._replace(end=stop)
        elif cell_shares:
            spans.append(Span(start, stop, cell_shares))
    return spans


def _are_similar(shares: Shares, others: Shares) -> bool:
    """Return whether the difference of two sets of shares is too small to be visible in the picture."""
    equal_styles = [paint for paint, _ in shares] == [paint for paint, _ in others]
    return equal_styles and all(abs(one - other) < 0.15 for (_, one), (_, other) in zip(shares, others, strict=True))


def _time_before(events: Iterable[Event], edges: np.ndarray) -> np.ndarray:
    """Return for each edge the total time of the events before it."""
    starts = np.sort(np.array([event.start for event in events]))
    ends = np.sort(np.array([event.end for event in events]))
    return _since(starts, edges) - _since(ends, edges)


def _since(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return for each edge the sum of its distances to all earlier moments."""
    count = np.searchsorted(moments, edges)
    return count * edges - np.concatenate([[0.0], np.cumsum(moments)])[count]

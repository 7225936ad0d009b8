"""The rows of a picture: which ranks each stands for, and what it is called."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

import numpy as np

from shardlab.draw.canvas import Looks, Paint
from shardlab.language import OpKind, Program
from shardlab.language.ops import COMMUNICATION
from shardlab.language.rules.kinds import bits, listed
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import rank_of, stands_for

UNFOLDED = 16
"""Rows up to which each rank has its own, even where ranks do the same at the same time."""

MOST_ROWS = 64
"""Rows that are drawn at most, evenly spaced."""

LONGEST_NAME = 24
"""Characters of a list of ranks; a longer one is counted."""

MOST_BOXES = 6000
"""Boxes that are drawn at most; otherwise they are coarser."""

NARROWEST_OP, NARROWEST_STAGE_OP, NARROWEST_PASS = 1.5, 5.0, 3.5
"""Points that half of the forward passes have at least: ops where a colour tells the layer, ops of a pipeline, which
have the microbatch's number, and passes."""

SAMPLED = 8
"""Rows whose passes are measured."""

CELL = 8.0
"""Points of a share at least."""

CLOSE = 2.0
"""Points: communications that are closer than this are drawn as one span, where passes are."""

Shares = tuple[tuple[Paint, float], ...]
"""Shares of a time, by look."""

_PASS = {kind: OpKind(kind.row.part_of or kind.value) for kind in OpKind}
"""The pass that an op belongs to, or the op itself: to recompute a layer is part of its backward pass."""


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
    return [_joined_rows(group) for group in groups.values()]


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


class Detail(Enum):
    """Meaning of one box."""

    OPS = "op"
    PASSES = "pass"
    SHARES = "share"


class Span(NamedTuple):
    """A box, or several that share its time.

    Attributes:
        shares: of its time; what is left of 1 is waited.
        text: what is written on it, if it fits.
    """

    start: float
    end: float
    shares: Shares
    text: str = ""


class Track(NamedTuple):
    """A row's spans; `losses` are moments, or times, at which its losses are computed."""

    compute: list[Span]
    communication: list[Span]
    losses: list[tuple[float, float]]


def detail_of(rows: Sequence[Row], looks: Looks, points: float) -> Detail:
    """The finest detail that can be read where a unit of time has so many points."""
    ops = [e.end - e.start for row in rows for e in row.events if e.kind is OpKind.FORWARD and e.end > e.start]
    boxes = sum(e.end > e.start for row in rows for e in row.events)
    narrowest = NARROWEST_STAGE_OP if looks.chunks else NARROWEST_OP
    if not ops or (median(ops) * points >= narrowest and boxes <= MOST_BOXES):
        return Detail.OPS
    some = spaced(rows, SAMPLED)
    found = [span.end - span.start for row in some for _, span in passes(row, looks)]
    few = len(found) * len(rows) <= MOST_BOXES * len(some)
    return Detail.PASSES if few and median(found) * points >= NARROWEST_PASS else Detail.SHARES


def tracks(
    rows: Sequence[Row], looks: Looks, detail: Detail, points: float, letters: Callable[[Row, Event], str]
) -> list[Track]:
    """Boxes of each row; `letters` are those of a communication."""
    if detail is Detail.OPS:
        return [_ops(row, looks, letters) for row in rows]
    if detail is Detail.PASSES:
        return [
            Track([span for _, span in passes(row, looks)], _near(row, looks, CLOSE / points), _losses(row))
            for row in rows
        ]
    end = max((e.end for row in rows for e in row.events), default=0.0)
    period = _period(spaced(rows, SAMPLED), looks) or end / 100
    cell = period * max(1, -(-CELL // (period * points)))
    edges = np.arange(0.0, end + cell, cell)
    return [_shares(row, looks, edges) for row in rows]


def passes(row: Row, looks: Looks) -> list[tuple[OpKind, Span]]:
    """The passes of a row and what else it computes, in order; sums of gradients go with the pass before them."""
    found: list[tuple[OpKind, Span]] = []
    of: object = None
    run: list[Event] = []

    def end() -> None:
        if run:
            found.append((_PASS[run[0].kind], _joined_events(run, looks, _microbatches(run[0]))))
            run.clear()

    for event in row.events:
        if event.kind in COMMUNICATION or event.kind is OpKind.LOSS or event.end <= event.start:
            continue
        if event.kind is not OpKind.ADD or not run:
            is_pass = bool(event.kind.row.part_of)
            key = _PASS[event.kind], is_pass and (event.microbatches, looks.chunk(event))
            if key != of:
                end()
            of = key
        run.append(event)
    end()
    return found


def _joined_rows(group: list[Row]) -> Row:
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


def _shared(program: Program, ranks: Sequence[int]) -> list[str]:
    """The coordinates that some ranks share, where the mesh has several axes."""
    axes = program.mesh.used
    found = {axis: {program.mesh.coordinate(rank, axis) for rank in ranks} for axis in axes if len(axes) > 1}
    return [f"{axis} {min(places)}" for axis, places in found.items() if len(places) == 1]


def _named(ranks: Sequence[int], about: list[str]) -> str:
    return ranks_text(ranks) + (f" ({', '.join(about)})" if about else "")


def _ops(row: Row, looks: Looks, letters: Callable[[Row, Event], str]) -> Track:
    track = Track([], [], _losses(row))
    for event in row.events:
        if event.end <= event.start or event.kind is OpKind.LOSS:
            continue
        talks = event.kind in COMMUNICATION
        text = letters(row, event) if talks else _microbatches(event)
        span = Span(event.start, event.end, ((looks.paint(event), 1.0),), text)
        (track.communication if talks else track.compute).append(span)
    return track


def _microbatches(event: Event) -> str:
    return listed(bits(event.microbatches)) if event.kind.row.part_of else ""


def _losses(row: Row) -> list[tuple[float, float]]:
    return [(event.start, event.end) for event in row.events if event.kind is OpKind.LOSS]


def _joined_events(run: Sequence[Event], looks: Looks, text: str = "") -> Span:
    start, stop = min(e.start for e in run), max(e.end for e in run)
    times: dict[Paint, float] = defaultdict(float)
    for event in run:
        times[looks.paint(event)] += event.end - event.start
    whole = max(stop - start, sum(times.values()))  # what communicates at once takes more than its time
    return Span(start, stop, tuple((paint, time / whole) for paint, time in times.items()), text)


def _near(row: Row, looks: Looks, gap: float) -> list[Span]:
    """The communications of a row, those that nearly touch as one span."""
    spans: list[Span] = []
    run: list[Event] = []
    until = 0.0
    events = [e for e in row.events if e.kind in COMMUNICATION and e.end > e.start]
    for event in sorted(events, key=lambda event: event.start):
        if run and event.start > until + gap:
            spans.append(_joined_events(run, looks))
            run = []
        until = max(until, event.end) if run else event.end
        run.append(event)
    return [*spans, _joined_events(run, looks)] if run else spans


def _period(rows: Sequence[Row], looks: Looks) -> float:
    """The usual time from one forward pass of a rank to its next: in a steady state, shares of it are constant."""
    apart: list[float] = []
    for row in rows:
        starts = [span.start for kind, span in passes(row, looks) if kind is OpKind.FORWARD]
        apart += np.diff(starts).tolist()
    return median(apart) if apart else 0.0


def _shares(row: Row, looks: Looks, edges: np.ndarray) -> Track:
    busy: dict[bool, dict[Paint, list[Event]]] = {True: defaultdict(list), False: defaultdict(list)}
    for event in row.events:
        if event.end > event.start:
            busy[event.kind in COMMUNICATION][looks.paint(event)].append(event)
    return Track(_cells(busy[False], edges), _cells(busy[True], edges), [])


def _cells(busy: dict[Paint, list[Event]], edges: np.ndarray) -> list[Span]:
    """The shares of each look between edges; like neighbours are one span."""
    shares = {paint: np.diff(_time_before(events, edges)) / np.diff(edges) for paint, events in busy.items()}
    crowded = np.maximum(1.0, sum(shares.values(), np.zeros(len(edges) - 1)))
    rounded = {paint: np.round(share / crowded, 1) for paint, share in shares.items()}
    spans: list[Span] = []
    for place, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        here = tuple((paint, float(share[place])) for paint, share in rounded.items() if share[place])
        if here and spans and spans[-1].end == start and _alike(spans[-1].shares, here):
            spans[-1] = spans[-1]._replace(end=stop)
        elif here:
            spans.append(Span(start, stop, here))
    return spans


def _alike(shares: Shares, others: Shares) -> bool:
    """Whether shares are so near each other that a step between them would only disturb."""
    same = [paint for paint, _ in shares] == [paint for paint, _ in others]
    return same and all(abs(one - other) < 0.15 for (_, one), (_, other) in zip(shares, others, strict=True))


def _time_before(events: Iterable[Event], edges: np.ndarray) -> np.ndarray:
    """Sum over all events of the time that lies before each edge."""
    starts = np.sort(np.array([event.start for event in events]))
    ends = np.sort(np.array([event.end for event in events]))
    return _since(starts, edges) - _since(ends, edges)


def _since(moments: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum for each edge the time since every moment before it."""
    count = np.searchsorted(moments, edges)
    return count * edges - np.concatenate([[0.0], np.cumsum(moments)])[count]

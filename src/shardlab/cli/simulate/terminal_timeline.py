"""Timelines in characters, for a terminal or a pipe.

`print_timeline` prints a row of signs for each rank, or for ranks that do the same at the same time (`distinct_rows`).
Each sign covers a cell of time, and shows the op that takes at least half of it. Ops that no sign shows are counted
below the rows (`hidden_ops`). If one row is too coarse for the step, the step is printed in up to three rows
(`whole_segments`), or only its beginning, middle and end are printed (`partial_segments`), with the period that
`find_steady_state` finds. `print_strips` prints a step before the first pass and after each pass on a common time axis.
`Activity` computes the share of each kind of op in an interval, `rank_row` converts shares into signs, and `legend`
explains the signs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from shardlab.common.text import axis_time_text, counted, listed
from shardlab.language import OpKind
from shardlab.language.ops import BOOKKEEPING, COMMUNICATION, HUES
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import stands_for

Array = NDArray[np.float64]

MOST_MISLEADING = 0.15
"""Largest share of a row's time in which the rank does something else than its signs show."""

MOST_SEGMENTS = 3
"""Largest number of rows for each rank, and of middle segments of a step that is shown only in part."""

ROUND_LENGTHS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
"""Allowed lengths of a segment, times any power of ten."""

FINEST = 1e-6
"""Shortest segment, as a share of the step."""

PERIOD_TOLERANCE = 0.01
"""Largest relative difference of two periods that count as equal. Prices of the same op may differ in the last
digits."""

SHOWN_ROWS, SHOWN_RANKS = 20, 16
"""Largest number of rows and of distinct ranks shown. Shown ranks are evenly spaced. If each takes several rows, fewer
ranks are shown."""

LONGEST_NAME = 11
"""Largest number of characters of a list of ranks. If it would be longer, each of the ranks has its own row."""

WIDEST, NARROWEST = 120, 20
"""Largest and smallest number of characters of a row. A wider terminal stays empty on the right."""

MARGIN = 2
"""Characters that stay empty on the right of a narrower terminal."""

SIGNS = {kind: (kind.row.sign, HUES[kind.row.color].terminal) for kind in OpKind if kind not in BOOKKEEPING}
"""Sign and colour of each kind of op. Letters are compute (lower case: during communication), other signs
communication."""

IDLE, MIXED = ".", "~"

MAJORITY = 0.5
"""Smallest share of a cell's time that an op must take for the cell to show its sign."""

NAMED_SHARE = 0.01
"""Smallest share of a rank's time at which the legend names an op even if no row shows it."""

GAP = 3
"""Blanks between two entries of the legend."""

TINY = 1e-9
"""Tolerance for rounding errors of shares."""

STRIP_RANKS = 4
"""Largest number of rows in each strip, evenly spaced."""


def print_timeline(console: Console, timeline: Timeline, columns: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Print the rows of a timeline and their legend.

    Args:
        columns: columns to the right of the rows, as (heading, text for each row of the timeline). They are printed on
            each rank's first line.
    """
    end = timeline.end
    if not end:
        return
    names = distinct_rows(timeline, [texts for _, texts in columns])
    label = max(map(len, ["rank", *names.values()]))
    right = sum(2 + len(heading) for heading, _ in columns)
    width = min(WIDEST, max(NARROWEST, console.width - label - 2 - right - MARGIN))
    ranks = {row: Activity(timeline.events[row], end) for row in names}
    interval = -(-len(ranks) // SHOWN_RANKS)
    activities = [*ranks.values()][::interval]
    notes: list[str] = []
    segments = whole_segments(activities, end, width)
    is_whole = bool(segments)
    if not is_whole:
        state = find_steady_state([timeline.events[row] for row in [*ranks][::interval]], end)
        segments = partial_segments(activities, end, width, state)
        notes.append(_parts_text(timeline, state))
    interval = max(interval, -(-len(ranks) * len(segments) // SHOWN_ROWS))
    rows: list[Text] = []
    hidden = Counter[OpKind]()
    for segment in segments:
        ends = [_time_text(timeline, moment, segment.end - segment.start) for moment in segment]
        headings = "".join(f"  {heading}" for heading, _ in columns) if not rows else ""
        gap = " " * max(1, width - sum(map(len, ends)))
        console.print(Text(f"{'rank':>{label}}  {gap.join(ends)}{headings}", "dim"), no_wrap=True)
        for row in [*ranks][::interval]:
            cells = (f"  {texts[row]:>{len(heading)}}" for heading, texts in columns)
            signs = rank_row(ranks[row], *segment, width)
            shares = "".join(cells) if segment is segments[0] else ""
            console.print(Text(f"{names[row]:>{label}}  ") + signs + Text(shares), no_wrap=True)
            rows.append(signs)
            hidden += hidden_ops(timeline.events[row], segment, signs.plain)
    console.print(legend(rows, [*ranks.values()], console.width))
    if not all(name.isdecimal() for name in names.values()):
        notes.insert(0, "Ranks in one row do the same at the same time.")
    if interval > 1:
        notes.append(f"Of {counted(len(ranks), 'row')} one in {interval} is shown.")
    if is_whole and hidden:
        notes.append(
            f"Without a sign above: {', '.join(f'{kind.row.hyphenated} ({n:,})' for kind, n in hidden.most_common())}."
        )
    if notes:
        console.print(" ".join(notes), style="dim")


def print_strips(timelines: Mapping[str, Timeline], time_text: Callable[[float], str], console: Console) -> None:
    """Print a strip for each timeline, as long as its step, and the legend. Without timelines, print nothing."""
    end = max((timeline.end for timeline in timelines.values()), default=0.0)
    if not end:
        return
    every_name = {name: distinct_rows(timeline) for name, timeline in timelines.items()}
    label = max(len(text) for names in every_name.values() for text in ["rank", *names.values()])
    width = min(WIDEST, max(NARROWEST, console.width - label - 2 - MARGIN))
    rows: list[Text] = []
    all_ranks: list[Activity] = []
    for name, timeline in timelines.items():
        names = every_name[name]
        console.print(Text.assemble((f"{'':{label}}  {name}", "bold"), (f"  ends at {time_text(timeline.end)}", "dim")))
        ranks = {row: Activity(timeline.events[row], timeline.end) for row in names}
        cells = max(1, round(width * timeline.end / end))
        for row in [*ranks][:: -(-len(ranks) // STRIP_RANKS)]:
            rows.append(rank_row(ranks[row], 0.0, timeline.end, cells))
            console.print(Text(f"{names[row]:>{label}}  ") + rows[-1], no_wrap=True)
        all_ranks += ranks.values()
    console.print(legend(rows, all_ranks, console.width))
    console.print()


def distinct_rows(timeline: Timeline, columns: Sequence[Sequence[str]] = ()) -> dict[int, str]:
    """Return the rows of a timeline to print, each with the numbers of its ranks, such as `3` or `0-7`.

    Ranks share a row if they do the same at the same time, and have the same texts in all columns.
    """
    groups: dict[object, list[int]] = {}
    for row, events in enumerate(timeline.events):
        work = [(event.kind, round(event.start, 9), round(event.end, 9)) for event in events if event.end > event.start]
        groups.setdefault((*work, *(texts[row] for texts in columns)), []).append(row)

    def name(rows: Sequence[int]) -> str:
        return listed(rank for row in rows for rank in stands_for(timeline.program, row))

    sets = [
        rows
        for group in groups.values()
        for rows in ([group] if len(name(group)) <= LONGEST_NAME else [[row] for row in group])
    ]
    return {rows[0]: name(rows) for rows in sorted(sets)}


def hidden_ops(events: Iterable[Event], segment: Segment, signs: str) -> Counter[OpKind]:
    """Count by kind the ops that the signs of a segment do not show. An op belongs to the segment with its midpoint.

    An op is shown if a cell that it touches has the sign of its kind; a communication also by a small letter.
    """
    cells = len(signs) / (segment.end - segment.start)
    hidden = Counter[OpKind]()
    for event in events:
        if event.kind not in SIGNS or event.end <= event.start:
            continue
        if segment.start <= (event.start + event.end) / 2 < segment.end:
            first, last = ((moment - segment.start) * cells for moment in (event.start, event.end))
            event_signs = signs[max(0, math.floor(first + TINY)) : math.ceil(last - TINY)]
            is_small = event.kind in COMMUNICATION and event_signs != event_signs.upper()
            hidden[event.kind] += SIGNS[event.kind][0] not in event_signs.upper() and not is_small
    return +hidden


class Shares(NamedTuple):
    """Shares of a rank's time in cells of equal length. All arrays have the shape (cells,).

    Attributes:
        compute: share of each kind of compute.
        exposed: share of each kind of communication while the rank does not compute. Several kinds may overlap.
        hidden: share in which the rank computes and communicates.
        idle: share in which the rank does neither.
    """

    compute: dict[OpKind, Array]
    exposed: dict[OpKind, Array]
    hidden: Array
    idle: Array


class Activity:
    """Work of one rank over a step, with methods that compute shares of any interval.

    Args:
        events: events of the rank, in any order. Events that take no time are ignored.
        end: end of the step.
    """

    def __init__(self, events: Sequence[Event], end: float) -> None:
        timed_events = [event for event in events if event.end > event.start]
        starts = np.array([event.start for event in timed_events])
        ends = np.array([event.end for event in timed_events])
        self._moments: Array = np.unique(np.concatenate([[0.0, end], starts, ends]))
        self._lengths = np.diff(self._moments)
        of_kind: dict[OpKind, list[int]] = {}
        for place, event in enumerate(timed_events):
            of_kind.setdefault(event.kind, []).append(place)
        under_way = {kind: self._under_way(starts[places], ends[places]) for kind, places in of_kind.items()}
        computing = self._any([mask for kind, mask in under_way.items() if kind not in COMMUNICATION])
        transfers = self._any([mask for kind, mask in under_way.items() if kind in COMMUNICATION])
        self._under_way_until = {kind: self._until(mask) for kind, mask in under_way.items()}
        self._exposed_until = {
            kind: self._until(mask & ~computing) for kind, mask in under_way.items() if kind in COMMUNICATION
        }
        self._hidden_until, self._idle_until = self._until(computing & transfers), self._until(~computing & ~transfers)
        self.end = end

    def shares(self, start: float, end: float, cells: int) -> Shares:
        """Return the shares of the time between `start` and `end`, in cells of equal length."""
        edges, length = np.linspace(start, end, cells + 1), (end - start) / cells

        def shares_in_cells(until: Array) -> Array:
            return np.diff(np.interp(edges, self._moments, until)) / length

        return Shares(
            {
                kind: shares_in_cells(until)
                for kind, until in self._under_way_until.items()
                if kind not in COMMUNICATION
            },
            {kind: shares_in_cells(until) for kind, until in self._exposed_until.items()},
            shares_in_cells(self._hidden_until),
            shares_in_cells(self._idle_until),
        )

    def totals(self) -> dict[OpKind, float]:
        """Return the share of the step in which each kind of op runs. The kinds may overlap."""
        return {kind: float(until[-1]) / self.end for kind, until in self._under_way_until.items()}

    @property
    def hidden(self) -> float:
        """Share of the step in which the rank computes and communicates."""
        return float(self._hidden_until[-1]) / self.end

    @property
    def idle(self) -> float:
        """Share of the step in which the rank neither computes nor communicates."""
        return float(self._idle_until[-1]) / self.end

    def _under_way(self, starts: Array, ends: Array) -> NDArray[np.bool_]:
        """Return for each time in `_moments` whether any of these ops runs from then until the next time."""
        change = np.zeros(len(self._moments), dtype=np.int64)
        np.add.at(change, np.searchsorted(self._moments, starts), 1)
        np.add.at(change, np.searchsorted(self._moments, ends), -1)
        return np.cumsum(change)[:-1] > 0

    def _any(self, masks: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
        return np.any(masks, axis=0) if masks else np.zeros(len(self._lengths), dtype=bool)

    def _until(self, mask: NDArray[np.bool_]) -> Array:
        """Return for each time in `_moments` the total time before it in which `mask` is true."""
        return np.concatenate([[0.0], np.cumsum(self._lengths * mask)])


class Segment(NamedTuple):
    """Interval of a step."""

    start: float
    end: float


class SteadyState(NamedTuple):
    """Steady state of a step. From `since` until `until`, all ranks repeat their work with the period `period`."""

    period: float
    since: float
    until: float


def whole_segments(ranks: Sequence[Activity], end: float, width: int) -> list[Segment]:
    """Divide a step into the fewest segments that rows of `width` cells can show readably.

    Returns:
        The segments, or an empty list if more than `MOST_SEGMENTS` would be needed.
    """
    for count in range(1, MOST_SEGMENTS + 1):
        cuts = [end * part / count for part in range(count + 1)]
        segments = [Segment(*ends) for ends in pairwise(cuts)]
        if _is_readable(ranks, segments, width):
            return segments
    return []


def partial_segments(ranks: Sequence[Activity], end: float, width: int, state: SteadyState | None) -> list[Segment]:
    """Return segments at the beginning, in the middle and at the end of a step.

    Each segment is as long as a row of `width` cells can show readably. In a steady state, the middle begins at the
    start of a period. It covers the whole period if `MOST_SEGMENTS` rows suffice.
    """
    segments: list[Segment] = []
    rows, start = 1, end / 2
    if state is not None:
        start = state.since + state.period * ((end / 2 - state.since) // state.period)
    for length in _round_lengths(end / (2 + MOST_SEGMENTS), FINEST * end):
        if state is not None:
            rows = max(1, min(MOST_SEGMENTS, math.ceil(state.period / length)))
        middle = min(max(length, start), end - (1 + rows) * length)
        cuts = [middle + length * row for row in range(rows + 1)]
        segments = [Segment(0.0, length), *(Segment(*ends) for ends in pairwise(cuts)), Segment(end - length, end)]
        if _is_readable(ranks, segments, width):
            break
    return segments


def find_steady_state(ranks: Sequence[Sequence[Event]], end: float) -> SteadyState | None:
    """Find the shortest period that all ranks repeat for at least half of a step (None: there is none).

    Args:
        ranks: events of each rank, in tape order.
        end: end of the step.
    """
    states = [state for events in ranks if (state := _steady_state_of(events, end)) is not None]
    if not states or len(states) < len(ranks):
        return None
    period = max(state.period for state in states)
    if any(abs(period / state.period - round(period / state.period)) > PERIOD_TOLERANCE for state in states):
        return None
    common = SteadyState(period, max(state.since for state in states), min(state.until for state in states))
    return common if _lasts(common, end) else None


def rank_row(activity: Activity, start: float, end: float, width: int) -> Text:
    """Return a rank's row of `width` signs for the time between `start` and `end`."""
    return _row(activity.shares(start, end, width))


def misleading_share(activity: Activity, start: float, end: float, width: int) -> float:
    """Return the share of an interval in which a row of `width` signs does not show what the rank does."""
    shares = activity.shares(start, end, width)
    parts = [*shares.compute.values(), *shares.exposed.values(), shares.idle]
    largest = np.max(parts, axis=0)
    return float(1 - np.where(largest >= MAJORITY - TINY, largest, 0.0).mean())


def legend(rows: list[Text], ranks: Sequence[Activity], width: int) -> Text:
    """Return the legend of some rows: the meaning of each sign, and its share of the ranks' time.

    Args:
        rows: rows that are printed.
        ranks: all ranks, shown or not.
        width: width of the terminal, which no line exceeds.
    """
    signs = {character for row in rows for character in row.plain}
    totals = [rank.totals() for rank in ranks]
    meanings: list[Text] = []
    for kind, (sign, color) in SIGNS.items():
        shares = [total.get(kind, 0.0) for total in totals]
        if signs & {sign, sign.lower()} or max(shares, default=0) >= NAMED_SHARE:
            meanings.append(_legend_entry(sign, color, kind.row.hyphenated, shares))
    hidden = [rank.hidden for rank in ranks]
    if signs & {sign.lower() for sign, _ in SIGNS.values() if sign.isupper()} or max(hidden, default=0) >= NAMED_SHARE:
        meanings.append(_legend_entry("small letter:", "dim", "communicates as well", hidden))
    idle = [rank.idle for rank in ranks]
    if IDLE in signs or max(idle, default=0) >= NAMED_SHARE:
        meanings.append(_legend_entry(IDLE, "dim", "waits", idle))
    if MIXED in signs:
        meanings.append(Text(f"{MIXED} mixed: nothing fills half of a cell", "dim"))
    if meanings:
        meanings[0].append(" of a rank's time", "dim")
    lines: list[Text] = []
    for meaning in meanings:
        if lines and lines[-1].cell_len + GAP + meaning.cell_len <= width:
            lines[-1].append(" " * GAP).append(meaning)
        else:
            lines.append(meaning)
    return Text("\n").join(lines)


def _is_readable(ranks: Sequence[Activity], segments: Sequence[Segment], width: int) -> bool:
    return all(misleading_share(rank, *segment, width) <= MOST_MISLEADING for rank in ranks for segment in segments)


def _round_lengths(longest: float, shortest: float) -> list[float]:
    """List round numbers in an interval, from the longest to the shortest."""
    power = 1.0
    while power > shortest:
        power /= 10
    lengths: list[float] = []
    while power <= longest:
        lengths += [factor * power for factor in ROUND_LENGTHS if shortest <= factor * power <= longest]
        power *= 10
    return lengths[::-1]


def _lasts(state: SteadyState, end: float) -> bool:
    return state.until - state.since >= max(end / 2, 2 * state.period)


def _steady_state_of(events: Sequence[Event], end: float) -> SteadyState | None:
    """Find the shortest period after which one rank computes the same on other microbatches."""
    compute_events = [event for event in events if event.kind not in COMMUNICATION and event.end > event.start]
    starts = [event.start for event in compute_events]
    middle = bisect_left(starts, end / 2)

    def repeats(place: int, period: int, duration: float) -> bool:
        if not 0 <= place < len(compute_events) - period:
            return False
        one, other = compute_events[place], compute_events[place + period]
        is_same_op = (one.kind, one.layer) == (other.kind, other.layer)
        return is_same_op and abs(other.start - one.start - duration) <= PERIOD_TOLERANCE * duration

    for period in range(1, min(middle, len(compute_events) - middle) + 1):
        duration = starts[middle] - starts[middle - period]
        first = last = middle - period
        while duration and repeats(first - 1, period, duration):
            first -= 1
        while duration and repeats(last, period, duration):
            last += 1
        until = starts[last + period] if last + period < len(compute_events) else compute_events[-1].end
        if _lasts(state := SteadyState(duration, starts[first], until), end):
            return state
    return None


def _parts_text(timeline: Timeline, state: SteadyState | None) -> str:
    """Return a note about the shown segments of a step that is too long to be shown whole."""
    text = "The beginning, the middle and the end of the step are shown"
    if state is None:
        return f"{text}."
    period, since, until = (_time_text(timeline, moment, state.period) for moment in state)
    return f"{text}; from {since} to {until} it repeats itself every {period}."


def _time_text(timeline: Timeline, moment: float, length: float) -> str:
    """Return a time as text, with a precision that fits segments of this length."""
    return axis_time_text(moment, timeline.end, length) if timeline.in_seconds else f"{moment:.6g}"


def _row(shares: Shares) -> Text:
    row = Text()
    columns = {**shares.compute, **shares.exposed}
    computing = sum(shares.compute.values(), np.zeros_like(shares.idle))
    for cell, idle in enumerate(shares.idle):
        kind = max(columns, key=lambda kind: columns[kind][cell], default=None)
        if kind is not None and columns[kind][cell] >= MAJORITY - TINY:
            sign, color = SIGNS[kind]
            overlaps = kind in shares.compute and shares.hidden[cell] >= MAJORITY * computing[cell] - TINY
            row.append(sign.lower() if overlaps else sign, color)
        elif idle >= MAJORITY - TINY:
            row.append(IDLE, "dim")
        else:
            row.append(MIXED, "dim")
    return row


def _legend_entry(sign: str, color: str, name: str, shares: Sequence[float]) -> Text:
    """Return an entry such as `F forward 33%`, or `F forward 28-33%` or `F forward up to 1%` if ranks differ."""
    low, high = (f"{share:.0%}" if share >= NAMED_SHARE or not share else "<1%" for share in (min(shares), max(shares)))
    text = high
    if low != high:
        text = f"{low.removesuffix('%')}-{high}" if min(shares) >= NAMED_SHARE else f"up to {high}"
    return Text.assemble((sign, color), (f" {name} {text}", "dim"))

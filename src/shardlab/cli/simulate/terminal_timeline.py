"""Shares of any stretch of time that a rank spends on each kind of op."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.text import Text

from shardlab.cli.console import stdout_console
from shardlab.common.text import moment_text
from shardlab.language import OpKind
from shardlab.language.ops import BOOKKEEPING, COMMUNICATION, HUES
from shardlab.language.rules.kinds import counted
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.timeline.prices import rank_of

Array = NDArray[np.float64]

UNSEEN = 0.15
"""A row shows something else than what is done for at most this share of its time."""

MOST_STRETCHES = 3
"""A step is shown whole in up to so many rows for each rank, and otherwise in so many parts."""

ROUND = (1.0, 1.5, 2.0, 3.0, 5.0, 7.5)
"""Lengths of a part, times a power of ten."""

FINEST = 1e-6
"""Smallest share of the step that a part has."""

ALIKE = 0.01
"""Times of two periods may differ by this share of one: prices of the same op are seldom the same to the last digit."""

SHOWN_ROWS, SHOWN_RANKS = 20, 16
"""Rows and ranks that are shown at most, evenly spaced; fewer ranks where one takes several rows."""

WIDEST, NARROWEST = 120, 20
"""Characters of a row; a wider terminal is left empty on the right."""

MARGIN = 2
"""Characters that are left empty on the right of a terminal that is not wider."""

SIGNS = {kind: (kind.row.sign, HUES[kind.row.color].terminal) for kind in OpKind if kind not in BOOKKEEPING}
"""Capital letters are compute, and small ones compute beside communication; other signs are communication."""

IDLE, MIXED = ".", "~"

MOST = 0.5
"""A sign stands for what takes at least this share of its cell's time."""

NAMED_SHARE = 0.01
"""The legend names every kind of op that takes at least this share of some rank's time, shown in a row or not."""

GAP = 3
"""Blanks between two of the legend's entries."""

TINY = 1e-9
"""Rounding errors of shares."""

SHOWN = 4
"""Ranks of which each strip has a row at most, evenly spaced."""

LABEL = 4
"""Characters of a rank's number."""


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


class Shares(NamedTuple):
    """Shares of equally long cells of time that a rank spends on each thing.

    Attributes:
        compute: of each kind of compute, (cells,).
        exposed: of each kind of communication while nothing is computed, (cells,); several may go on at once.
        hidden: computes and communicates at once, (cells,).
        idle: does neither, (cells,).
    """

    compute: dict[OpKind, Array]
    exposed: dict[OpKind, Array]
    hidden: Array
    idle: Array


class Activity:
    """Work of one rank at every moment of a step.

    Args:
        events: the rank's events, in any order; those that take no time count for nothing.
        end: when the step ends.
    """

    def __init__(self, events: Sequence[Event], end: float) -> None:
        lasting = [event for event in events if event.end > event.start]
        starts = np.array([event.start for event in lasting])
        ends = np.array([event.end for event in lasting])
        self._moments: Array = np.unique(np.concatenate([[0.0, end], starts, ends]))
        self._lengths = np.diff(self._moments)
        of_kind: dict[OpKind, list[int]] = {}
        for place, event in enumerate(lasting):
            of_kind.setdefault(event.kind, []).append(place)
        under_way = {kind: self._under_way(starts[places], ends[places]) for kind, places in of_kind.items()}
        computes = self._any([on for kind, on in under_way.items() if kind not in COMMUNICATION])
        talks = self._any([on for kind, on in under_way.items() if kind in COMMUNICATION])
        self._under_way_until = {kind: self._until(on) for kind, on in under_way.items()}
        self._exposed_until = {
            kind: self._until(on & ~computes) for kind, on in under_way.items() if kind in COMMUNICATION
        }
        self._hidden_until, self._idle_until = self._until(computes & talks), self._until(~computes & ~talks)
        self.end = end

    def shares(self, start: float, end: float, cells: int) -> Shares:
        """A row's work between two moments, in so many cells."""
        edges, length = np.linspace(start, end, cells + 1), (end - start) / cells

        def of(until: Array) -> Array:
            return np.diff(np.interp(edges, self._moments, until)) / length

        return Shares(
            {kind: of(until) for kind, until in self._under_way_until.items() if kind not in COMMUNICATION},
            {kind: of(until) for kind, until in self._exposed_until.items()},
            of(self._hidden_until),
            of(self._idle_until),
        )

    def totals(self) -> dict[OpKind, float]:
        """The share of the whole step in which each kind of op is under way; they overlap."""
        return {kind: float(until[-1]) / self.end for kind, until in self._under_way_until.items()}

    @property
    def hidden(self) -> float:
        """The share of the step in which the rank computes and communicates at once."""
        return float(self._hidden_until[-1]) / self.end

    @property
    def idle(self) -> float:
        """The share of the step in which the rank does nothing."""
        return float(self._idle_until[-1]) / self.end

    def _under_way(self, starts: Array, ends: Array) -> NDArray[np.bool_]:
        """Whether any of some ops is under way, between each moment and the next."""
        change = np.zeros(len(self._moments), dtype=np.int64)
        np.add.at(change, np.searchsorted(self._moments, starts), 1)
        np.add.at(change, np.searchsorted(self._moments, ends), -1)
        return np.cumsum(change)[:-1] > 0

    def _any(self, each: list[NDArray[np.bool_]]) -> NDArray[np.bool_]:
        return np.any(each, axis=0) if each else np.zeros(len(self._lengths), dtype=bool)

    def _until(self, on: NDArray[np.bool_]) -> Array:
        """Seconds in which it was so, from the start until each moment."""
        return np.concatenate([[0.0], np.cumsum(self._lengths * on)])


class Stretch(NamedTuple):
    """A part of a step, from one moment to another."""

    start: float
    end: float


class Steady(NamedTuple):
    """Period of a step: from `since` until `until`, all ranks do the same again after each `every`."""

    every: float
    since: float
    until: float


def whole_stretches(ranks: Sequence[Activity], end: float, width: int) -> list[Stretch]:
    """All of a step, in as few rows of so many cells as show what is done; none if more than a few would be needed."""
    for count in range(1, MOST_STRETCHES + 1):
        cuts = [end * part / count for part in range(count + 1)]
        found = [Stretch(*ends) for ends in pairwise(cuts)]
        if _is_seen(ranks, found, width):
            return found
    return []


def parts(ranks: Sequence[Activity], end: float, width: int, steady: Steady | None) -> list[Stretch]:
    """The beginning, a stretch in the middle and the end, as long as rows of so many cells show what is done.

    In a steady state the middle begins where a period does, and is one if a few rows are enough for it.
    """
    shown: list[Stretch] = []
    rows, start = 1, end / 2
    if steady is not None:
        start = steady.since + steady.every * ((end / 2 - steady.since) // steady.every)
    for length in _round_lengths(end / (2 + MOST_STRETCHES), FINEST * end):
        if steady is not None:
            rows = max(1, min(MOST_STRETCHES, math.ceil(steady.every / length)))
        middle = min(max(length, start), end - (1 + rows) * length)
        cuts = [middle + length * row for row in range(rows + 1)]
        shown = [Stretch(0.0, length), *(Stretch(*ends) for ends in pairwise(cuts)), Stretch(end - length, end)]
        if _is_seen(ranks, shown, width):
            break
    return shown


def steady_state(ranks: Sequence[Sequence[Event]], end: float) -> Steady | None:
    """The steady state of a step: the shortest period that all ranks repeat for at least half of it, if there is one.

    Args:
        ranks: the events of each rank, in tape order.
        end: when the step ends.
    """
    each = [steady for events in ranks if (steady := _steady_of(events, end)) is not None]
    if not each or len(each) < len(ranks):
        return None
    every = max(steady.every for steady in each)
    if any(abs(every / steady.every - round(every / steady.every)) > ALIKE for steady in each):
        return None
    found = Steady(every, max(steady.since for steady in each), min(steady.until for steady in each))
    return found if _lasts(found, end) else None


def rank_row(activity: Activity, start: float, end: float, width: int) -> Text:
    """Row of signs for a rank between two moments; each shows what takes most of its cell, or that nothing does."""
    return _row(activity.shares(start, end, width))


def unseen(activity: Activity, start: float, end: float, width: int) -> float:
    """The share of a stretch of time in which a row shows something else than what is done."""
    shares = activity.shares(start, end, width)
    every = [*shares.compute.values(), *shares.exposed.values(), shares.idle]
    most = np.max(every, axis=0)
    return float(1 - np.where(most >= MOST - TINY, most, 0.0).mean())


def legend(rows: list[Text], ranks: Sequence[Activity], width: int) -> Text:
    """Legend of some rows: what their signs mean, and the share of the ranks' time that each takes.

    Args:
        rows: what is printed.
        ranks: all ranks, shown or not.
        width: of the terminal, in characters; no line is longer.
    """
    shown = {character for row in rows for character in row.plain}
    totals = [rank.totals() for rank in ranks]
    meanings: list[Text] = []
    for kind, (sign, color) in SIGNS.items():
        shares = [total.get(kind, 0.0) for total in totals]
        if shown & {sign, sign.lower()} or max(shares, default=0) >= NAMED_SHARE:
            meanings.append(_meaning(sign, color, kind.value.replace("_", "-"), shares))
    hidden = [rank.hidden for rank in ranks]
    if shown & {sign.lower() for sign, _ in SIGNS.values() if sign.isupper()} or max(hidden, default=0) >= NAMED_SHARE:
        meanings.append(_meaning("small letter:", "dim", "communicates as well", hidden))
    idle = [rank.idle for rank in ranks]
    if IDLE in shown or max(idle, default=0) >= NAMED_SHARE:
        meanings.append(_meaning(IDLE, "dim", "waits", idle))
    if MIXED in shown:
        meanings.append(Text(f"{MIXED} several, none for half of it", "dim"))
    if meanings:
        meanings[0].append(" of a rank's time", "dim")
    lines: list[Text] = []
    for meaning in meanings:
        if lines and lines[-1].cell_len + GAP + meaning.cell_len <= width:
            lines[-1].append(" " * GAP).append(meaning)
        else:
            lines.append(meaning)
    return Text("\n").join(lines)


def _is_seen(ranks: Sequence[Activity], stretches: Sequence[Stretch], width: int) -> bool:
    return all(unseen(rank, *stretch, width) <= UNSEEN for rank in ranks for stretch in stretches)


def _round_lengths(longest: float, shortest: float) -> list[float]:
    """Round numbers from the longest to the shortest."""
    power = 1.0
    while power > shortest:
        power /= 10
    found: list[float] = []
    while power <= longest:
        found += [each * power for each in ROUND if shortest <= each * power <= longest]
        power *= 10
    return found[::-1]


def _lasts(steady: Steady, end: float) -> bool:
    return steady.until - steady.since >= max(end / 2, 2 * steady.every)


def _steady_of(events: Sequence[Event], end: float) -> Steady | None:
    """The shortest period after which a rank computes the same on other microbatches, and from when until when."""
    done = [event for event in events if event.kind not in COMMUNICATION and event.end > event.start]
    starts = [event.start for event in done]
    here = bisect_left(starts, end / 2)

    def repeats(place: int, period: int, every: float) -> bool:
        if not 0 <= place < len(done) - period:
            return False
        one, other = done[place], done[place + period]
        alike = (one.kind, one.layer) == (other.kind, other.layer)
        return alike and abs(other.start - one.start - every) <= ALIKE * every

    for period in range(1, min(here, len(done) - here) + 1):
        every = starts[here] - starts[here - period]
        first = last = here - period
        while every and repeats(first - 1, period, every):
            first -= 1
        while every and repeats(last, period, every):
            last += 1
        until = starts[last + period] if last + period < len(done) else done[-1].end
        if _lasts(steady := Steady(every, starts[first], until), end):
            return steady
    return None


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


def _row(shares: Shares) -> Text:
    row = Text()
    columns = {**shares.compute, **shares.exposed}
    computing = sum(shares.compute.values(), np.zeros_like(shares.idle))
    for cell, idle in enumerate(shares.idle):
        kind = max(columns, key=lambda kind: columns[kind][cell], default=None)
        if kind is not None and columns[kind][cell] >= MOST - TINY:
            sign, color = SIGNS[kind]
            beside = kind in shares.compute and shares.hidden[cell] >= MOST * computing[cell] - TINY
            row.append(sign.lower() if beside else sign, color)
        elif idle >= MOST - TINY:
            row.append(IDLE, "dim")
        else:
            row.append(MIXED, "dim")
    return row


def _meaning(sign: str, color: str, name: str, shares: Sequence[float]) -> Text:
    """`F forward 33%`, or `F forward 28-33%` or `F forward up to 1%` of ranks that differ."""
    low, high = (f"{share:.0%}" if share >= NAMED_SHARE or not share else "<1%" for share in (min(shares), max(shares)))
    text = high
    if low != high:
        text = f"{low.removesuffix('%')}-{high}" if min(shares) >= NAMED_SHARE else f"up to {high}"
    return Text.assemble((sign, color), (f" {name} {text}", "dim"))

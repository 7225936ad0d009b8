"""Stretches of a step that the rows of a timeline show, so that what they show is what is done."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from shardlab.cli.activity import Activity
from shardlab.cli.timeline_text import unseen
from shardlab.program.ops import COMMUNICATION
from shardlab.timeline import Event

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

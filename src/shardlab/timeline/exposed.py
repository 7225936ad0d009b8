"""Shares of a rank's time: computing, communication that nothing hides, and waiting."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardlab.program.ops import COMMUNICATION
from shardlab.timeline.timeline import Timeline


class RankTimes(NamedTuple):
    """One rank's step; the three add up to the timeline's end.

    Attributes:
        computing: time in which it computes.
        exposed: time in which it communicates and does not compute.
        idle: time in which it does neither, until the last rank has ended.
    """

    computing: float
    exposed: float
    idle: float


def rank_times(timeline: Timeline, rank: int) -> RankTimes:
    """Where one rank's time goes."""
    events = timeline.events[rank]
    work = covered((event.start, event.end) for event in events if event.kind not in COMMUNICATION)
    busy = covered((event.start, event.end) for event in events)
    return RankTimes(work, max(0.0, busy - work), max(0.0, timeline.end - busy))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The time that lies in at least one of some spans."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total

"""Arrows from one event to another that it made possible: a message's send and receive, a collective's last member."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardlab.program.ops import Stream
from shardlab.timeline import Timeline
from shardlab.timeline.counters import moments_of

Place = tuple[int, int]
"""A row and the place of an op on its tape."""


class Arrow(NamedTuple):
    """An arrow from the event at one place to that at another; a `message` or a `join`."""

    name: str
    source: Place
    target: Place


def arrows(timeline: Timeline) -> Iterator[Arrow]:
    """List all arrows between the rows of a timeline; of folded ranks, those whose peers have rows of their own.

    A join goes from the member for which the others of a collective waited (of several, the first) to each of them.
    """
    moments = [moments_of(timeline, row) for row in range(len(timeline.events))]
    for communication in timeline.communications:
        places = [(row, at) for row, _, at in communication.participants]
        if communication.stream is Stream.MESSAGE:
            yield Arrow("message", *places)
        else:
            last = max(places, key=lambda place: moments[place[0]][place[1]])
            yield from (Arrow("join", last, place) for place in places if place != last)

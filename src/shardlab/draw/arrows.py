"""Arrows from one event to another that it made possible: a message's send and receive, a collective's last member."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from shardlab.program import OpKind
from shardlab.simulate import Timeline
from shardlab.simulate.counters import moments_of
from shardlab.simulate.traced import rank_of

Place = tuple[int, int]
"""A row and the place of an op on its tape."""


class Arrow(NamedTuple):
    """An arrow from the event at one place to that at another; a `message` or a `join`."""

    name: str
    source: Place
    target: Place


def arrows(timeline: Timeline) -> Iterator[Arrow]:
    """List all arrows between the rows of a timeline; of folded ranks, those whose peers have rows of their own."""
    yield from _messages(timeline)
    yield from _joins(timeline)


def _messages(timeline: Timeline) -> Iterator[Arrow]:
    program = timeline.program
    sent: dict[tuple[int, int], deque[Place]] = defaultdict(deque)
    for row, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            if op.kind is OpKind.SEND:
                sent[rank_of(program, row), op.peer].append((row, at))
    for row, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            channel = sent.get((op.peer, rank_of(program, row))) if op.kind is OpKind.RECV else None
            if channel:
                yield Arrow("message", channel.popleft(), (row, at))


def _joins(timeline: Timeline) -> Iterator[Arrow]:
    """From the member for which the others of a collective waited (of several, the first) to each of them."""
    members: dict[tuple[object, int], list[tuple[float, Place]]] = defaultdict(list)
    for row, tape in enumerate(timeline.program.tapes):
        came = moments_of(timeline, row)
        seen: dict[object, int] = defaultdict(int)  # all members issue a group's collectives in one order
        for at, op in enumerate(tape):
            if op.group is not None:
                members[op.group, seen[op.group]].append((came[at], (row, at)))
                seen[op.group] += 1
    for each in members.values():
        _, last = max(each, key=lambda member: member[0])
        yield from (Arrow("join", last, place) for _, place in each if place != last)

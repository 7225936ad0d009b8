"""The clocks of outlines: when ranks meet, as `shardlab.timeline.clocks` has it for whole tapes.

Messages wait for their receives here, and every communicator has a stream of its own, as on NCCL.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import count

from shardlab.predict.outline_entries import Await, Compute, Entry, Issue, Join
from shardlab.timeline.clocks import Idle, computing

Meeting = tuple[Hashable, int]
"""A communication between rows: its channel, and its number on it."""


def step_seconds(rows: Sequence[Sequence[Entry]], contention: float = 0.0) -> float:
    """Find how long it takes until the last row has ended.

    Args:
        contention: see `Prices.contention`.
    """
    return _OutlineClocks(rows, contention).run()


class _OutlinedRow:
    """Where a row has got to.

    Attributes:
        at, clock: the entry that is next, and when.
        starts, ends: of what it has issued, by handle.
        free: when each stream is, of groups that are not across rows.
        idle: when it stood still; noted where communication takes time from compute.
        parked: the handle that it waits for (-1: none).
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self.at, self.clock, self.parked = 0, 0.0, -1
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        self.free: dict[Hashable, float] = defaultdict(float)
        self.idle: list[Idle] = []


class _OutlineClocks:
    def __init__(self, rows: Sequence[Sequence[Entry]], contention: float) -> None:
        self._rows = [_OutlinedRow(entries) for entries in rows]
        self._contention = contention
        self._free: dict[Hashable, float] = defaultdict(float)  # streams across rows
        self._joined: dict[Meeting, list[tuple[int, Join]]] = defaultdict(list)  # rows, and their parts
        self._tie = count()
        # (time, tie, row to go on, or communication that all have joined)
        self._heap: list[tuple[float, int, int | Meeting]] = []
        self._end = 0.0

    def run(self) -> float:
        for row in range(len(self._rows)):
            self._push(0.0, row)
        while self._heap:
            now, _, coming = heapq.heappop(self._heap)
            if isinstance(coming, int):
                self._advance(coming, now)
            else:
                self._meet(coming, now)
        assert all(row.parked < 0 for row in self._rows), "every message is sent and received"
        return self._end

    def _push(self, time: float, coming: int | Meeting) -> None:
        heapq.heappush(self._heap, (time, next(self._tie), coming))

    def _advance(self, number: int, now: float) -> None:
        """Go on with a row until it meets others, in the order of time, or waits for them."""
        row = self._rows[number]
        clock, starts, ends, free = row.clock, row.starts, row.ends, row.free
        computed = latest = 0.0
        for at in range(row.at, len(row.entries)):
            entry = row.entries[at]
            if isinstance(entry, Compute):
                clock = computed = clock + entry.seconds
            elif isinstance(entry, Await):
                end = ends.get(entry.handle)
                if end is None:
                    row.parked = entry.handle
                    break
                if self._contention:
                    both = computing(row.idle, starts[entry.handle], min(clock, end))
                    end = max(clock, end) + self._contention * both
                    row.idle.append(Idle(-1, clock, end))
                clock = max(clock, end)
            elif isinstance(entry, Issue):
                start = starts[entry.handle] = max(clock, free[entry.group])
                latest = ends[entry.handle] = free[entry.group] = start + entry.seconds
                self._end = max(self._end, latest)
            elif clock > now:
                self._push(clock, number)
                break
            else:
                self._join(number, entry, now)
                clock += entry.blocks
        else:
            at = len(row.entries)
        row.at, row.clock = at, clock
        self._end = max(self._end, computed)

    def _join(self, number: int, entry: Join, now: float) -> None:
        meeting = entry.channel, entry.number
        members = self._joined[meeting]
        members.append((number, entry))
        if len(members) == entry.members:
            self._push(now, meeting)

    def _meet(self, meeting: Meeting, now: float) -> None:
        """Run what all members have joined, when its stream is free; those who wait for it go on."""
        members = self._joined.pop(meeting)
        stream, seconds = members[-1][1].stream, members[-1][1].seconds
        start = max(now, self._free[stream])
        end = self._free[stream] = start + seconds
        self._end = max(self._end, end)
        for number, entry in members:
            row = self._rows[number]
            row.starts[entry.handle], row.ends[entry.handle] = start, end
            if row.parked == entry.handle:
                row.parked = -1
                self._push(max(row.clock, now), number)

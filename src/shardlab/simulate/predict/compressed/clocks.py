"""What stands in an outline: seconds of compute, and where a rank meets others or waits.

No entry says where in a step it stands, so that what is repeated stands in an outline as often as it is done.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import count
from typing import NamedTuple

from shardlab.language import Group
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.simulate.predict.compressed.sample import Crest, Held, SizedPart
from shardlab.simulate.timeline.run import Idle, waited_until


class Compute:
    """Seconds of compute, to which more may be added."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Issue(NamedTuple):
    """A collective of ranks that are alike; it takes its group's stream."""

    group: Group
    seconds: float


class Await(NamedTuple):
    """A wait for a collective: the last one that was begun (1), or one before it."""

    ago: int


class Join(NamedTuple):
    """A part in a communication with other rows, the next one on its channel.

    Attributes:
        stream: what it takes turns on: the group, or the two ranks of a message.
        blocks: seconds for which nothing else is done.
    """

    channel: Hashable
    stream: Hashable
    members: int
    seconds: float
    blocks: float = 0.0


class OutlinedMessage(NamedTuple):
    """A message to or from another row, on one of the rank's ways."""

    way: int


class Take(NamedTuple):
    """A wait for a message: the next one on its way that was not waited for (0), or one after it."""

    way: int
    turn: int


class Way(NamedTuple):
    """A kind of message.

    Attributes:
        sends: whether the rank sends it.
        further: how much further the other rank is.
        part: what it is.
        layer: that it enters, or whose gradient it is, where it is received.
    """

    sends: bool
    further: int
    part: SizedPart
    layer: int = -1


Entry = Compute | Issue | Await | Join | OutlinedMessage | Take


class OutlinedStep(NamedTuple):
    """What a rank does in one step of its schedule.

    Attributes:
        entries: in order.
        bytes, held: what it leaves behind, less what was there before, in all and by category.
        crest: the most that it holds beyond what was held when it began (None: nothing is noted in it).
    """

    entries: list[Entry]
    bytes: int
    held: Held
    crest: Crest | None


# The clocks of outlines: when ranks meet, as `shardlab.simulate.timeline.run` has it for whole tapes.
#
# Messages wait for their receives here, and every communicator has a stream of its own, as on NCCL.


Meeting = tuple[Hashable, int]
"""A communication between rows: its channel, and its number on it."""


Row = tuple[Sequence[Entry], Sequence[Join]]
"""What a rank does, and its part in a message on each of its ways."""


def step_seconds(rows: Sequence[Row], contention: float = 0.0, lag: Lag = NO_LAG) -> float:
    """Find how long it takes until the last row has ended.

    Args:
        contention, lag: see `Prices`.
    """
    return _OutlineClocks(rows, contention, lag).run()


NOT_YET = -1.0

Times = list[float]
"""When a communication starts and ends (`NOT_YET`: others have still to come)."""


class _OutlinedRow:
    """Where a row has got to.

    Attributes:
        at, clock: the entry that is next, and when.
        collectives: what it has begun, in order.
        messages: those on each of its ways that were not waited for.
        free: when each stream is, of groups that are not across rows.
        joined: how many communications it has joined, by channel.
        idle: when it stood still; noted where communication takes time from compute.
        waits: for what it stands still (None: for nothing).
    """

    def __init__(self, row: Row) -> None:
        self.entries, self.ways = row
        self.at, self.clock = 0, 0.0
        self.collectives: list[Times] = []
        self.messages: list[list[Times]] = [[] for _ in self.ways]
        self.free: dict[Hashable, float] = defaultdict(float)
        self.joined: dict[Hashable, int] = defaultdict(int)
        self.idle: list[Idle] = []
        self.waits: Times | None = None


class _OutlineClocks:
    def __init__(self, rows: Sequence[Row], contention: float, lag: Lag) -> None:
        self._rows = [_OutlinedRow(row) for row in rows]
        self._contention, self._lag = contention, lag
        self._free: dict[Hashable, float] = defaultdict(float)  # streams across rows
        self._joined: dict[Meeting, list[tuple[int, Join, Times]]] = defaultdict(list)  # rows, and their parts
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
        assert all(row.waits is None for row in self._rows), "every message is sent and received"
        return self._end

    def _push(self, time: float, coming: int | Meeting) -> None:
        heapq.heappush(self._heap, (time, next(self._tie), coming))

    def _advance(self, number: int, now: float) -> None:
        """Go on with a row until it meets others, in the order of time, or waits for them."""
        row = self._rows[number]
        clock, collectives, free, entries = row.clock, row.collectives, row.free, row.entries
        computed = latest = 0.0
        for at in range(row.at, len(entries)):
            entry = entries[at]
            if isinstance(entry, Compute):
                clock = computed = clock + entry.seconds
            elif isinstance(entry, Issue):
                group, seconds = entry
                start = free[group]
                if start < clock:
                    start = clock
                end = free[group] = start + seconds
                collectives.append([start, end])
                if end > latest:
                    latest = end
            elif isinstance(entry, Await) or isinstance(entry, Take):  # noqa: SIM101  # a union takes twice as long
                alike, place = (
                    (collectives, -entry.ago) if isinstance(entry, Await) else (row.messages[entry.way], entry.turn)
                )
                times = alike[place]
                start, end = times
                if end == NOT_YET:
                    row.waits = times
                    break
                if isinstance(entry, Take):
                    alike.pop(place)
                if self._contention or self._lag.most:
                    end = waited_until(row.idle, clock, start, end, self._contention, self._lag)
                    if end > clock:
                        row.idle.append(Idle(-1, clock, end))
                if end > clock:
                    clock = end
            elif clock > now:
                self._push(clock, number)
                break
            else:
                times = [NOT_YET, NOT_YET]
                if isinstance(entry, OutlinedMessage):
                    row.messages[entry.way].append(times)
                    joins = row.ways[entry.way]
                else:
                    collectives.append(times)
                    joins = entry
                self._join(number, joins, times, now)
                clock += joins.blocks
        else:
            at = len(entries)
        row.at, row.clock = at, clock
        self._end = max(self._end, computed, latest)

    def _join(self, number: int, entry: Join, times: Times, now: float) -> None:
        joined, channel = self._rows[number].joined, entry.channel
        meeting = channel, joined[channel]
        joined[channel] += 1
        members = self._joined[meeting]
        members.append((number, entry, times))
        if len(members) == entry.members:
            self._push(now, meeting)

    def _meet(self, meeting: Meeting, now: float) -> None:
        """Run what all members have joined, when its stream is free; those who wait for it go on."""
        members = self._joined.pop(meeting)
        stream, seconds = members[-1][1].stream, members[-1][1].seconds
        start = max(now, self._free[stream])
        end = self._free[stream] = start + seconds
        self._end = max(self._end, end)
        for number, _, times in members:
            times[:] = start, end
            row = self._rows[number]
            if row.waits is times:
                row.waits = None
                self._push(max(row.clock, now), number)

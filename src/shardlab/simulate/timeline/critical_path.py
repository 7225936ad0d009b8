"""Critical path of a step: the chain of ops whose times add up to the step's duration.

The path is followed from the end of the step back to its start. A compute op starts when the previous op of its rank
has ended. A WAIT ends with its communication. A communication starts when its last member arrives, or when its stream
becomes free. `critical_path` returns the links of the path; `path_parts` adds them up by purpose.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardlab.language import OpKind
from shardlab.language.tape import Participant
from shardlab.simulate.timeline.prices import Traced, awaited_by, awaited_text
from shardlab.simulate.timeline.run import Times

WAIT, SEND = OpKind.WAIT, OpKind.SEND


class PathLink(NamedTuple):
    """Link of a critical path: an interval that one op takes.

    Attributes:
        row, op: row and index of the op.
        start, end: start and end of the interval.
        held_up: whether the interval is time by which a communication slowed compute down.
    """

    row: int
    op: int
    start: float
    end: float
    held_up: bool = False


class ClockMove(NamedTuple):
    """Interval in which a rank's clock advances: a compute op, or a WAIT in which the rank is idle.

    Attributes:
        op: index of the op in the tape.
        cause: index of the op that issued the awaited communication; for a compute op, `op`.
        start, end: start and end of the interval.
    """

    op: int
    cause: int
    start: float
    end: float


def critical_path(traced: Traced, times: Times) -> list[PathLink]:
    """Return the links of the critical path in order; each starts when the previous one ends."""
    return _PathWalk(traced, times).run()


class _PathWalk:
    def __init__(self, traced: Traced, times: Times) -> None:
        self.traced, self.times = traced, times
        self.tapes = traced.program.tapes
        self.items = [self._items(row) for row in range(len(self.tapes))]
        self.ends = [
            {times.ends[row][index]: index for index, op in enumerate(tape) if op[4] >= 0 and op[0] is not WAIT}
            for row, tape in enumerate(self.tapes)
        ]
        self.links: list[PathLink] = []

    def run(self) -> list[PathLink]:
        end = self.times.end
        row = max(range(len(self.tapes)), key=lambda row: max(self.times.ends[row], default=0.0))
        last = self.items[row][-1].end if self.items[row] else 0.0
        state = (row, len(self.tapes[row]), end)
        if last < end:
            state = self._through(row, self.ends[row][end])
        while state is not None:
            state = self._link_before(*state)
        return self.links[::-1]

    def _items(self, row: int) -> list[ClockMove]:
        starts, ends, idle = self.times.starts[row], self.times.ends[row], self.times.idle[row]
        issued: dict[int, int] = {}
        items: list[ClockMove] = []
        stood, step = 0, self.times.end
        for index, op in enumerate(self.tapes[row]):
            handle = op[4]
            if op[0] is WAIT:
                if stood < len(idle) and idle[stood].op == issued.get(handle):
                    cause, since, until = idle[stood]
                    stood += 1
                    if since < step:  # the step ends with its last op
                        items.append(ClockMove(index, cause, since, min(until, step)))
            elif handle >= 0:
                issued[handle] = index
            elif ends[index] > starts[index]:
                items.append(ClockMove(index, index, starts[index], ends[index]))
        return items

    def _link_before(self, row: int, index: int, time: float) -> tuple[int, int, float] | None:
        """Add the link that ends at `time`, before op `index` of a row.

        Returns:
            Row, op and time at which the path continues (None: the start of the step).
        """
        items = self.items[row]
        place = bisect_left(items, index, key=lambda item: item.op) - 1
        if place < 0:
            if time > 0.0:  # a send that blocks its rank advances the clock without a `ClockMove`
                self._link(row, self._last_send(row, 0, index), 0.0, time)
            return None
        item = items[place]
        if item.end < time:
            self._link(row, self._last_send(row, item.op, index), item.end, time)
            return row, item.op + 1, item.end
        if item.op == item.cause:
            self._link(row, item.op, item.start, item.end)
            return row, item.op, item.start
        communication_end = self.times.ends[row][item.cause]
        if communication_end < item.end:  # the rank makes up for compute that the communication has slowed down
            begin = max(communication_end, item.start)
            self._link(row, item.cause, begin, item.end, held_up=True)
            if begin == item.start:
                return row, item.op, item.start
        return self._through(row, item.cause)

    def _through(self, row: int, index: int) -> tuple[int, int, float] | None:
        """Add a communication, and the communications that occupied its stream before it.

        Returns:
            For the first of them, the row and op of the member that arrived last, and the time of its arrival (None: it
            arrived at the start of the step).
        """
        while True:
            start, end, ready = (of[row][index] for of in (self.times.starts, self.times.ends, self.times.ready))
            self._link(row, index, start, end)
            number = self.traced.communication_of[row][self.tapes[row][index][4]]
            members = self.traced.communications[number].participants
            occupant = self._on_the_stream(members, start) if start > ready else None
            if occupant is None:
                arrivals = [(self._came(rank, op), rank, op) for rank, _, op in members]
                last, rank, op = max(arrivals, key=lambda arrival: (arrival[0] == start, arrival[0]))
                if last == start or (occupant := self._under_way(members, start)) is None:
                    return (rank, op, start) if start > 0.0 else None
            row, index = occupant

    def _on_the_stream(self, members: Sequence[Participant], start: float) -> tuple[int, int] | None:
        """Return the communication that occupied a member's stream until this one started."""
        for rank, _, _ in members:
            occupant = self.ends[rank].get(start)
            if occupant is not None and self.times.starts[rank][occupant] < start:
                return rank, occupant
        return None

    def _under_way(self, members: Sequence[Participant], start: float) -> tuple[int, int] | None:
        """Return the send that ended when its receive started (None: there is none)."""
        sends = [(rank, op) for rank, _, op in members if self.times.ends[rank][op] == start]
        return next((send for send in sends if self.times.starts[send[0]][send[1]] < start), None)

    def _came(self, row: int, index: int) -> float:
        """Return the time at which a rank reached an op."""
        items = self.items[row]
        place = bisect_left(items, index, key=lambda item: item.op) - 1
        return items[place].end if place >= 0 else 0.0

    def _last_send(self, row: int, since: int, until: int) -> int:
        """Return the index of the last SEND between two ops (`since`: there is none)."""
        tape = self.tapes[row]
        return next((index for index in range(until - 1, since - 1, -1) if tape[index][0] is SEND), since)

    def _link(self, row: int, op: int, start: float, end: float, *, held_up: bool = False) -> None:
        if end > start:
            self.links.append(PathLink(row, op, start, end, held_up))


def path_parts(traced: Traced, links: list[PathLink], place: Callable[[int], str] | None = None) -> dict[str, float]:
    """Return the seconds of a path by purpose, largest first, such as `backward of feed-forward` or `all-gather on tp`.

    Args:
        traced: the program.
        links: links of the path.
        place: function from a layer to its position in the model as text.
    """
    parts = defaultdict[str, float](float)
    for link in links:
        parts[_part(traced, link, place)] += link.end - link.start
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _part(traced: Traced, link: PathLink, place: Callable[[int], str] | None) -> str:
    op = traced.program.tapes[link.row][link.op]
    name = op.kind.row.hyphenated
    if op.group is not None or op.peer >= 0:
        text = awaited_text(awaited_by(traced.program, link.row, op))
        return f"compute slowed by {text}" if link.held_up else text
    if op.layer < 0 or place is None:
        return name
    location = "head" if op.layer == traced.program.layers else place(op.layer)
    return (
        f"{name} of {location.rpartition(', ')[2]}"
        if not location.startswith("block ") or ", " in location
        else f"{name} of blocks"
    )

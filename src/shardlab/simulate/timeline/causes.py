"""Causes: why each op of a step starts when it does, and why a rank is idle, for simulated and measured steps.

An `Activity` has the ops of each rank in tape order, with the communications that the rank awaits between them.
`activity_of` makes one from a timeline. `find_causes` gives every op the op for which it had to wait: the compute op
before it on its rank, an awaited communication, the last member of a collective to arrive, the send of a message, or
the communication that occupied its stream. Followed from op to op, the causes lead back to the start of the step.
`find_gaps` lists the intervals in which ranks do not compute, each with the communication that ends it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from shardlab.language import OpKind
from shardlab.language.ops import COMMUNICATION
from shardlab.simulate.timeline.timeline import Event, Timeline, is_event

TOLERANCE = 1e-9
"""Difference, as a share of the step, below which two times count as equal."""

Place = tuple[int, int]
"""(row, index among the row's ops) of an op in an `Activity`."""


class Reason(Enum):
    """Reason why an op does not start earlier.

    FIRST: nothing comes before it. BUSY: its rank computed another op. WAITED: its rank waited for a communication.
    MEMBER: another member of its communication arrived later. SENT: the op is a receive, and the send of its message
    ended after the receiver had reached it. STREAM: another communication occupied its stream. UNKNOWN: no recorded op
    ended at that time.
    """

    FIRST = "first"
    BUSY = "busy"
    WAITED = "waited"
    MEMBER = "member"
    SENT = "sent"
    STREAM = "stream"
    UNKNOWN = "unknown"


class Cause(NamedTuple):
    """Reason why an op does not start earlier, and the op for which it waits (None: no recorded op comes before it)."""

    reason: Reason
    place: Place | None = None


class TimedOp(NamedTuple):
    """Op of one rank that takes time.

    Attributes:
        op: index on the tape, or in a trace.
        kind: kind of the op.
        start, end: start and end time.
        waits: communications that the rank awaits between the previous op and this one, as indices of the rank's ops.
        communication: index in `Activity.communications` (-1: the op computes, or the other members are unknown).
    """

    op: int
    kind: OpKind
    start: float
    end: float
    waits: tuple[int, ...] = ()
    communication: int = -1

    @property
    def computes(self) -> bool:
        return self.kind not in COMMUNICATION


class Activity(NamedTuple):
    """Ops of all ranks in a step.

    Attributes:
        rows: for each rank its ops, in the order in which it reached them.
        communications: members of each communication; of a message the sender, then the receiver.
        last_waits: for each rank the communications that it awaits after its last op.
        end: end of the step.
    """

    rows: list[list[TimedOp]]
    communications: list[list[Place]]
    last_waits: list[tuple[int, ...]]
    end: float


class ComputeGap(NamedTuple):
    """Interval in which a rank does not compute.

    Attributes:
        row: the rank's row.
        start, end: start and end of the interval.
        awaited: the communication that ends it, as an index of the rank's ops (None: none was recorded).
        next_compute: the compute op that ends it (None: the step ends).
    """

    row: int
    start: float
    end: float
    awaited: int | None
    next_compute: int | None


def activity_of(timeline: Timeline) -> Activity:
    """Return the ops of a timeline. Ops that were not measured are left out."""
    rows: list[list[TimedOp]] = []
    last_waits: list[tuple[int, ...]] = []
    places: list[dict[int, int]] = []
    for tape, events in zip(timeline.program.tapes, timeline.events, strict=True):
        by_op = {event.op: event for event in events}
        ops: list[TimedOp] = []
        place_of: dict[int, int] = {}
        issued: dict[int, int] = {}
        waits: list[int] = []
        for index, op in enumerate(tape):
            if op.kind is OpKind.WAIT:
                if op.handle in issued:
                    waits.append(issued[op.handle])
            elif is_event(op.kind) and index in by_op:
                event: Event = by_op[index]
                place_of[index] = len(ops)
                if op.handle >= 0:
                    issued[op.handle] = len(ops)
                ops.append(TimedOp(index, op.kind, event.start, event.end, tuple(waits)))
                waits = []
        rows.append(ops)
        last_waits.append(tuple(waits))
        places.append(place_of)
    communications: list[list[Place]] = []
    for communication in timeline.communications:
        members = [(row, places[row][index]) for row, _, index in communication.participants if index in places[row]]
        for row, place in members:
            rows[row][place] = rows[row][place]._replace(communication=len(communications))
        communications.append(members)
    return Activity(rows, communications, last_waits, timeline.end)


def find_arrivals(activity: Activity) -> list[list[float]]:
    """Return for each rank when it reached each op: the start of a compute op, the issue of a communication."""
    arrivals: list[list[float]] = []
    for ops in activity.rows:
        clock, reached = 0.0, list[float]()
        for op in ops:
            clock = max([clock, *(ops[index].end for index in op.waits)])
            clock = max(clock, op.start) if op.computes else clock
            reached.append(clock)
            clock = max(clock, op.end) if op.computes else clock
        latest = activity.end  # `clock` may be too late: the sender of a message on a link does not await its arrival
        for index in range(len(ops) - 1, -1, -1):
            latest = min(latest, ops[index].start) if ops[index].computes else latest
            reached[index] = min(reached[index], latest, ops[index].start)
        arrivals.append(reached)
    return arrivals


def find_gaps(activity: Activity) -> Iterator[ComputeGap]:
    """Yield the intervals in which a rank does not compute, from the start of the step to its end."""
    tolerance = TOLERANCE * activity.end
    for row, ops in enumerate(activity.rows):
        clock, waits = 0.0, list[int]()
        for index, op in enumerate(ops):
            waits += op.waits
            if op.computes:
                if op.start > clock + tolerance:
                    yield ComputeGap(
                        row, clock, op.start, _last_awaited(ops, waits, clock, op.start + tolerance), index
                    )
                clock, waits = max(clock, op.end), []
        if activity.end > clock + tolerance:
            waits += activity.last_waits[row]
            awaited = _last_awaited(ops, waits, clock, activity.end + tolerance)
            until = max(clock, ops[awaited].end) if awaited is not None else clock
            if until > clock + tolerance:
                yield ComputeGap(row, clock, until, awaited, None)
            if activity.end > until + tolerance:
                yield ComputeGap(row, until, activity.end, None, None)


def find_causes(activity: Activity) -> list[list[Cause]]:
    """Return for each op of each rank the cause of its start time."""
    return _Causes(activity).run()


def _last_awaited(ops: Sequence[TimedOp], waits: Sequence[int], since: float, until: float) -> int | None:
    """Return the awaited communication that ends last between two times (None: none ends there)."""
    candidates = [index for index in waits if since < ops[index].end <= until]
    return max(candidates, key=lambda index: ops[index].end, default=None)


class _Causes:
    def __init__(self, activity: Activity) -> None:
        self.activity, self.rows = activity, activity.rows
        self.tolerance = TOLERANCE * activity.end
        self.arrivals = find_arrivals(activity)
        self.ends: list[list[tuple[float, int]]] = [  # communications of each row, sorted by end
            sorted((op.end, index) for index, op in enumerate(ops) if not op.computes and op.end > op.start)
            for ops in activity.rows
        ]
        self.earlier_compute = [list(self._compute_before(ops)) for ops in activity.rows]

    def run(self) -> list[list[Cause]]:
        return [
            [
                self._on_rank(row, index) if op.computes else self._of_communication(row, index)
                for index, op in enumerate(ops)
            ]
            for row, ops in enumerate(self.rows)
        ]

    @staticmethod
    def _compute_before(ops: Sequence[TimedOp]) -> Iterator[tuple[int | None, tuple[int, ...]]]:
        """Yield for each op the last compute op before it, and the communications awaited between the two."""
        last: int | None = None
        waits: tuple[int, ...] = ()
        for index, op in enumerate(ops):
            waits += op.waits
            yield last, waits
            if op.computes and (op.end > op.start or last is None):
                last, waits = index, ()

    def _on_rank(self, row: int, index: int) -> Cause:
        """Return the cause of the time at which a rank reaches an op."""
        ops, (last, waits) = self.rows[row], self.earlier_compute[row][index]
        since = ops[last].end if last is not None else 0.0
        arrival = self.arrivals[row][index]
        awaited = _last_awaited(ops, waits, since, arrival + self.tolerance)
        if awaited is not None:
            return Cause(Reason.WAITED, (row, awaited))
        if last is None:
            return Cause(Reason.FIRST if arrival <= self.tolerance else Reason.UNKNOWN)
        return Cause(Reason.BUSY if arrival <= since + self.tolerance else Reason.UNKNOWN, (row, last))

    def _of_communication(self, row: int, index: int) -> Cause:
        op = self.rows[row][index]
        members = self.activity.communications[op.communication] if op.communication >= 0 else [(row, index)]
        if op.kind is OpKind.RECV and len(members) == 2:
            sender = members[0]
            send = self.rows[sender[0]][sender[1]]
            if send.end <= op.start + self.tolerance and send.end > self.arrivals[row][index] + self.tolerance:
                return Cause(Reason.SENT, sender)
            if send.end <= op.start + self.tolerance:  # the send ended before the receive was issued
                members = [(row, index)]
        if op.kind is OpKind.SEND and members[1:]:
            receive = self.rows[members[1][0]][members[1][1]]
            if receive.start > op.start + self.tolerance:  # buffered: a send starts alone
                members = [(row, index)]
        arrival, last = max((self.arrivals[r][a], (r, a)) for r, a in members)
        if op.start > arrival + self.tolerance and (occupant := self._on_stream(members, op.start)) is not None:
            return Cause(Reason.STREAM, occupant)
        if last != (row, index) and arrival > self.arrivals[row][index] + self.tolerance:
            return Cause(Reason.MEMBER, last)
        return self._on_rank(row, index)

    def _on_stream(self, members: Sequence[Place], start: float) -> Place | None:
        """Return the communication that occupied a member's stream until this one started."""
        for row, _ in members:
            ends = self.ends[row]
            place = bisect_right(ends, (start + self.tolerance, len(self.rows[row]))) - 1
            if place >= 0 and ends[place][0] >= start - self.tolerance:
                return row, ends[place][1]
        return None

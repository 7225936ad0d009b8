"""Entries of compressed steps, and the clocks that replay them.

An entry is some seconds of compute, a pass whose collectives may have to queue behind others, a communication, or a
wait. A wait identifies its collective by counting back from the latest one of the group, not by an absolute number. So
the same entries can be replayed at any position of a schedule.

A row is the sequence of entries of one rank, which represents all ranks at its position of the pipeline.
`step_seconds` replays all rows together, on the event loop that also replays whole tapes. Messages are always
rendezvous here, and every communicator has a separate stream, as on NCCL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, final

from shardlab.language import Group, OpKind
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.simulate.predict.compressed.sample import MeasuredPass, SizedPart
from shardlab.simulate.timeline.event_loop import PENDING, EventLoop, IdlePattern, PendingCommunication, StartEnd
from shardlab.simulate.timeline.memory import MemoryChange
from shardlab.simulate.timeline.prices import Awaited

Interval = tuple[float, float]
"""Start and end, in seconds."""

Exposed = Sequence[tuple[Awaited, float]]
"""Seconds in which a rank waits for communication, by kind and axis."""

MESSAGE: Awaited = (OpKind.SEND, "pp")


@final
class Compute:
    """Seconds of compute, and of collectives that are awaited immediately and delay nothing else.

    A `StepRecorder` adds subsequent compute to the same entry.

    Attributes:
        seconds: duration.
        waits: idle intervals, relative to the start of the entry. They are only recorded if communication slows compute
            down.
        exposed: the seconds of the collectives, by kind and axis. They are part of `seconds`.
    """

    __slots__ = ("_idle", "exposed", "seconds", "waits")

    def __init__(self, seconds: float, waits: Sequence[Interval] = (), exposed: Exposed = ()) -> None:
        self.seconds, self.waits, self.exposed = seconds, list(waits), list(exposed)
        self._idle: IdlePattern | None = None

    def extend(self, seconds: float, waits: Sequence[Interval], exposed: Exposed) -> None:
        """Add subsequent compute."""
        if waits:
            earlier_seconds = self.seconds
            self.waits += [(earlier_seconds + start, earlier_seconds + end) for start, end in waits]
        if exposed:
            self.exposed += exposed
        self.seconds += seconds

    @property
    def idle(self) -> IdlePattern:
        """The idle intervals as an `IdlePattern`."""
        if self._idle is None:
            self._idle = IdlePattern.from_intervals(self.waits)
        return self._idle


@final
class LocalCollective(NamedTuple):
    """Collective whose members are all in one stage, so they arrive together. It runs on the stream of its group."""

    group: Group
    seconds: float


@final
class AwaitCollective(NamedTuple):
    """Wait for one of a group's collectives, identified by counting back: `ago` is 1 for the latest one.

    If the wait is repeated for missing blocks and `stride` is positive, each repetition waits for the collective that
    was started `stride` collectives after the one of the previous repetition. If `stride` is 0, `ago` is the same in
    each repetition.
    """

    group: Group
    ago: int
    kind: OpKind
    stride: int = 0


@final
class Rendezvous(NamedTuple):
    """One row's part in its next communication on a channel with other rows.

    Attributes:
        channel: key of the channel. All its rows join the communications on a channel in the same order.
        stream: key of the stream. The communications on a stream take turns; they are those of one group, or the
            messages between two ranks.
        members: how many rows take part.
        seconds: duration of the collective, or of each message. Messages that are sent together run one after the
            other.
        blocks: seconds in which the row computes nothing after it has arrived.
    """

    channel: Hashable
    stream: Hashable
    members: int
    seconds: Sequence[float]
    blocks: float = 0.0


@final
class PostMessage(NamedTuple):
    """Start of a route's messages: the row posts its sends to another row, or its receives from it.

    Attributes:
        route: position of the `Route` among those of the rank.
    """

    route: int


@final
class AwaitMessage(NamedTuple):
    """Wait for messages that were posted together.

    Attributes:
        route: position of the `Route` among those of the rank.
        turn: position among the posted messages of the route that the rank has not awaited yet (0: the oldest).
    """

    route: int
    turn: int


class Route(NamedTuple):
    """Messages of one kind between two pipeline ranks.

    Attributes:
        sends: whether this rank sends them.
        offset: position of the peer in the pipeline, relative to this rank.
        parts: the values that are sent together, one message each.
        layer: the layer that received activations enter, or to whose inputs received gradients belong (-1: this rank
            sends the values).
    """

    sends: bool
    offset: int
    parts: tuple[SizedPart, ...]
    layer: int = -1


Entry = Compute | MeasuredPass | LocalCollective | AwaitCollective | Rendezvous | PostMessage | AwaitMessage


class CompressedStep(NamedTuple):
    """One step of a rank's schedule, as input of its clock and its memory ledger.

    Attributes:
        entries: the entries, in order.
        memory: change of the rank's memory.
    """

    entries: list[Entry]
    memory: MemoryChange


Row = tuple[Sequence[Entry], Sequence[Rendezvous]]
"""Entries of one rank for a whole optimizer step, and its part in the messages of each route."""


def step_seconds(rows: Sequence[Row], contention: float = 0.0, lag: Lag = NO_LAG) -> float:
    """Return the time in seconds at which the last row ends.

    Args:
        rows: one for each pipeline rank.
        contention, lag: time that a row loses to communication in flight, and at each wait (see `Prices`).
    """
    return _run_clocks(rows, contention, lag).end


class RowParts(NamedTuple):
    """Seconds in which rows compute, and in which they wait for communication.

    Attributes:
        end: time at which the last row ends.
        computing: seconds in which rows compute, summed over rows.
        exposed: by kind and axis, seconds in which rows wait for communication whose members have all arrived, summed
            over rows.
    """

    end: float
    computing: float
    exposed: Mapping[Awaited, float]


def row_parts(rows: Sequence[Row], contention: float = 0.0, lag: Lag = NO_LAG) -> RowParts:
    """Return the seconds in which rows compute and wait. The arguments are those of `step_seconds`."""
    clocks = _run_clocks(rows, contention, lag)
    computing, exposed = 0.0, clocks.exposed
    for entries, _ in rows:
        for entry in entries:
            if isinstance(entry, (Compute, MeasuredPass)):
                computing += entry.seconds - sum([seconds for _, seconds in entry.exposed])
                for awaited, seconds in entry.exposed:
                    exposed[awaited] += seconds
    return RowParts(clocks.end, computing, exposed)


def _run_clocks(rows: Sequence[Row], contention: float, lag: Lag) -> _RowClocks:
    clocks = _RowClocks(rows, contention, lag)
    assert not clocks.run_rows(), "every message is sent and received"
    return clocks


class _RowState:
    """Collectives and messages that a row has started.

    Attributes:
        entries: entries of the row.
        routes: its part in the messages of each route.
        collectives: by group, the collectives that the row has started, in order: the times at which all members have
            arrived, at which it starts, and at which it ends.
        messages: by route, the posted messages that the row has not awaited, in order: the times at which both ranks
            have arrived, at which the transfer starts, and at which each message ends.
    """

    def __init__(self, row: Row) -> None:
        self.entries, self.routes = row
        self.collectives: dict[Hashable, list[StartEnd]] = defaultdict(list)
        self.messages: list[list[StartEnd]] = [[] for _ in self.routes]


class _Meeting(PendingCommunication):
    """Communication between rows that not all of them have joined yet.

    Attributes:
        part: the part of the row that joined first.
    """

    __slots__ = ("part",)

    def __init__(self, part: Rendezvous) -> None:
        super().__init__()
        self.part = part


class _RowClocks(EventLoop[_Meeting]):
    """Clocks of all rows.

    Attributes:
        end: time at which the last row has ended.
        exposed: seconds in which rows wait at an entry for communication, by kind and axis.
    """

    def __init__(self, rows: Sequence[Row], contention: float, lag: Lag) -> None:
        super().__init__(len(rows), contention, lag)
        self._rows = [_RowState(row) for row in rows]
        self._free: dict[Hashable, float] = defaultdict(float)  # stream across rows to the time at which it is free
        self._open: dict[Hashable, list[_Meeting]] = defaultdict(list)  # by channel, those not yet complete
        self.end, self.exposed = 0.0, defaultdict[Awaited, float](float)

    def advance(self, row: int, now: float) -> None:
        state = self._rows[row]
        collectives, messages, entries = state.collectives, state.messages, state.entries
        clock = self.clocks[row]
        computed = latest = 0.0
        for index in range(self.next_ops[row], len(entries)):
            entry = entries[index]
            # types are final and compared, since isinstance takes twice as long; the most frequent ones come first
            if type(entry) is Compute:
                if entry.waits:
                    self.idle[row].append_pass(clock, entry.idle)
                clock = computed = clock + entry.seconds
            elif type(entry) is LocalCollective:
                group, seconds = entry
                queue = collectives[group]
                start = queue[-1][2] if queue else clock  # when the stream is free
                if start < clock:
                    start = clock
                end = start + seconds
                queue.append([clock, start, end])
                if end > latest:
                    latest = end
            elif type(entry) is AwaitCollective:
                group, ago, kind, _ = entry
                times = collectives[group][-ago]
                if times[1] == PENDING:
                    self.wait(row, index, clock, times)
                    break
                if times[-1] > clock or self.slows:
                    clock = self._end_of_wait(row, clock, times, (kind, group.axis))
            elif type(entry) is AwaitMessage:
                route, turn = entry
                times = messages[route][turn]
                if times[1] == PENDING:
                    self.wait(row, index, clock, times)
                    break
                del messages[route][turn]
                if times[-1] > clock or self.slows:
                    clock = self._end_of_wait(row, clock, times, MESSAGE)
            elif type(entry) is PostMessage:
                clock += self._join(row, clock, state.routes[entry.route], messages[entry.route])
            elif type(entry) is MeasuredPass:
                clock = computed = self._pass_end(row, entry, clock)
            else:
                clock += self._join(row, clock, entry, collectives[entry.channel])
        else:
            self.next_ops[row], self.clocks[row] = len(entries), clock
        self.end = max(self.end, computed, latest)

    def _end_of_wait(self, row: int, clock: float, times: StartEnd, awaited: Awaited) -> float:
        """Return the time at which a row resumes computing after its wait for a communication.

        If communication slows compute down, this includes the time that the row has lost to the communication.
        """
        ready, resumes = times[0], clock
        if self.slows:
            start = times[1]
            for end in times[2:]:
                resumes = self.idle[row].wait(resumes, start, end, self.contention, self.lag)
                start = end
        elif times[-1] > clock:
            resumes = times[-1]
        if resumes > clock and resumes > ready:
            self.exposed[awaited] += resumes - (clock if clock > ready else ready)
        return resumes

    def _join(self, row: int, clock: float, part: Rendezvous, started: list[StartEnd]) -> float:
        """Join a row to its next communication on a channel, and return the seconds in which it computes nothing."""
        meetings = self._open[part.channel]
        for meeting in meetings:
            if row not in meeting.rows:
                break
        else:
            meeting = _Meeting(part)
            meetings.append(meeting)
        meeting.rows.append(row)
        started.append(meeting.times)
        if clock > meeting.ready:
            meeting.ready = clock
        if len(meeting.rows) == part.members:
            meetings.remove(meeting)
            self.push(meeting.ready, meeting)
        return part.blocks

    def _pass_end(self, row: int, measured_pass: MeasuredPass, clock: float) -> float:
        """Return the end of a pass. Each of its collectives starts when its stream is free, and is awaited at once."""
        collectives, idle = self._rows[row].collectives, self.idle[row]
        free = {group: collectives[group][-1][2] for group in measured_pass.groups if collectives[group]}
        if not free or max(free.values()) <= clock:
            if measured_pass.waits:
                idle.append_pass(clock, measured_pass.idle)
            return clock + measured_pass.seconds
        for gap, group, seconds, kind in measured_pass.collectives:
            clock += gap
            end = max(clock, free.get(group, clock)) + seconds
            self.exposed[kind, group.axis] += end - clock - seconds  # in addition to those of the pass
            idle.append(clock, end)
            clock = end
        return clock + measured_pass.rest

    def start(self, communication: _Meeting, ready: float) -> None:
        part, times = communication.part, communication.times
        start = self._free[part.stream]
        times[:] = ready, *accumulate(part.seconds, initial=start if start > ready else ready)
        end = self._free[part.stream] = times[-1]
        if end > self.end:
            self.end = end
        for row in communication.rows:
            self.wake(row, times, ready)

"""Event loop of a replay: rows of ops, and the communications between them.

A row is the list of ops of one rank, or of a rank that stands for several. A row advances until it waits for a
communication that has not started. Communications start in the order in which they become ready, since communications
on one stream take turns in that order. A row may run ahead of the loop's current time: a communication that it issues
then becomes ready later. A row may also stop, and continue when the loop has reached the row's time.

`EventLoop` is the loop. `Clocks` (`shardlab.simulate.timeline.run`) replays whole tapes on it, and `step_seconds`
(`shardlab.simulate.predict.compressed.clocks`) replays compressed steps. `IdleLog` records when a row was idle, for
prices with contention.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate, count
from typing import Generic, NamedTuple, TypeVar

from shardlab.language.pass_names import NO_LAG, Lag

PENDING = -1.0

StartEnd = list[float]
"""Start and end of a communication; both are `PENDING` until they are known."""

C = TypeVar("C", bound=Hashable)
"""Key of a communication."""


class PendingCommunication:
    """Communication that some members have not joined yet.

    Attributes:
        times: start and end, a list that all members share.
        ready: latest arrival of a member so far.
        rows: rows of the members that have joined so far.
    """

    __slots__ = ("ready", "rows", "times")

    def __init__(self) -> None:
        self.times = [PENDING, PENDING]
        self.ready = 0.0
        self.rows: list[int] = []


class EventLoop(Generic[C]):
    """Loop over rows and communications in the order of time.

    Args:
        rows: number of rows.
        contention, lag: time that a row loses to communication in flight, and at each wait (see `Prices`).

    Attributes:
        next_ops: for each row, the index of its next op.
        clocks: for each row, the time at which its next op starts.
        slows: whether communication slows compute down.
        pending: communications that some members have joined.
        idle: for each row, its idle intervals. They are only recorded if communication slows compute down.
    """

    def __init__(self, rows: int, contention: float, lag: Lag) -> None:
        self.next_ops, self.clocks = [0] * rows, [0.0] * rows
        self.contention, self.lag, self.slows = contention, lag, contention > 0 or lag.most > 0
        self.idle = [IdleLog() for _ in range(rows)]
        self._waits: dict[int, StartEnd] = {}
        self.pending: dict[C, PendingCommunication] = {}
        self._tie = count()
        # time, turn, tie, row that continues or -1, communication
        self._heap: list[tuple[float, int, int, int, C | None]] = []

    @abstractmethod
    def advance(self, row: int, now: float) -> None:
        """Advance a row to its end, or until it calls `wait` or `stop`."""

    @abstractmethod
    def start(self, communication: C, ready: float) -> None:
        """Start a communication that is ready, and `wake` its members."""

    def run_rows(self) -> list[int]:
        """Run to the end, and return the rows that are blocked for ever."""
        for row in range(len(self.next_ops)):
            self.stop(row, 0, 0.0)
        while self._heap:
            now, _, _, row, communication = heapq.heappop(self._heap)
            if communication is None:
                self.advance(row, now)
            else:
                self.start(communication, now)
        return list(self._waits)

    def push(self, ready: float, communication: C, turn: int = 0) -> None:
        """Put a communication into the queue. The loop calls `start` for it at time `ready`.

        Args:
            ready: the time from which the communication waits only for streams that are still busy.
            communication: the communication.
            turn: its order among those ready at the same time; rows that continue at that time have turn 0.
        """
        heapq.heappush(self._heap, (ready, turn, next(self._tie), -1, communication))

    def join(self, communication: C, members: int, row: int, clock: float) -> PendingCommunication:
        """Join a row to a communication of several members, which is ready when its last member has arrived."""
        joined = self.pending.get(communication)
        if joined is None:
            joined = self.pending[communication] = PendingCommunication()
        joined.rows.append(row)
        if clock > joined.ready:
            joined.ready = clock
        if len(joined.rows) == members:
            self.push(joined.ready, communication)
        return joined

    def stop(self, row: int, index: int, clock: float) -> None:
        """Stop a row, which continues at an op when time `clock` has come."""
        self.next_ops[row], self.clocks[row] = index, clock
        heapq.heappush(self._heap, (clock, 0, next(self._tie), row, None))

    def wait(self, row: int, index: int, clock: float, times: StartEnd) -> None:
        """Block a row at an op until a communication has started."""
        self.next_ops[row], self.clocks[row], self._waits[row] = index, clock, times

    def wake(self, row: int, times: StartEnd, now: float) -> None:
        """Resume a row if it waits for a communication that has started."""
        if self._waits.get(row) is times:
            del self._waits[row]
            heapq.heappush(self._heap, (max(self.clocks[row], now), 0, next(self._tie), row, None))


class IdlePattern(NamedTuple):
    """Intervals of a pass in which its rank's compute is idle, in order.

    Attributes:
        starts, ends: start and end of each interval, in seconds from the start of the pass.
        totals: for each interval, the sum of the seconds of the intervals before it; as last entry, that of all
            intervals.
    """

    starts: Sequence[float]
    ends: Sequence[float]
    totals: Sequence[float]

    @classmethod
    def from_intervals(cls, intervals: Sequence[tuple[float, float]]) -> IdlePattern:
        """Return the pattern of intervals, each given by its start and end, in order."""
        totals = accumulate([end - start for start, end in intervals], initial=0.0)
        return cls([start for start, _ in intervals], [end for _, end in intervals], list(totals))

    def seconds_before(self, moment: float) -> float:
        """Return the idle seconds between the start of the pass and `moment` seconds later."""
        number = bisect_right(self.starts, moment)
        if not number:
            return 0.0
        remaining = self.ends[number - 1] - moment
        return self.totals[number] - remaining if remaining > 0 else self.totals[number]


class IdleLog:
    """Intervals in which a rank's compute was idle so far, in order.

    Attributes:
        until: end of the last interval.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._starts, self._totals = list[float](), [0.0]
        # (end of an interval, None) or (start of a pass, its pattern)
        self._patterns: list[tuple[float, IdlePattern | None]] = []

    def append(self, since: float, until: float) -> None:
        """Add an interval."""
        self.until = until
        self._starts.append(since)
        self._totals.append(self._totals[-1] + until - since)
        self._patterns.append((until, None))

    def append_pass(self, since: float, pattern: IdlePattern) -> None:
        """Add the intervals of a pass that starts at time `since`."""
        self.until = since + pattern.ends[-1]
        self._starts.append(since)
        self._totals.append(self._totals[-1] + pattern.totals[-1])
        self._patterns.append((since, pattern))

    def seconds_before(self, moment: float) -> float:
        """Return the idle seconds before a moment."""
        if moment >= self.until:
            return self._totals[-1]
        number = bisect_right(self._starts, moment)
        if not number:
            return 0.0
        end, pattern = self._patterns[number - 1]
        if pattern is not None:
            return self._totals[number - 1] + pattern.seconds_before(moment - end)
        return self._totals[number] - (end - moment if end > moment else 0.0)

    def wait(self, clock: float, start: float, end: float, contention: float, lag: Lag = NO_LAG) -> float:
        """Return the time at which the rank computes again after a WAIT, and add the interval until then.

        Args:
            clock: time at which the rank reaches the WAIT.
            start, end: start and end of the awaited communication.
            contention, lag: see `Prices`. Pass `NO_LAG` for a copy, which involves no other rank.
        """
        resumes = clock if clock > end else end
        if end > start:
            if contention:
                until = clock if clock < end else end
                if until > start:
                    computed = until - start - self.seconds_before(until) + self.seconds_before(start)
                    if computed > 0:
                        resumes += contention * computed
            if lag.most:
                resumes += lag.seconds(clock - self.until, hidden=end <= clock)
        if resumes > clock:
            self.append(clock, resumes)
        return resumes

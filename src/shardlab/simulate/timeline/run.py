"""Clocks: when each op of a traced program starts and ends.

Every rank has a compute stream, and one or more streams for communication. Compute runs in tape order and stops only at
a WAIT. A communication starts when its last member has issued it and the streams of its members are free.
Communications that are ready take a stream in the order in which they became ready. A message on a link that has only
latency takes no stream: it arrives that long after it was issued. If communication takes time from compute
(`Prices.contention`, `Prices.lag`), a rank pays for it at the WAIT.

`simulate` gives the timeline in unit costs. `Clocks` replays with any prices and returns `Times`; `timeline_of` makes
events of them, and `memory_counters` the memory over time that a trace viewer draws.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import NamedTuple

from shardlab.check.in_place import InPlace
from shardlab.language import Op, OpKind, UserError
from shardlab.language.ops import Stream
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.tape import Communication, Participant, queue_key
from shardlab.simulate.timeline.memory import CATEGORIES, Category, live_memory, memory_in_bytes
from shardlab.simulate.timeline.prices import UNIT_COSTS, Costs, PriceList, Prices, Traced
from shardlab.simulate.timeline.timeline import Event, Timeline, is_event


def simulate(traced: Traced, costs: Costs = UNIT_COSTS) -> Timeline:
    """Return the timeline of a checked program in unit costs: its events, and the elements that are live at each."""
    return timeline_of(traced, Clocks(traced, costs).run(), live_memory(traced))


def timeline_of(traced: Traced, times: Times, memory: Sequence[Sequence[int]], *, in_seconds: bool = False) -> Timeline:
    """Return the timeline of a replay.

    Args:
        traced: the program.
        times: start and end of its ops.
        memory: for each row and op, the memory that is live when the op starts.
        in_seconds: whether times are seconds and memory bytes.
    """
    program = traced.program
    events: list[list[Event]] = []
    for row, tape in enumerate(program.tapes):
        specs, starts, ends, live = traced.specs[row], times.starts[row], times.ends[row], memory[row]
        events.append(
            [
                Event(
                    row,
                    at,
                    op.kind,
                    op.layer,
                    specs[(op.inputs or op.outputs)[0]].microbatches if op.inputs or op.outputs else 0,
                    starts[at],
                    ends[at],
                    live[at],
                )
                for at, op in enumerate(tape)
                if is_event(op.kind)
            ]
        )
    return Timeline(program, events, in_seconds)


FREE, WAIT, SEND = OpKind.FREE, OpKind.WAIT, OpKind.SEND
COLLECTIVE, MESSAGE, COPY = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY


class Idle(NamedTuple):
    """Interval in which a rank's compute stands still in a WAIT.

    Attributes:
        op: index of the op that issued the communication.
        since, until: start and end of the interval.
    """

    op: int
    since: float
    until: float


@dataclass(frozen=True)
class Times:
    """Times of a replay.

    Attributes:
        starts, ends: for each row, start and end of each op (WAIT and FREE: 0).
        ready: for each row and communication, when its last member has arrived.
        idle: for each row, the intervals in which its compute stands still.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    ready: list[list[float]]
    idle: list[list[Idle]]

    @property
    def end(self) -> float:
        """When the last op ends."""
        return max((max(ends, default=0.0) for ends in self.ends), default=0.0)


class Clocks:
    """Clocks of all rows, which replay the tapes in the order of time.

    Args:
        traced: the program.
        prices: times of its ops.
    """

    def __init__(self, traced: Traced, prices: Prices) -> None:
        tapes = traced.program.tapes
        self._traced = traced
        self._prices = prices
        self._price = PriceList(traced, prices)
        self._messages, self._one_stream = prices.messages, prices.one_stream
        self._contention, self._lag = prices.contention, prices.lag
        self._costless = [InPlace(tape).fused if prices.adds_in_backward else {} for tape in tapes]
        self._clock = [0.0] * len(tapes)
        self._at = [0] * len(tapes)
        starts, ends, ready = ([[0.0] * len(tape) for tape in tapes] for _ in range(3))
        self._times = Times(starts, ends, ready, [[] for _ in tapes])
        self._idle = [IdleLog() for _ in tapes]
        self._stream_free: list[dict[Hashable, float]] = [{} for _ in tapes]
        self._arrived: dict[int, int] = {}  # communication -> members that have arrived
        self._together = together_of(traced)
        self._arrives: dict[int, float] = {}  # message whose send has run -> when it can be received
        self._wanted: dict[int, float] = {}  # message -> when its receive was issued
        self._handle_end: list[dict[int, float]] = [{} for _ in tapes]
        self._handle_op: list[dict[int, int]] = [{} for _ in tapes]
        self._parked: dict[tuple[int, int], float] = {}
        # (time, tie, rank to go on or -1, communication that is ready)
        self._heap: list[tuple[float, int, int, int]] = []
        self._tie = count()

    def run(self) -> Times:
        """Replay to the end.

        Raises:
            UserError: if ranks wait for ever: messages are rendezvous, and the program needs buffered ones.
        """
        for rank in range(len(self._clock)):
            self._push(0.0, rank, -1)
        while self._heap:
            now, _, rank, communication = heapq.heappop(self._heap)
            if rank >= 0:
                self._advance(rank, now)
            else:
                self._start(communication, now)
        if self._parked:
            rank, handle = next(iter(self._parked))
            op = self._traced.program.tapes[rank][self._handle_op[rank][handle]]
            raise UserError(
                f"the step never ends where a send waits for its receive: rank {rank} waits in {op}; issue crossing "
                "sends and receives with exchange"
            )
        return self._times

    def _push(self, time: float, rank: int, communication: int) -> None:
        heapq.heappush(self._heap, (time, next(self._tie), rank, communication))

    def _advance(self, rank: int, now: float) -> None:
        """Advance one rank to its next communication with others, or until it has to wait for one."""
        ops, specs = self._traced.program.tapes[rank], self._traced.specs[rank]
        starts, ends = self._times.starts[rank], self._times.ends[rank]
        handle_end, handle_op = self._handle_end[rank], self._handle_op[rank]
        idle, log, price = self._times.idle[rank], self._idle[rank], self._price.compute
        one_stream = self._one_stream
        costless = self._costless[rank]
        communications, communication_of = self._traced.communications, self._traced.communication_of[rank]
        blocks = self._prices.blocking_p2p
        clock = self._clock[rank]
        for at in range(self._at[rank], len(ops)):
            op = ops[at]
            kind, handle = op[0], op[4]
            if kind is FREE:
                continue
            if kind is WAIT:
                end = handle_end.get(handle)
                if end is None:
                    self._parked[rank, handle] = clock
                    self._at[rank], self._clock[rank] = at, clock
                    return
                if self._contention or self._lag.most:
                    issued = handle_op[handle]
                    lag = NO_LAG if communications[communication_of[handle]].stream is COPY else self._lag
                    end = waited_until(log, clock, starts[issued], end, self._contention, lag)
                    if end > clock:
                        log.append(clock, end)
                if end > clock:
                    idle.append(Idle(handle_op[handle], clock, end))
                    clock = end
            elif handle >= 0:
                number = communication_of[handle]
                alone = not one_stream and len(communications[number].participants) == 1
                alone = alone and number not in self._together
                if clock > now and not alone:
                    self._at[rank], self._clock[rank] = at, clock
                    self._push(clock, rank, -1)
                    return
                handle_op[handle] = at
                if alone:
                    self._start(number, clock)
                else:
                    self._issue(kind, number, now)
                if kind is SEND and blocks:
                    clock += blocks * self._price.message(op, rank, specs)[0]
            else:
                starts[at] = clock
                if at not in costless:
                    clock += price(op, specs)
                ends[at] = clock
        self._at[rank], self._clock[rank] = len(ops), clock

    def _issue(self, kind: OpKind, number: int, now: float) -> None:
        """Issue one member's part of a communication.

        A buffered send is ready at once, any other communication when its last member has issued its part.
        """
        communication = self._traced.communications[number]
        if communication.stream is not MESSAGE or self._messages == "rendezvous":
            together = self._together.get(number, (number,))
            arrived = self._arrived[together[0]] = self._arrived.get(together[0], 0) + 1
            if arrived == len(together) * len(communication.participants):
                self._push(now, -1, together[0])
        elif kind is SEND:
            self._push(now, -1, number)
        else:
            self._wanted[number] = now
            self._receive(number)

    def _start(self, number: int, now: float) -> None:
        communication = self._traced.communications[number]
        if communication.stream is COLLECTIVE:
            together = [self._traced.communications[other] for other in self._together.get(number, (number,))]
            members = [member for each in together for member in each.participants]
            self._run(communication, members, now, self._price.collective(*together))
            return
        rank, _, at = communication.participants[0]
        op, specs = self._traced.program.tapes[rank][at], self._traced.specs[rank]
        if communication.stream is COPY:
            self._run(communication, communication.participants, now, self._price.copy(op, specs))
            return
        sending, receiving = self._price.message(op, rank, specs)
        if self._messages == "rendezvous":
            self._run(communication, communication.participants, now, sending)
        elif number in self._arrives:
            self._run(communication, communication.participants[1:], now, receiving)
        else:
            self._arrives[number] = self._run(communication, communication.participants[:1], now, sending)
            self._receive(number)

    def _receive(self, number: int) -> None:
        """Make a buffered receive ready if it is issued and its message has arrived."""
        if number in self._arrives and number in self._wanted:
            self._push(max(self._wanted[number], self._arrives[number]), -1, number)

    def _run(self, communication: Communication, members: Sequence[Participant], now: float, duration: float) -> float:
        """Run some members' part of a communication, and return when it ends."""
        on_link = communication.stream is MESSAGE and self._messages == "link"
        together = self._one_stream and communication.stream is not COPY
        stream = None if together else queue_key(self._traced.program, communication)
        free, start = self._stream_free, now
        if not on_link:
            for rank, _, _ in members:
                start = max(start, free[rank].get(stream, 0.0))
        end = start + duration
        sent_away = on_link and members[0] is communication.participants[0]  # so the sender need not wait
        times = self._times
        for rank, handle, op in members:
            if not on_link:
                free[rank][stream] = end
            self._handle_end[rank][handle] = start if sent_away else end
            times.starts[rank][op], times.ends[rank][op], times.ready[rank][op] = start, end, now
            if (rank, handle) in self._parked:
                self._push(max(self._parked.pop((rank, handle)), now), rank, -1)
        return end


def together_of(traced: Traced) -> dict[int, tuple[int, ...]]:
    """Map each collective of a batch to all collectives of the batch, by number. They run as one."""
    tapes = traced.program.tapes
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (stream, _, members) in enumerate(traced.communications):
        if stream is COLLECTIVE:
            rank, _, at = members[0]
            if (batch := tapes[rank][at].batch) >= 0:
                batches[rank, batch].append(number)
    return {number: tuple(together) for together in batches.values() for number in together}


class IdlePattern(NamedTuple):
    """Intervals of a pass in which its rank's compute stands still, in order.

    Attributes:
        starts, ends: of each interval, in seconds from the start of the pass.
        totals: seconds of the intervals before each one, and of all of them.
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
        """Return the idle seconds before a moment, counted from the start of the pass."""
        number = bisect_right(self.starts, moment)
        if not number:
            return 0.0
        left = self.ends[number - 1] - moment
        return self.totals[number] - left if left > 0 else self.totals[number]


class IdleLog:
    """Intervals in which a rank's compute has stood still so far, in order.

    Attributes:
        until: end of the last interval.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._starts, self._totals = list[float](), [0.0]
        self._patterns: list[tuple[float, IdlePattern | None]] = []  # end of an interval, or a pass and its start

    def append(self, since: float, until: float) -> None:
        """Add an interval."""
        self.until = until
        self._starts.append(since)
        self._totals.append(self._totals[-1] + until - since)
        self._patterns.append((until, None))

    def append_pass(self, since: float, pattern: IdlePattern) -> None:
        """Add the intervals of a pass that starts at a moment."""
        self.until = since + pattern.ends[-1]
        self._starts.append(since)
        self._totals.append(self._totals[-1] + pattern.totals[-1])
        self._patterns.append((since, pattern))

    def seconds_before(self, moment: float) -> float:
        """Return the idle seconds before a moment."""
        number = bisect_right(self._starts, moment)
        if not number:
            return 0.0
        end, pattern = self._patterns[number - 1]
        if pattern is not None:
            return self._totals[number - 1] + pattern.seconds_before(moment - end)
        return self._totals[number] - (end - moment if end > moment else 0.0)


def waited_until(idle: IdleLog, clock: float, start: float, end: float, contention: float, lag: Lag = NO_LAG) -> float:
    """Return when a rank computes again after a WAIT, if communication takes time from compute.

    Args:
        idle: intervals in which the rank stood still before.
        clock: when it arrives at the WAIT.
        start, end: start and end of the communication.
        contention, lag: see `Prices`. Copies have no lag, since no ranks wait for each other.
    """
    again = clock if clock > end else end
    if end <= start:
        return again
    if contention:
        until = clock if clock < end else end
        if until > start:
            computed = until - start - idle.seconds_before(until) + idle.seconds_before(start)
            if computed > 0:
                again += contention * computed
    if lag.most:
        again += lag.seconds(clock - idle.until, hidden=end <= clock)
    return again


Counter = list[tuple[float, dict[str, int]]]
"""Moments, and the bytes of each category that are live from then on."""


def memory_counters(traced: Traced, times: Times) -> list[Counter]:
    """Return the memory by category over time of each row. The arena is left out if there is none."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_bytes(traced, counters=True)):
        tape = traced.program.tapes[row]
        arena = any(live[CATEGORIES.index(Category.ARENA)] for live in memory.counters[:1])
        names = {
            at: category.value for at, category in enumerate(CATEGORIES) if arena or category is not Category.ARENA
        }
        named = ({name: live[at] for at, name in names.items()} for live in memory.counters)
        counters.append(counter_of(zip(moments(tape, times.starts[row], times.ends[row]), named, strict=True)))
    return counters


def counter_of(samples: Iterable[tuple[float, dict[str, int]]]) -> Counter:
    """Return the changes of samples of live memory, which are in tape order; of one moment the last sample counts."""
    counter: Counter = []
    for time, live in samples:
        if counter and counter[-1][0] == time:
            counter[-1] = (time, live)
        elif not counter or counter[-1][1] != live:
            counter.append((time, live))
    return counter


def moments(tape: Sequence[Op], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Return when compute arrives at each op: the start of a compute op, the issue of a communication."""
    clock, reached = 0.0, list[float]()
    issued: dict[int, int] = {}
    for at, op in enumerate(tape):
        if op.kind is OpKind.WAIT:
            clock = max(clock, ends[issued[op.handle]])
        elif op.handle >= 0:
            issued[op.handle] = at
        elif op.kind is not OpKind.FREE:
            clock = max(clock, starts[at])
        reached.append(clock)
        if op.handle < 0 and op.kind is not OpKind.FREE:
            clock = max(clock, ends[at])
    return reached


def moments_of(timeline: Timeline, row: int) -> list[float]:
    """Return when compute arrives at each op of a timeline's row. An op without an event takes no time."""
    tape = timeline.program.tapes[row]
    starts, ends = [0.0] * len(tape), [0.0] * len(tape)
    for event in timeline.events[row]:
        starts[event.op], ends[event.op] = event.start, event.end
    return moments(tape, starts, ends)

"""Clocks and memory together: a checked program's timeline."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from shardlab.check.in_place import InPlace
from shardlab.language import Op, OpKind, UserError
from shardlab.language.ops import Stream
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.tape import Communication, Participant, stream_of
from shardlab.simulate.timeline.memory import CATEGORIES, Category, live_memory, memory_in_bytes
from shardlab.simulate.timeline.prices import UNIT_COSTS, Costs, PriceList, Prices, Traced
from shardlab.simulate.timeline.timeline import Event, Timeline, is_event


def simulate(traced: Traced, costs: Costs = UNIT_COSTS) -> Timeline:
    """When each op of a checked program starts and ends, and how many elements are live, in unit costs."""
    return timeline_of(traced, Clocks(traced, costs).run(), live_memory(traced))


def timeline_of(traced: Traced, times: Times, memory: Sequence[Sequence[int]], *, in_seconds: bool = False) -> Timeline:
    """The events of a replay.

    Args:
        memory: for each row and op what is live when it starts.
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


# The clocks: every rank has a compute stream, and one or more for communication.
#
# Compute goes on in tape order and stops only at a WAIT. A communication starts when its last member has issued it
# and the streams of its members are free; those that are ready take a stream in the order in which they became ready.
# Messages on links that have latency only take no stream: each arrives so long after it was issued.
#
# Where communication takes time from compute (`Prices.contention`, `Prices.lag`), a rank pays for it at the WAIT.


FREE, WAIT, SEND = OpKind.FREE, OpKind.WAIT, OpKind.SEND
COLLECTIVE, MESSAGE, COPY = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY


class Idle(NamedTuple):
    """Compute that stands still in a WAIT.

    Attributes:
        op: index of the op that issued what is waited for.
        since, until: from when to when.
    """

    op: int
    since: float
    until: float


@dataclass(frozen=True)
class Times:
    """When each op of each row starts and ends (WAIT and FREE: 0), and when its compute stood still.

    `ready` is when a communication could have started, its last member having come, were its streams free.
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
    """Replays tapes in the order of time.

    Args:
        traced: what is replayed.
        prices: how long things take.
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
        self._stream_free: list[dict[Hashable, float]] = [{} for _ in tapes]
        self._arrived: dict[int, int] = {}  # communication -> members that have come
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
            UserError: when ranks wait for ever, where messages are rendezvous and the program passes only with buffers.
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
        """Go on with one rank: alone while it computes, in the order of time where it meets others."""
        ops, specs = self._traced.program.tapes[rank], self._traced.specs[rank]
        starts, ends = self._times.starts[rank], self._times.ends[rank]
        handle_end, handle_op = self._handle_end[rank], self._handle_op[rank]
        idle, price, one_stream = self._times.idle[rank], self._price.compute, self._one_stream
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
                    end = waited_until(idle, clock, starts[issued], end, self._contention, lag)
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
        """A part of a communication is issued: a buffered send is ready at once, all else when its last part comes."""
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
        """A receive is ready once it is issued and its message has arrived."""
        if number in self._arrives and number in self._wanted:
            self._push(max(self._wanted[number], self._arrives[number]), -1, number)

    def _run(self, communication: Communication, members: Sequence[Participant], now: float, duration: float) -> float:
        """Some members' part of a communication; when it ends."""
        on_link = communication.stream is MESSAGE and self._messages == "link"
        together = self._one_stream and communication.stream is not COPY
        stream = None if together else stream_of(self._traced.program, communication)
        free, start = self._stream_free, now
        if not on_link:
            for rank, _, _ in members:
                start = max(start, free[rank].get(stream, 0.0))
        end = start + duration
        sent_away = on_link and members[0] is communication.participants[0]  # the link has it; the sender need not wait
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
    """Map each collective that is issued together with others to all of them, by their places; they run as one."""
    tapes = traced.program.tapes
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (stream, _, members) in enumerate(traced.communications):
        if stream is COLLECTIVE:
            rank, _, at = members[0]
            if (batch := tapes[rank][at].batch) >= 0:
                batches[rank, batch].append(number)
    return {number: tuple(together) for together in batches.values() for number in together}


def waited_until(
    idle: Sequence[Idle], clock: float, start: float, end: float, contention: float, lag: Lag = NO_LAG
) -> float:
    """Find when a rank computes again that waits for a communication where that takes time from compute.

    Args:
        idle: when the rank stood still before.
        clock: when it comes to the WAIT.
        start, end: of the communication.
        contention, lag: see `Prices`; the lag is none where ranks do not meet, as for copies.
    """
    again = clock if clock > end else end
    if end <= start:
        return again
    if contention:
        again += contention * computing(idle, start, clock if clock < end else end)
    if lag.most:
        again += lag.seconds(clock - (idle[-1].until if idle else 0.0), hidden=end <= clock)
    return again


def computing(idle: Sequence[Idle], since: float, until: float) -> float:
    """How long a rank computes between two moments."""
    seconds = until - since
    for each in reversed(idle):
        if seconds <= 0 or each.until <= since:
            break
        start = each.since if each.since > since else since
        end = each.until if each.until < until else until
        if end > start:
            seconds -= end - start
    return seconds if seconds > 0 else 0.0


# Memory by category over time, as a counter that a trace viewer draws.


Counter = list[tuple[float, dict[str, int]]]
"""Moments, and the bytes of each category that are live from then on."""


def memory_counters(traced: Traced, times: Times) -> list[Counter]:
    """The counter of each row of a replay; one without an arena has no word of it."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_bytes(traced, counters=True)):
        tape = traced.program.tapes[row]
        arena = any(live[CATEGORIES.index(Category.ARENA)] for live in memory.counters[:1])
        names = {
            place: category.value
            for place, category in enumerate(CATEGORIES)
            if arena or category is not Category.ARENA
        }
        named = ({name: live[place] for place, name in names.items()} for live in memory.counters)
        counters.append(counter_of(zip(moments(tape, times.starts[row], times.ends[row]), named, strict=True)))
    return counters


def counter_of(samples: Iterable[tuple[float, dict[str, int]]]) -> Counter:
    """Changes of what was live at each op, in tape order; the last of each moment."""
    counter: Counter = []
    for time, live in samples:
        if counter and counter[-1][0] == time:
            counter[-1] = (time, live)
        elif not counter or counter[-1][1] != live:
            counter.append((time, live))
    return counter


def moments(tape: Sequence[Op], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """When compute has got to each op: compute counts from its start, a communication from its issue."""
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
    """When the compute of a timeline's row has got to each op; an op that has no event takes no time."""
    tape = timeline.program.tapes[row]
    starts, ends = [0.0] * len(tape), [0.0] * len(tape)
    for event in timeline.events[row]:
        starts[event.op], ends[event.op] = event.start, event.end
    return moments(tape, starts, ends)

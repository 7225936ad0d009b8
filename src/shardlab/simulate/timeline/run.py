"""Clocks: when each op of a traced program starts and ends.

Every rank has a compute stream, and one or more streams for communication. Compute runs in tape order and stops only at
a WAIT, or for a part of a send (`Prices.blocking_p2p`). A communication starts when its last member has issued it and
the streams of its members are free. Communications that are ready get a stream in the order in which they became ready.

How messages travel depends on `Prices.messages`. Except in a rendezvous, a send does not wait for its receive. A
message on a link that has only latency occupies no stream: it arrives after the latency. A message on a full-duplex
link occupies the sender's outgoing and the receiver's incoming stream, and a collective then occupies both streams of
each member. If a communication slows compute down (`Prices.contention`, `Prices.lag`), the lost time is added at the
WAIT for this communication.

Tapes are counted by row, since a folded program has no tape for most of its ranks
(`shardlab.simulate.timeline.prices.Traced`).

`simulate` returns the timeline in time units. `Clocks` replays with any prices and returns `Times`; `timeline_of` turns
them into events, and `memory_counters` into the memory over time that a trace viewer draws.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlab.check.in_place import InPlace
from shardlab.language import Op, OpKind, UserError
from shardlab.language.ops import Stream
from shardlab.language.pass_names import NO_LAG
from shardlab.language.tape import Communication, Participant, queue_key
from shardlab.simulate.timeline.costs import TEACHING_COSTS
from shardlab.simulate.timeline.event_loop import PENDING, EventLoop, StartEnd
from shardlab.simulate.timeline.memory import CATEGORIES, Category, live_memory, memory_in_bytes, memory_in_elements
from shardlab.simulate.timeline.prices import PriceList, Prices, Traced
from shardlab.simulate.timeline.timeline import Event, Timeline, is_event


def simulate(traced: Traced, costs: Prices = TEACHING_COSTS) -> Timeline:
    """Return the timeline of a checked program in time units: its events, and the elements that are live at each."""
    return timeline_of(traced, Clocks(traced, costs).run(), live_memory(traced))


def timeline_of(traced: Traced, times: Times, memory: Sequence[Sequence[int]], *, in_seconds: bool = False) -> Timeline:
    """Return the timeline of a replay.

    Args:
        traced: the program.
        times: start and end of its ops.
        memory: for each row and op, the number of live elements or bytes (`Event.memory`).
        in_seconds: whether times are seconds and memory is in bytes.
    """
    program = traced.program
    events: list[list[Event]] = []
    for row, tape in enumerate(program.tapes):
        specs, starts, ends, live = traced.specs[row], times.starts[row], times.ends[row], memory[row]
        events.append(
            [
                Event(
                    row,
                    index,
                    op.kind,
                    op.layer,
                    specs[(op.inputs or op.outputs)[0]].microbatches if op.inputs or op.outputs else 0,
                    starts[index],
                    ends[index],
                    live[index],
                )
                for index, op in enumerate(tape)
                if is_event(op.kind)
            ]
        )
    return Timeline(program, events, in_seconds)


FREE, WAIT, SEND = OpKind.FREE, OpKind.WAIT, OpKind.SEND
ARENA = Category.ARENA
COLLECTIVE, MESSAGE, COPY = Stream.COLLECTIVE, Stream.MESSAGE, Stream.COPY
OUT, IN = "out", "in"
"""Streams of the two directions of a full-duplex link."""


class Idle(NamedTuple):
    """Interval in which a rank's compute is idle in a WAIT.

    Attributes:
        op: index of the op that issued the awaited communication.
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
        ready: for each row and communication op, the time from which the communication waited only for its streams: the
            arrival of its last member, or for a send that does not wait for its receive, the issue (other ops: 0).
        idle: for each row, the intervals in which its compute is idle in a WAIT.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    ready: list[list[float]]
    idle: list[list[Idle]]

    @property
    def end(self) -> float:
        """End of the last op."""
        return max((max(ends, default=0.0) for ends in self.ends), default=0.0)


class Clocks(EventLoop[int]):
    """Clocks of all rows of a program.

    Args:
        traced: the program.
        prices: times of its ops.
    """

    def __init__(self, traced: Traced, prices: Prices) -> None:
        tapes = traced.program.tapes
        super().__init__(len(tapes), prices.contention, prices.lag)
        self._traced = traced
        self._prices = prices
        self._price = PriceList(traced, prices)
        self._messages, self._one_stream = prices.messages, prices.one_stream
        self._costless = [InPlace(tape).fused if prices.adds_in_backward else {} for tape in tapes]
        starts, ends, ready = ([[0.0] * len(tape) for tape in tapes] for _ in range(3))
        self._times = Times(starts, ends, ready, [[] for _ in tapes])
        self._stream_free: list[dict[Hashable, float]] = [{} for _ in tapes]
        self._together = together_of(traced)
        self._arrives: dict[int, float] = {}  # message whose send has run -> arrival time
        self._duplex = prices.messages == "full duplex"
        self._receives_issued: dict[int, float] = {}  # message -> time at which its receive was issued
        self._handle_times: list[dict[int, StartEnd]] = [{} for _ in tapes]
        self._handle_op: list[dict[int, int]] = [{} for _ in tapes]

    def run(self) -> Times:
        """Replay to the end.

        Raises:
            UserError: if ranks wait for ever, because messages are rendezvous and the program needs buffered sends.
        """
        blocked_rows = self.run_rows()
        if blocked_rows:
            tape = self._traced.program.tapes[blocked_rows[0]]
            op = tape[self._handle_op[blocked_rows[0]][tape[self.next_ops[blocked_rows[0]]].handle]]
            raise UserError(
                f"the step never ends where a send waits for its receive: rank {blocked_rows[0]} waits in {op}; issue "
                "crossing sends and receives with exchange"
            )
        return self._times

    def advance(self, row: int, now: float) -> None:
        ops, specs = self._traced.program.tapes[row], self._traced.specs[row]
        starts, ends = self._times.starts[row], self._times.ends[row]
        handle_times, handle_op = self._handle_times[row], self._handle_op[row]
        idle, price, one_stream = self._times.idle[row], self._price.compute, self._one_stream
        costless = self._costless[row]
        communications, communication_of = self._traced.communications, self._traced.communication_of[row]
        blocks = self._prices.blocking_p2p
        clock = self.clocks[row]
        for index in range(self.next_ops[row], len(ops)):
            op = ops[index]
            kind, handle = op[0], op[4]
            if kind is FREE:
                continue
            if kind is WAIT:
                times = handle_times[handle]
                end = times[1]
                if end == PENDING:
                    self.wait(row, index, clock, times)
                    return
                if self.slows:
                    issued = handle_op[handle]
                    lag = NO_LAG if communications[communication_of[handle]].stream is COPY else self.lag
                    end = self.idle[row].wait(clock, starts[issued], end, self.contention, lag)
                if end > clock:
                    idle.append(Idle(handle_op[handle], clock, end))
                    clock = end
            elif handle >= 0:
                number = communication_of[handle]
                alone = not one_stream and len(communications[number].participants) == 1
                alone = alone and number not in self._together
                if clock > now and not alone:  # so that ready communications start in the order of time
                    self.stop(row, index, clock)
                    return
                handle_op[handle] = index
                if alone:
                    handle_times[handle] = [PENDING, PENDING]
                    self.start(number, clock)
                else:
                    handle_times[handle] = self._issue(kind, number, row, now)
                if kind is SEND and blocks:
                    clock += blocks * self._price.message(op, row, specs)[0]
            else:
                starts[index] = clock
                if index not in costless:
                    clock += price(op, specs)
                ends[index] = clock
        self.next_ops[row], self.clocks[row] = len(ops), clock

    def _issue(self, kind: OpKind, number: int, row: int, now: float) -> StartEnd:
        """Issue one member's part of a communication, and return the list of its start and end.

        If messages are no rendezvous, a send is ready immediately, and its receive is separate (see `_receive`). Any
        other communication is ready when its last member has issued its part.
        """
        communication = self._traced.communications[number]
        if communication.stream is not MESSAGE or self._messages == "rendezvous":
            batch = self._together.get(number, (number,))
            return self.join(batch[0], len(batch) * len(communication.participants), row, now).times
        if kind is SEND:
            self.push(now, number)
        else:
            self._receives_issued[number] = now
            self._receive(number)
        return [PENDING, PENDING]

    def push(self, ready: float, communication: int, turn: int = 0) -> None:
        if self._duplex:  # messages and collectives share links; ties go by tape order, so that all replicas agree
            turn = 1 + max(op for _, _, op in self._traced.communications[communication].participants)
        super().push(ready, communication, turn)

    def start(self, communication: int, ready: float) -> None:
        self.pending.pop(communication, None)
        joined = self._traced.communications[communication]
        if joined.stream is COLLECTIVE:
            together = [
                self._traced.communications[other] for other in self._together.get(communication, (communication,))
            ]
            members = [member for collective in together for member in collective.participants]
            self._run(joined, members, ready, self._price.collective(*together))
            return
        rank, _, index = joined.participants[0]
        op, specs = self._traced.program.tapes[rank][index], self._traced.specs[rank]
        if joined.stream is COPY:
            self._run(joined, joined.participants, ready, self._price.copy(op, specs))
            return
        sending, receiving = self._price.message(op, rank, specs)
        if self._messages == "rendezvous":
            self._run(joined, joined.participants, ready, sending)
        elif self._duplex and communication in self._arrives:
            self._receive_transfer(joined, self._arrives[communication])
        elif communication in self._arrives:
            self._run(joined, joined.participants[1:], ready, receiving)
        else:
            self._arrives[communication] = self._run(joined, joined.participants[:1], ready, sending)
            self._receive(communication)

    def _receive(self, number: int) -> None:
        """Make a receive ready if it has been issued and the arrival time of its message is known."""
        if number in self._arrives and number in self._receives_issued:
            issued = self._receives_issued[number]
            self.push(issued if self._duplex else max(issued, self._arrives[number]), number)

    def _receive_transfer(self, message: Communication, arrives: float) -> None:
        """Set start and end of a receive on a full-duplex link.

        They are those of the transfer. If the message arrived before the receive was issued, both are the time of the
        issue.
        """
        (sender, _, send_op), (receiver, handle, op) = message.participants
        times, issued = self._times, self._receives_issued[self._traced.communication_of[receiver][handle]]
        start, end = (times.starts[sender][send_op], arrives) if arrives > issued else (issued, issued)
        times.starts[receiver][op], times.ends[receiver][op] = start, end
        times.ready[receiver][op] = times.ready[sender][send_op] if arrives > issued else issued
        self._handle_times[receiver][handle][:] = start, end
        self.wake(receiver, self._handle_times[receiver][handle], issued)

    def _run(
        self, communication: Communication, members: Sequence[Participant], ready: float, duration: float
    ) -> float:
        """Run the part of some members in a communication, and return the time at which it ends."""
        on_link = communication.stream is MESSAGE and self._messages == "link"
        streams = [] if on_link else self._streams(communication, members)
        free = self._stream_free
        start = max([ready, *(free[rank].get(stream, 0.0) for rank, stream in streams)])
        end = start + duration
        for rank, stream in streams:
            free[rank][stream] = end
        sent_away = on_link and members[0] is communication.participants[0]  # the sender does not wait
        times = self._times
        for rank, handle, op in members:
            times.starts[rank][op], times.ends[rank][op], times.ready[rank][op] = start, end, ready
            self._handle_times[rank][handle][:] = start, start if sent_away else end
        for rank, handle, _ in members:
            self.wake(rank, self._handle_times[rank][handle], ready)
        return end

    def _streams(self, communication: Communication, members: Sequence[Participant]) -> list[tuple[int, Hashable]]:
        """Return (rank, stream) for each stream that a communication occupies."""
        if self._duplex and communication.stream is MESSAGE:
            (sender, _, _), (receiver, _, _) = communication.participants
            return [(sender, OUT), (receiver, IN)]
        if self._duplex and communication.stream is COLLECTIVE:
            return [(rank, stream) for rank, _, _ in members for stream in (OUT, IN)]
        shares_stream = self._one_stream and communication.stream is not COPY
        stream = None if shares_stream else queue_key(self._traced.program, communication)
        return [(rank, stream) for rank, _, _ in members]


def together_of(traced: Traced) -> dict[int, tuple[int, ...]]:
    """Map the number of each batched collective to the numbers of its batch, which runs as one collective."""
    tapes = traced.program.tapes
    batches: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, (stream, _, members) in enumerate(traced.communications):
        if stream is COLLECTIVE:
            rank, _, index = members[0]
            if (batch := tapes[rank][index].batch) >= 0:
                batches[rank, batch].append(number)
    return {number: tuple(numbers) for numbers in batches.values() for number in numbers}


Counter = list[tuple[float, dict[str, int]]]
"""(time, live bytes of each category from then on), in order."""


def memory_counters(traced: Traced, times: Times) -> list[Counter]:
    """Return for each row the memory by category over time. The arena is left out if there is none."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_bytes(traced, counters=True)):
        tape = traced.program.tapes[row]
        arena = any(live[CATEGORIES.index(Category.ARENA)] for live in memory.counters[:1])
        names = {
            index: category.value
            for index, category in enumerate(CATEGORIES)
            if arena or category is not Category.ARENA
        }
        samples = ({name: live[index] for index, name in names.items()} for live in memory.counters)
        counters.append(counter_of(zip(moments(tape, times.starts[row], times.ends[row]), samples, strict=True)))
    return counters


def element_counters(traced: Traced, times: Times) -> list[Counter]:
    """Return for each row the live elements by category over time, counted at the start of each op."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_elements(traced)):
        tape = traced.program.tapes[row]
        reached = moments(tape, times.starts[row], times.ends[row])
        samples = (
            (time, {category.value: live[index] for index, category in enumerate(CATEGORIES) if category is not ARENA})
            for op, time, live in zip(tape, reached, memory.at_starts, strict=True)
            if is_event(op.kind)
        )
        counters.append(counter_of(samples))
    return counters


def counter_of(samples: Iterable[tuple[float, dict[str, int]]]) -> Counter:
    """Return the changes of live memory from samples in tape order. Of several samples at one time, the last counts."""
    counter: Counter = []
    for time, live in samples:
        if counter and counter[-1][0] == time:
            counter[-1] = (time, live)
        elif not counter or counter[-1][1] != live:
            counter.append((time, live))
    return counter


def moments(tape: Sequence[Op], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """Return the time at which compute reaches each op: the start of a compute op, the issue of a communication."""
    clock, reached = 0.0, list[float]()
    issued: dict[int, int] = {}
    for index, op in enumerate(tape):
        if op.kind is OpKind.WAIT:
            clock = max(clock, ends[issued[op.handle]])
        elif op.handle >= 0:
            issued[op.handle] = index
        elif op.kind is not OpKind.FREE:
            clock = max(clock, starts[index])
        reached.append(clock)
        if op.handle < 0 and op.kind is not OpKind.FREE:
            clock = max(clock, ends[index])
    return reached


def moments_of(timeline: Timeline, row: int) -> list[float]:
    """Return the time at which compute reaches each op of a timeline's row. An op without an event takes no time."""
    tape = timeline.program.tapes[row]
    starts, ends = [0.0] * len(tape), [0.0] * len(tape)
    for event in timeline.events[row]:
        starts[event.op], ends[event.op] = event.start, event.end
    return moments(tape, starts, ends)

"""The clocks: every rank has a compute stream and a communication stream.

Compute goes on in tape order and stops only at a WAIT. A communication starts when its last member has issued it
and the streams of its members are free; those that are ready take a stream in the order in which they became ready.
Messages on links that have latency only take no stream: each arrives so long after it was issued.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

from shardlab.check import Checked
from shardlab.program import Kind, LayerKind, Op, OpKind, Sizes, Spec, attention
from shardlab.program.tape import COMMUNICATION
from shardlab.program.values import AUTOGRAD_KINDS
from shardlab.simulate.costs import UNIT_COSTS, Costs
from shardlab.simulate.memory import live_memory
from shardlab.simulate.timeline import Event, Timeline, is_event


def simulate(checked: Checked, costs: Costs = UNIT_COSTS) -> Timeline:
    """When each op of a checked program starts and ends, and how much memory is live."""
    return _Clocks(checked, costs).run()


def _share(op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
    """Of half-blocks, which part of a microbatch's work a piece is.

    A norm's is none, a body's that of its slices; attention's is told by the pairs of slices that meet.
    """
    sequence, width, _ = specs[op.inputs[0]].grid
    if sizes.kind(op.layer) is LayerKind.NORM:
        return 0.0
    if op.kind is OpKind.ATTEND or op.kind is OpKind.ATTEND_BACKWARD:
        queries, keys_values = specs[op.inputs[0]], specs[op.inputs[1]]
        return attention.work(queries, keys_values) / queries.holds.pieces
    told = [specs[number] for number in (*op.inputs, *op.outputs)]
    sums = max((spec.sums.bit_count() for spec in told if spec.kind in _TELL_SLICES), default=0)
    return (sums or width) / width / sequence


_TELL_SLICES = AUTOGRAD_KINDS | {Kind.ACTIVATION}
"""Kinds of value whose *sums* are the slices of the layer that was computed."""


class _Clocks:
    def __init__(self, checked: Checked, costs: Costs) -> None:
        ranks = checked.program.ranks
        self.checked = checked
        self.costs = costs
        self.clock = [0.0] * ranks
        self.stream_free = [0.0] * ranks
        self.at = [0] * ranks
        self.times: list[dict[int, tuple[float, float]]] = [{} for _ in range(ranks)]  # op -> (start, end)
        self.came: dict[int, int] = {}  # meeting -> members that have come
        self.arrives: dict[int, float] = {}  # message whose send has run -> when it can be received
        self.wanted: dict[int, float] = {}  # message -> when its receive was issued
        self.handle_end: list[dict[int, float]] = [{} for _ in range(ranks)]
        self.parked: dict[tuple[int, int], float] = {}
        self._heap: list[tuple[float, int, int, int]] = []  # (time, tie, rank to go on or -1, meeting that is ready)
        self._tie = count()

    def run(self) -> Timeline:
        for rank in range(len(self.clock)):
            self._push(0.0, rank, -1)
        while self._heap:
            now, _, rank, meeting = heapq.heappop(self._heap)
            if rank >= 0:
                self._advance(rank, now)
            else:
                self._start(meeting, now)
        assert not self.parked, "a checked program does not deadlock"
        return self._timeline()

    def _push(self, time: float, rank: int, meeting: int) -> None:
        heapq.heappush(self._heap, (time, next(self._tie), rank, meeting))

    def _advance(self, rank: int, now: float) -> None:
        """Go on with one rank: alone while it computes, in the order of time where it issues communication."""
        ops, specs, sizes = self.checked.program.tapes[rank], self.checked.specs[rank], self.checked.program.sizes
        times, ends = self.times[rank], self.handle_end[rank]
        clock = self.clock[rank]
        for at in range(self.at[rank], len(ops)):
            op = ops[at]
            kind = op.kind
            if kind is OpKind.WAIT:
                if op.handle not in ends:
                    self.parked[rank, op.handle] = clock
                    self.at[rank], self.clock[rank] = at, clock
                    return
                clock = max(clock, ends[op.handle])
            elif kind in COMMUNICATION:
                if clock > now:
                    self.at[rank], self.clock[rank] = at, clock
                    self._push(clock, rank, -1)
                    return
                self._issue(rank, op.handle, now)
            elif kind is not OpKind.FREE:
                acted_on = specs[op.inputs[0]].holds.pieces if op.inputs else 0
                if sizes.kinds and op.inputs:
                    acted_on *= _share(op, specs, sizes)
                start, clock = clock, clock + self.costs.duration(kind, acted_on)
                times[at] = (start, clock)
        self.at[rank], self.clock[rank] = len(ops), clock

    def _issue(self, rank: int, handle: int, now: float) -> None:
        """A part of a communication is issued: a send is ready at once, all else when its last member has come."""
        number = self.checked.meeting_of[rank][handle]
        meeting = self.checked.meetings[number]
        if meeting.group is not None:
            self.came[number] = self.came.get(number, 0) + 1
            if self.came[number] == len(meeting.members):
                self._push(now, -1, number)
        elif meeting.members[0].rank == rank:
            self._push(now, -1, number)
        else:
            self.wanted[number] = now
            self._receive(number)

    def _start(self, number: int, now: float) -> None:
        meeting = self.checked.meetings[number]
        if meeting.group is not None:
            self._run(number, range(len(meeting.members)), now, self.costs.collective)
        elif number in self.arrives:
            self._run(number, [1], now, self.costs.recv)
        else:
            self.arrives[number] = self._run(number, [0], now, self.costs.send)
            self._receive(number)

    def _receive(self, number: int) -> None:
        """A receive is ready once it is issued and its message has arrived."""
        if number in self.arrives and number in self.wanted:
            self._push(max(self.wanted[number], self.arrives[number]), -1, number)

    def _run(self, number: int, places: list[int] | range, now: float, duration: float) -> float:
        """Some members' part of a communication; when it ends."""
        meeting = self.checked.meetings[number]
        members = [meeting.members[place] for place in places]
        on_link = self.costs.link_latency and meeting.group is None
        start = now if on_link else max(now, *(self.stream_free[member.rank] for member in members))
        end = start + duration
        for rank, handle, op in members:
            if not on_link:
                self.stream_free[rank] = end
            sent_away = on_link and places == [0]  # the link has it; the sender need not wait
            self.handle_end[rank][handle] = start if sent_away else end
            self.times[rank][op] = (start, end)
            if (rank, handle) in self.parked:
                self._push(max(self.parked.pop((rank, handle)), now), rank, -1)
        return end

    def _timeline(self) -> Timeline:
        program = self.checked.program
        events: list[list[Event]] = []
        for rank, memory in enumerate(live_memory(self.checked)):
            specs, times = self.checked.specs[rank], self.times[rank]
            events.append(
                [
                    Event(
                        rank,
                        at,
                        op.kind,
                        op.layer,
                        specs[(op.inputs or op.outputs)[0]].microbatches if op.inputs or op.outputs else 0,
                        *times[at],
                        memory[at],
                    )
                    for at, op in enumerate(program.tapes[rank])
                    if is_event(op.kind)
                ]
            )
        return Timeline(program, events)

"""Events of a schedule: passes, messages and sends, each of which follows at most two others.

A message starts when both its sender and its receiver are ready. Before a rank sends to a peer again, it waits for the
previous message. `OrderEvents` lists the events of a schedule, and `LaidOrder` computes their times for any seconds of
passes. `RankOrder` says which microbatches a rank keeps at each time, whatever the layers are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Literal, NamedTuple

import numpy as np

from shardlab.planner.bounds.layers import Array
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.steps import Message, Recv, ShardedStep, Steps

NOBODY = -1
"""The event that everything else follows, at 0 seconds."""


class _Channel:
    """Messages from one rank to another.

    Attributes:
        sent, received: events after which they are sent, and after which they may be received.
        came: the messages themselves.
        what: whether each goes back, and after which stage's pass.
    """

    __slots__ = ("came", "received", "sent", "what")

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []
        self.came: list[int] = []
        self.what: list[tuple[bool, int]] = []


class OrderEvents:
    """Passes, messages and what is done to send them, each with the two events that it follows.

    Attributes:
        level: how many events come before each one, one after the other.
        before, needs: the events that it follows.
        passes: those of each rank, in order.
        messages, sends: events that take the seconds of a message: whether back, and after which stage's pass.
    """

    def __init__(self, steps: Steps) -> None:
        self.level: list[int] = []
        self.before: list[int] = []
        self.needs: list[int] = []
        self.passes: list[list[tuple[int, Work]]] = [[] for _ in steps.of_ranks]
        self.messages: dict[int, tuple[bool, int]] = {}
        self.sends: dict[int, tuple[bool, int]] = {}
        self._steps = steps.of_ranks
        self._at = [0] * len(steps.of_ranks)
        self._now = [NOBODY] * len(steps.of_ranks)
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        # Messages that are waited for, by the stage that begins with them, whether they go forward, and the microbatch
        self._arriving: dict[tuple[int, bool, int], tuple[_Channel, int]] = {}
        ready = set(range(len(steps.of_ranks)))
        while ready:
            ready |= self._go_on(ready.pop())
        assert all(at == len(order) for at, order in zip(self._at, self._steps, strict=True)), "no order is stuck"

    def _event(self, before: int, needs: int) -> int:
        level = self.level
        first, second = level[before] if before >= 0 else -1, level[needs] if needs >= 0 else -1
        self.before.append(before)
        self.needs.append(needs)
        level.append(1 + (first if first > second else second))
        return len(level) - 1

    def _go_on(self, rank: int) -> set[int]:
        """Follow a rank's order until it has to wait; tell who may go on."""
        order, others = self._steps[rank], set[int]()
        for at in range(self._at[rank], len(order)):
            step = order[at]
            if isinstance(step, Work):
                needs = self._needed(step)
                if needs is None:
                    break
                self._now[rank] = event = self._event(self._now[rank], needs)
                self.passes[rank].append((event, step))
            elif isinstance(step, Message):
                met = self._receive(rank, step) if isinstance(step, Recv) else self._send(rank, step)
                if met is None:
                    break
                if met:
                    others.add(step.peer)
            self._at[rank] = at + 1
        return others

    def _needed(self, step: Work) -> int | None:
        """The message that a pass waits for (None: it has not begun)."""
        arriving = self._arriving.get((step.stage, isinstance(step, Forward), step.microbatch))
        if arriving is None or isinstance(step, BackwardWeight):
            return NOBODY
        channel, number = arriving
        return channel.came[number] if number < len(channel.came) else None

    def _receive(self, rank: int, step: Message) -> bool:
        """Be ready for a message; tell whether it begins."""
        channel = self._channels[step.peer, rank]
        self._arriving[step.stage, step.forward, step.microbatch] = channel, len(channel.received)
        channel.received.append(self._now[rank])
        return self._meet(channel)

    def _send(self, rank: int, step: Message) -> bool | None:
        """Send a message; tell whether it begins (None: the one sent before it has not begun)."""
        channel = self._channels[rank, step.peer]
        number, came, what = len(channel.sent), channel.came, (not step.forward, step.stage)
        if number > len(came):
            return None
        begun = self._event(self._now[rank], came[-1] if number else NOBODY)
        self._now[rank] = event = self._event(begun, NOBODY)  # its sender may do nothing else while it goes
        channel.sent.append(begun)
        channel.what.append(what)
        self.sends[event] = what
        return self._meet(channel)

    def _meet(self, channel: _Channel) -> bool:
        """Let a message begin to which both ranks have come."""
        number = len(channel.came)
        if number == len(channel.sent) or number == len(channel.received):
            return False
        message = self._event(channel.sent[number], channel.received[number])
        self.messages[message] = channel.what[number]
        channel.came.append(message)
        return True


KINDS = (Forward, Backward, BackwardInput, BackwardWeight)
"""Kinds of passes, by their place in tables of seconds."""

NUMBER: dict[type[Work], int] = {kind: number for number, kind in enumerate(KINDS)}


class PassTimes(NamedTuple):
    """When ranks and stages of a pipeline have got how far, in seconds.

    Attributes:
        done: the last pass of each rank has ended: (ranks,).
        last: the pass of each stage begins that makes the last gradient of its weights: (stages,).
        first: the first pass of each rank that makes a gradient begins: (ranks,).
    """

    done: Array
    last: Array
    first: Array


class LaidOrder:
    """A pipeline's order of work, laid out to be timed.

    Args:
        steps: of all ranks.

    Attributes:
        kind, stage: of each pass: (passes,).
        opens: whether a pass is the first of its stage: (passes,).
        visits: whether it computes with weights, and the one before it that does is of another stage: (passes,).
        begins: whether it is the first of its rank: (passes,).
        sums: whether it adds a gradient to an older one: (passes,).
    """

    def __init__(self, steps: Steps) -> None:
        events = OrderEvents(steps)
        self._ranks = len(steps.of_ranks)
        places = np.argsort(np.array(events.level, np.intp), kind="stable")
        place = np.append(np.argsort(places), len(places))  # of each event in time's order, and of nobody
        before = place[np.array(events.before, np.intp)[places]]
        needs = place[np.array(events.needs, np.intp)[places]]
        self._events = len(places)
        levels = np.array(events.level, np.intp)[places]
        bounds = np.flatnonzero(np.diff(levels, prepend=-1, append=len(levels))).tolist()
        self._levels = [(slice(start, stop), before[start:stop], needs[start:stop]) for start, stop in pairwise(bounds)]
        passes = [work for order in events.passes for work in order]
        self._passes = place[np.array([event for event, _ in passes], np.intp)]
        self._done = np.cumsum([len(order) for order in events.passes]) - 1
        self._messages, self._sends = (
            place[np.array(list(found), np.intp)] for found in (events.messages, events.sends)
        )
        self._messages_of, self._sends_of = (
            np.array(list(found.values()), np.intp).reshape(-1, 2).T for found in (events.messages, events.sends)
        )
        self.kind = np.array([NUMBER[type(step)] for _, step in passes], np.intp)
        self.stage = np.array([step.stage for _, step in passes], np.intp)
        self.opens, self.visits, self.begins, self.sums = (np.zeros(len(passes), bool) for _ in range(4))
        self._last, self._first = np.zeros(steps.stages, np.intp), np.zeros(self._ranks, np.intp)
        self._mark([[step for _, step in order] for order in events.passes])

    def _mark(self, orders: Sequence[Sequence[Work]]) -> None:
        """Tell passes apart by what came before them; note those that make the first gradient of a rank, the last of a
        stage."""
        places = count()
        for rank, order in enumerate(orders):
            before, opened, summed = -1, set[int](), set[int]()
            for step in order:
                place, stage = next(places), step.stage
                self.begins[place] = not opened
                self.opens[place] = stage not in opened
                opened.add(stage)
                if not isinstance(step, BackwardWeight):
                    self.visits[place] = stage != before
                    before = stage
                if isinstance(step, Backward | BackwardWeight):
                    self.sums[place] = stage in summed
                    self._first[rank] = self._first[rank] if summed else place
                    summed.add(stage)
                    self._last[stage] = place

    def times(self, seconds: Array, messages: Array, blocks: float = 0.0) -> PassTimes:
        """Time the passes.

        Args:
            seconds: of each pass: (passes,).
            messages: seconds of a message after a forward pass (0) or a backward pass (1) on a stage: (2, stages).
            blocks: the share of these for which its sender does nothing else.
        """
        return self.all_times([seconds], messages, blocks)[0]

    def all_times(self, seconds: Sequence[Array], messages: Array, blocks: float = 0.0) -> list[PassTimes]:
        """Time the passes once for each of several seconds of them, all in one go; see `times`."""
        each = np.stack(seconds, axis=1)
        took, ends = np.zeros((self._events, len(seconds))), np.zeros((self._events + 1, len(seconds)))
        took[self._passes] = each
        took[self._messages] = messages[*self._messages_of][:, None]
        took[self._sends] = blocks * messages[*self._sends_of][:, None]
        for these, before, needs in self._levels:
            found = np.maximum(ends.take(before, axis=0), ends.take(needs, axis=0), out=ends[these])
            found += took[these]
        ended = ends[self._passes]
        begun = ended - each
        found = ended[self._done], begun[self._last], begun[self._first]
        return [PassTimes(*(np.ascontiguousarray(of[:, place]) for of in found)) for place in range(len(seconds))]


Part = Literal["whole", "input", "weight"]
"""A backward pass, or a half of one: the gradient of its input, or of its weights."""

PARTS: dict[type, Part] = {Backward: "whole", BackwardInput: "input", BackwardWeight: "weight"}


class Moment(NamedTuple):
    """The beginning of a backward pass, when activations are kept of many microbatches; stages count from 0 on a rank.

    Attributes:
        stage, part: whose pass it is, and which half.
        flight: microbatches of which each stage keeps activations for a backward pass.
        halves: microbatches of which each stage keeps what the second half of that needs.
        resumed: whether the rank's last pass was on the same stage.
        ends: whether the stage's gradients have all microbatches after it.
        summed: the stages that have gradients of some microbatches already.
        ended: those that have them of all.
    """

    stage: int
    part: Part
    flight: tuple[int, ...]
    halves: tuple[int, ...]
    resumed: bool
    ends: bool
    summed: frozenset[int] = frozenset()
    ended: frozenset[int] = frozenset()

    def with_more(self, microbatches: int) -> Moment:
        """This moment with so many microbatches more, on every stage that keeps any: all have passed forward, as those
        that are kept have."""
        return self._replace(flight=tuple(count + microbatches if count else 0 for count in self.flight))


@dataclass(frozen=True)
class RankOrder:
    """A pipeline rank's order of work.

    Attributes:
        rank: its place.
        stages: its stages, by number.
        moments: when it keeps most, before and after all of its stages have gradients.
    """

    rank: int
    stages: list[int]
    moments: list[Moment]


def rank_order(rank: int, stages: list[int], order: Sequence[ShardedStep], more: int) -> RankOrder:
    """Go through a rank's order of work, and note when it keeps most.

    Args:
        rank: its place.
        stages: its stages, by number.
        order: its work, with few microbatches.
        more: microbatches that every moment keeps beside.
    """
    place = {stage: number for number, stage in enumerate(stages)}
    work = [step for step in order if isinstance(step, Work)]
    left = Counter(place[step.stage] for step in work if isinstance(step, Backward | BackwardWeight))
    most = _MostKept()
    flight, halves = [0] * len(stages), [0] * len(stages)
    summed, ended = frozenset[int](), frozenset[int]()
    before: Work | None = None
    for step in work:
        at, forward = place[step.stage], isinstance(step, Forward)
        resumed = before is not None and before.stage == step.stage
        if not isinstance(step, BackwardWeight):  # which needs no weight
            before = step
        if forward:
            flight[at] += 1
            continue
        part = PARTS[type(step)]
        ends = part != "input" and left[at] == 1
        most.note(Moment(at, part, tuple(flight), tuple(halves), resumed, ends, summed, ended))
        flight[at] -= part != "weight"
        halves[at] += {"whole": 0, "input": 1, "weight": -1}[part]
        if part != "input":
            left[at] -= 1
            summed, ended = (summed - {at}, ended | {at}) if ends else (summed | {at}, ended)
    return RankOrder(rank, stages, [moment.with_more(more) for moment in most.moments])


class _MostKept:
    """The moments at which most is kept: microbatches, or halves of them; before and after all stages have gradients.

    Of moments that are alike otherwise, the last one has most gradients.
    """

    def __init__(self) -> None:
        self._most: dict[Hashable, int] = {}
        self._found: dict[Hashable, dict[Moment, Moment]] = {}

    def note(self, moment: Moment) -> None:
        halves = sum(moment.halves)
        for key, total in (("all", sum(moment.flight) + halves), ("halves", halves)):
            if key == "halves" and not halves:
                continue
            group = key, len(moment.summed) + len(moment.ended) == len(moment.flight)
            if total > self._most.get(group, 0):
                self._most[group], self._found[group] = total, {}
            if total == self._most[group]:
                alike = moment._replace(summed=frozenset(), ended=frozenset())
                self._found[group][alike] = moment

    @property
    def moments(self) -> list[Moment]:
        return list(dict.fromkeys(moment for found in self._found.values() for moment in found.values()))

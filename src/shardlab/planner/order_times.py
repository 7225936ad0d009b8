"""When the ranks of a pipeline do their passes, if they wait for nothing but messages: their orders of work, timed.

A message begins when its sender and its receiver have come to it; before a rank sends another one to the same rank, it
waits for the one before. An order is laid out once and timed with the seconds of any plan that follows it. What waits
for as much is timed together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.messages import Message, Recv
from shardlab.strategies.schedules.steps import Steps

Array = NDArray[np.float64]
Places = NDArray[np.intp]

KINDS = (Forward, Backward, BackwardInput, BackwardWeight)
"""Kinds of passes, by their place in tables of seconds."""

NUMBER: dict[type[Work], int] = {kind: number for number, kind in enumerate(KINDS)}

NOBODY = -1
"""The event that everything else follows, at 0 seconds."""


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
        events = _Events(steps)
        self._ranks = len(steps.of_ranks)
        places = np.argsort(np.array(events.level, np.intp), kind="stable")
        place = np.append(np.argsort(places), len(places))  # of each event in time's order, and of nobody
        self._before = place[np.array(events.before, np.intp)[places]]
        self._needs = place[np.array(events.needs, np.intp)[places]]
        levels = np.array(events.level, np.intp)[places]
        bounds = np.flatnonzero(np.diff(levels, prepend=-1, append=len(levels)))
        self._slices = [slice(start, stop) for start, stop in zip(bounds.tolist(), bounds[1:].tolist(), strict=False)]
        passes = [work for order in events.passes for work in order]
        self._passes = place[np.array([event for event, _ in passes], np.intp)]
        self._rank = np.repeat(np.arange(self._ranks), [len(order) for order in events.passes])
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
        took, ends = np.zeros(len(self._before)), np.zeros(len(self._before) + 1)
        took[self._passes] = seconds
        took[self._messages] = messages[*self._messages_of]
        took[self._sends] = blocks * messages[*self._sends_of]
        before, needs = self._before, self._needs
        for these in self._slices:
            ends[these] = np.maximum(ends[before[these]], ends[needs[these]]) + took[these]
        ended, done = ends[self._passes], np.zeros(self._ranks)
        np.maximum.at(done, self._rank, ended)
        begun = ended - seconds
        return PassTimes(done, begun[self._last], begun[self._first])


Arriving = tuple[int, bool, int]
"""A message that is waited for: the stage that begins with it, whether forward, and the microbatch."""


class _Events:
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
        # Of each channel, from one rank to another: events at which messages are sent and received, and themselves
        self._sent: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._received: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._came: dict[tuple[int, int], list[int]] = defaultdict(list)
        self._what: dict[tuple[int, int], list[tuple[bool, int]]] = defaultdict(list)
        self._arriving: dict[Arriving, tuple[tuple[int, int], int]] = {}
        ready = list(range(len(steps.of_ranks)))
        while ready:
            rank = ready.pop()
            ready += self._go_on(rank)
        assert all(at == len(order) for at, order in zip(self._at, self._steps, strict=True)), "no order is stuck"

    def _event(self, before: int, needs: int) -> int:
        self.before.append(before)
        self.needs.append(needs)
        level = self.level
        level.append(1 + max(level[before] if before >= 0 else -1, level[needs] if needs >= 0 else -1))
        return len(level) - 1

    def _go_on(self, rank: int) -> list[int]:
        """Follow a rank's order until it has to wait; tell who may go on."""
        order, others = self._steps[rank], list[int]()
        for at in range(self._at[rank], len(order)):
            step = order[at]
            if isinstance(step, Work):
                needs = self._needed(step)
                if needs is None:
                    break
                self._now[rank] = event = self._event(self._now[rank], needs)
                self.passes[rank].append((event, step))
            elif isinstance(step, Message):
                if not self._meet(rank, step):
                    break
                others.append(step.peer)
            self._at[rank] = at + 1
        return others

    def _needed(self, step: Work) -> int | None:
        """The message that a pass waits for (None: it has not begun)."""
        key = step.stage, isinstance(step, Forward), step.microbatch
        if isinstance(step, BackwardWeight) or key not in self._arriving:
            return NOBODY
        channel, number = self._arriving[key]
        came = self._came[channel]
        return came[number] if number < len(came) else None

    def _meet(self, rank: int, step: Message) -> bool:
        """Send or receive a message, unless the one sent before it has not begun."""
        if isinstance(step, Recv):
            channel = step.peer, rank
            self._arriving[step.stage, step.forward, step.microbatch] = channel, len(self._received[channel])
            self._received[channel].append(self._now[rank])
        else:
            channel = rank, step.peer
            number, came = len(self._sent[channel]), self._came[channel]
            if number > len(came):
                return False
            self._now[rank] = event = self._event(self._now[rank], came[-1] if number else NOBODY)
            self._sent[channel].append(event)
            self._what[channel].append((not step.forward, step.stage))
            self.sends[event] = not step.forward, step.stage
        came = self._came[channel]
        if min(len(self._sent[channel]), len(self._received[channel])) > len(came):
            number = len(came)
            message = self._event(self._sent[channel][number], self._received[channel][number])
            self.messages[message] = self._what[channel][number]
            came.append(message)
        return True

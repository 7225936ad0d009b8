"""When the ranks of a pipeline do their passes, if they wait for nothing but messages: their orders of work, timed.

An order is laid out once, as events, and timed with the seconds of any plan that follows it. What waits for as much is
timed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.order_events import OrderEvents
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.steps import Steps

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

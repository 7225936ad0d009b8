"""Queue of what waits in a search, and what of it goes to workers."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import chain, count
from math import inf

from shardlab.planner.floors import Floors
from shardlab.planner.waiting import Phase, Waiting, key_of

HANDED_OUT = 128
"""Shapes and pipelines that a worker deals at a time, at least."""

HANDS = 32
"""A worker deals one of so many parts of all of them, where that is more."""


class WaitingQueue:
    """All that waits in a search.

    Args:
        floors: of the problem that is searched.

    Attributes:
        phase: of the search.
    """

    def __init__(self, floors: Floors) -> None:
        self.phase: Phase = "scouts"
        self._floors = floors
        self._room = floors.problem.room
        self._heap: list[Waiting] = []
        self._aside: list[Waiting] = []
        self._above: dict[str, float] = {}  # by kinds of parallelism, the least ratio of forecast bytes to their floor
        self._tie = count()

    def __len__(self) -> int:
        """How much waits, but for what is set aside."""
        return len(self._heap)

    def __iter__(self) -> Iterator[Waiting]:
        return chain(self._heap, self._aside)

    def begin(self, phase: Phase) -> None:
        """Go on to a phase, in which other things come first."""
        self.phase = phase
        self._heap = [self._keyed(each) for each in self._heap]
        heapq.heapify(self._heap)

    def push(self, waiting: Waiting) -> None:
        """Let something wait."""
        self.push_back(waiting._replace(tie=next(self._tie)))

    def push_back(self, waiting: Waiting) -> None:
        """Let something wait that has waited before, and that more is known of now."""
        heapq.heappush(self._heap, self._keyed(waiting))

    def pop(self) -> Waiting:
        """Take out what comes first."""
        return heapq.heappop(self._heap)

    def set_aside(self, waiting: Waiting) -> None:
        """Let something wait until it is taken back."""
        self._aside.append(waiting)

    def take_back(self) -> None:
        """Take back all that was set aside."""
        self._heap += self._aside
        self._aside = []
        heapq.heapify(self._heap)

    def note_bytes(self, kinds: str, above: float) -> None:
        """Note how many times its floor of bytes a plan of some kinds of parallelism takes."""
        self._above[kinds] = min(self._above.get(kinds, inf), above)

    def hand_out(self, least: float, deal: Callable[[list[Waiting]], None]) -> None:
        """Hand out shapes and pipelines, if many wait; what is slower than `least` seconds waits no longer.

        What takes many pipeline ranks goes first, one mesh after the other: so hardly any floor is worked out twice.

        Args:
            least: seconds above which nothing is worth a forecast.
            deal: is given them, before they are out of the queue.
        """
        if len(self._heap) < 2 * HANDED_OUT:
            return
        wanted = [each for each in self._heap if each.seconds <= least]
        wanted.sort(key=lambda each: (each.depth == 2, -each.shape.mesh.pp, each.shape.mesh.tp, each.shape.mesh.cp))
        many = max(HANDED_OUT, len(wanted) // HANDS)
        given = [each for each in wanted[:many] if each.depth < 2] if len(wanted) >= 2 * HANDED_OUT else []
        if given:
            deal(given)
        self._heap = wanted[len(given) :]
        heapq.heapify(self._heap)

    def _keyed(self, waiting: Waiting) -> Waiting:
        """What waits, with its key."""
        passes = waiting.shape.mesh.pp * self._floors.each(waiting.shape)
        likely = waiting.bytes * self._above.get(waiting.kinds, 1.0)
        return waiting._replace(key=key_of(waiting, self.phase, likely / self._room, passes))

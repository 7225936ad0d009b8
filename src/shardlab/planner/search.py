"""Best first search: what is likely to be fastest is forecast next, until floors say that nothing faster is left.

What is likely is a guess: what the time would be if no communication among data-parallel ranks ran beside passes. So
a good plan is found early, and floors leave out most of the rest.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from itertools import chain, count
from math import inf
from typing import Any, NamedTuple

import numpy as np

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.language.world import gc_paused
from shardlab.planner.bounds import Floors
from shardlab.planner.bounds.step import shared_as
from shardlab.planner.problem import Candidate, PlanShape, Problem, family, model_kinds
from shardlab.planner.results import Found, Phase, PlanOutcome, Waiting, key_of
from shardlab.planner.space import legal, pipelined, shapes
from shardlab.planner.workers import Answer, Ask, Asked, AskedDeal, Change, Deals, Workers
from shardlab.strategies.plan.plan import Plan

SCOUTING = 0.4
"""Share of the time that scouts may take."""

TOLD = 64
"""Shapes after which it is told how many there are so far."""

Told = Callable[[Found, int], None]
"""Is told what is found so far, and how many candidates wait."""


class Coming(NamedTuple):
    """A candidate whose forecast was asked for, with its floors of seconds and bytes."""

    candidate: Candidate
    seconds: float
    bytes: float


class Search:
    """One search of a problem's space.

    Args:
        problem: what is planned.
        deadline: seconds that it may take. The smallest plans are forecast even then, until one fits.
        ask: what forecasts candidates.
        ahead: how many it is asked for at a time.
        told: is called again and again.
        change: what the problem that is asked about has more of.
        best: seconds of a plan that is known; only faster ones are looked for.
        within: the search ends when nothing is left that could be faster by more than this share; below 0, when nothing
            is left that could be slower by less.
        ran_out: plans that were run, and ran out of memory.
    """

    def __init__(
        self,
        problem: Problem,
        ask: Ask | Workers,
        *,
        deadline: float = inf,
        ahead: int = 1,
        told: Told | None = None,
        change: Change = "",
        best: float = inf,
        within: float = 0.0,
        ran_out: frozenset[Candidate] = frozenset(),
    ) -> None:
        self.problem = problem
        self._change: Change = change
        self.found = Found()
        self._room = problem.room
        self._scouts = Scouts(problem.room)
        self._began = time.monotonic()
        self._until, self._scouting = self._began + deadline, self._began + SCOUTING * deadline
        self._ahead = ahead
        self._workers = ask if isinstance(ask, Workers) else Workers(ask)
        self._dealer = self._workers.dealer(problem, change)
        self._floors = self._dealer.floors
        self._told = told
        self._queue = WaitingQueue(self._floors)
        self._coming: dict[Future[Any], Coming] = {}
        self._dealing: dict[Future[Any], list[Waiting]] = {}
        self._in_hand: float | None = None
        self._generated = False
        self._shapes = shapes(problem)
        self._full: set[PlanShape] = set()  # of which a larger microbatch does not fit either
        self._smallest = SmallestPlans(self._floors)
        self._known: set[Candidate] = set()  # small plans, which need no second forecast
        self._best, self._within, self._ran_out = best, within, ran_out
        self._floor_of: dict[Candidate, float] = {}

    def run(self) -> Found:
        """Search to the end, to the deadline, or until it is interrupted."""
        try:
            self._fill(wholly=False)
            if not self._change:
                self._forecast_all()
                self._forecast_smallest()
                if self._best == inf and not self._generated:
                    self._fill(wholly=True)
                    self._forecast_smallest()
            self._queue.begin("all")
            self._forecast_all()
            self.found.left = self._left()
        except KeyboardInterrupt:
            self.found.left = self._left()
        else:  # what was begun before the best was found is left out: what is told depends on no clock
            least = self._enough()
            self.found.outcomes = [
                each
                for each in self.found.outcomes
                if each.seconds == self._best or self._floor_of.get(each.candidate, 0.0) <= least
            ]
        self.found.seconds = time.monotonic() - self._began
        return self.found

    def _enough(self) -> float:
        """The floor above which nothing is worth a forecast."""
        return self._best * (1.0 - self._within)

    def _left(self) -> float | None:
        """The lowest floor of what waits, was asked for or is in hand, if that could be worth a forecast."""
        if not self._generated:
            return 0.0
        floors = [each.seconds for each in chain(self._queue, *self._dealing.values())]
        floors += [each.seconds for each in self._coming.values()]
        floors += [] if self._in_hand is None else [self._in_hand]
        return min((floor for floor in floors if floor <= self._enough()), default=None)

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _over(self) -> bool:
        """Whether it is late, or scouts have had their share of the time."""
        return time.monotonic() > self._scouting if self._queue.phase == "scouts" else self._late()

    @gc_paused()  # floors stay, and walking them again and again would cost a fifth
    def _fill(self, *, wholly: bool) -> None:
        """Every shape whose state may fit, with its floors; if not `wholly`, as long as there is time."""
        for shape in self._shapes:
            self.found.space["shapes"] += 1
            if (smallest := replace(shape, micro_batch_size=1)) in self._full:
                continue
            floor = self._floors.of_shape(shape)
            if floor.bytes < inf:
                self._smallest.note(shape, floor.bytes)
            if self._room < floor.bytes < inf:
                self._full.add(smallest)
            elif floor.bytes < inf:
                guess = floor.passes + floor.sharing
                self._queue.push(Waiting(0.0, 0, floor.seconds, floor.bytes, guess, shape, passes=floor.passes))
            if self._told is not None and self.found.space["shapes"] % TOLD == 0:
                self._told(self.found, len(self._queue))
            if self._late() and self._queue and not wholly:
                return
        self._generated = True

    def _forecast_smallest(self) -> None:
        """Forecast the smallest plan of each family of which none fits so far, in time or until one does."""
        fitting = self.found.families()
        for bytes, candidate in self._smallest.candidates():
            if candidate in self._known or family(candidate.plan) in fitting:
                continue
            while len(self._coming) >= self._ahead:
                self._take_answers(wait=True)
            if self._late() and self._best < inf:
                break
            self._known.add(candidate)
            self._forecast(candidate, inf, bytes)
        while self._coming:
            self._take_answers(wait=True)

    def _forecast(self, candidate: Candidate, seconds: float, bytes: float) -> None:
        self._scouts.note_forecast(candidate)
        asked = self._workers.forecast(Asked(candidate, change=self._change))
        self._coming[asked] = Coming(candidate, seconds, bytes)

    def _forecast_all(self) -> None:
        """Forecast what is wanted, likely ones first."""
        while not self._over():
            self._take_answers(wait=not self._queue or len(self._coming) >= self._ahead)
            self._hand_out()
            if self._queue and len(self._coming) < self._ahead:
                first = self._queue.pop()
                self._in_hand = first.seconds
                self._go_on(first)
                self._in_hand = None
            elif not self._queue and not self._coming and not self._dealing:
                break
        self._queue.take_back()

    def _go_on(self, first: Waiting) -> None:
        """Work out what comes first, or ask for its forecast."""
        if self._queue.phase == "all" and first.seconds > self._enough():
            return
        if self._queue.phase == "scouts" and not self._scouts.want(first):
            self._queue.set_aside(first)
        elif first.plan is None:
            for each in self._dealer.pipelines(first, self._below()):
                self._queue.push(each)
        elif isinstance(first.plan, Plan):
            self._deal(first)
        elif not first.timed:
            self._time(first, first.plan)
        elif first.plan not in self._known:
            if self._queue.phase == "scouts":
                self._scouts.note_shape(first.shape)
            else:
                self._floor_of[first.plan] = first.seconds
            self._forecast(first.plan, first.seconds, first.bytes)

    def _take_answers(self, *, wait: bool) -> None:
        """Note the answers that have come; or wait for one, for a while."""
        asked: set[Future[Any]] = {*self._coming, *self._dealing}
        if wait and asked:
            futures_wait(asked, 0.2, FIRST_COMPLETED)
        done = [each for each in asked if each.done()]
        for future in done:
            if future in self._coming:
                coming = self._coming.pop(future)
                self._in_hand = coming.seconds
                self._note(coming, future.result())
            else:
                self._in_hand = min(each.seconds for each in self._dealing.pop(future))
                self._note_deals(future.result())
            self._in_hand = None
        if self._told is not None and (wait or done):
            self._told(self.found, len(self._queue))

    def _hand_out(self) -> None:
        """Let workers deal beside this process, once a likely plan is forecast and they have nothing to forecast."""
        least = self._enough()

        def deal(waiting: list[Waiting]) -> None:
            self._dealing[self._workers.deal(AskedDeal(waiting, least, self._change))] = waiting

        idle = self._best < inf and self._floor_of and not self._coming
        if idle and len(self._dealing) < self._workers.beside:
            self._queue.hand_out(least, deal)

    def _note_deals(self, deals: Deals) -> None:
        self.found.space["candidates"] += deals.seen
        for each in deals.candidates:
            self._queue.push(each)

    @gc_paused()
    def _time(self, waiting: Waiting, candidate: Candidate) -> None:
        """Let a candidate wait with the floor of its whole step."""
        seconds = max(waiting.seconds, self._floors.seconds(waiting.shape, candidate))
        self._queue.push_back(waiting._replace(seconds=seconds, guess=seconds, timed=True))

    def _below(self) -> float:
        """The seconds above which no pipeline is let wait; scouts ask for all."""
        return inf if self._queue.phase == "scouts" else max(self._best, self._enough())

    def _deal(self, waiting: Waiting) -> None:
        """Let every candidate with a pipeline wait that may fit."""
        whole = self._queue.phase == "all"
        self._scouts.note_dealt(waiting)
        dealt, candidates = self._dealer.deal(waiting, least=self._enough() if whole else inf, whole=whole)
        self.found.space["candidates"] += dealt.seen
        for each in candidates:
            self._queue.push(each)

    def _note(self, coming: Coming, answer: Answer | None) -> None:
        candidate = coming.candidate
        if answer is None:
            self.found.refused.append(candidate)
            return
        kinds, wanted = model_kinds(candidate.plan.mesh), answer.forecast.memory.unlimited
        self._queue.note_bytes(kinds, wanted / coming.bytes)
        outcome = PlanOutcome(candidate, answer.forecast, ran_out=candidate in self._ran_out)
        self.found.outcomes.append(outcome)
        if outcome.fits:
            self._best = min(self._best, outcome.seconds)


# Queue of what waits in a search, and what of it goes to workers.


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


# Scouts of a search: which few plans of each family are forecast before all others, so that each is seen.


SCOUTS = 6
"""Forecasts of each family before all others; the lowest floors come first."""

SCOUTED = 48
"""Pipelines of each family at most whose candidates are made for those; where hardly any fits, there is no end."""

ROOMY = 0.9
"""Share of the room that the floor of bytes of every second scout may take: what comes closer often does not fit."""


class Scouts:
    """What scouts have seen, and what they are yet to see.

    Args:
        room: bytes of each device.
    """

    def __init__(self, room: float) -> None:
        self._room = room
        self._forecasts = Counter[str]()
        self._dealt = Counter[str]()
        self._shapes: set[PlanShape] = set()

    def note_forecast(self, candidate: Candidate) -> None:
        """Note that a candidate's forecast is asked for."""
        self._forecasts[family(candidate.plan)] += 1

    def note_dealt(self, pipeline: Waiting) -> None:
        """Note that the candidates with a pipeline are made."""
        self._dealt[pipeline.kinds] += 1

    def note_shape(self, shape: PlanShape) -> None:
        """Note that a scout has one of a shape's candidates."""
        self._shapes.add(shape)

    def want(self, waiting: Waiting) -> bool:
        """Whether scouts look at this: more is to be known of its family, and half of them need no luck to fit."""
        name = family(waiting.plan.plan) if isinstance(waiting.plan, Candidate) else waiting.kinds
        known = self._forecasts[name]
        if known >= SCOUTS or (known >= SCOUTS // 2 and waiting.bytes > ROOMY * self._room):
            return False
        if isinstance(waiting.plan, Candidate) and waiting.kinds:  # those of one shape are much alike
            return waiting.shape not in self._shapes
        return isinstance(waiting.plan, Candidate) or self._dealt[name] < SCOUTED


# The plan of each family that takes least memory: forecast first, it tells whether any of the family fits.


TRIED = 4
"""Meshes with the same kinds of parallelism on which the smallest plans are looked for."""

SMALL = "1f1b"
"""The schedule that holds least, but for what finer stages may save; others are looked at where it is not allowed."""


class SmallestPlans:
    """The plans that take least memory, of shapes that are noted one after the other."""

    def __init__(self, floors: Floors) -> None:
        self._floors = floors
        self._shapes: dict[str, dict[Mesh, tuple[float, PlanShape]]] = {}

    def note(self, shape: PlanShape, least: float) -> None:
        """Note a shape, no plan of which takes less than so many bytes."""
        known = self._shapes.setdefault(model_kinds(shape.mesh), {})
        most = known[shape.mesh][0] if shape.mesh in known else inf
        if len(known) >= TRIED:
            most = min(most, max(bytes for bytes, _ in known.values()))
        if least > most or (filled := self._floors.filled(shape)) > most:
            return
        if shape.mesh not in known or (filled, -shape.share) < (most, -known[shape.mesh][1].share):
            known[shape.mesh] = filled, shape
        if len(known) > TRIED:
            del known[max(known, key=lambda mesh: known[mesh][0])]

    def candidates(self) -> list[tuple[float, Candidate]]:
        """The smallest candidate of each family, by floors of bytes; the smallest one first, each with its floor."""
        found: dict[str, tuple[float, Candidate]] = {}
        for _, shape in chain(*(known.values() for known in self._shapes.values())):
            for bytes, candidate in self._of_shape(shape):
                known = found.get(name := family(candidate.plan))
                if known is None or bytes < known[0]:
                    found[name] = bytes, candidate
        return sorted(found.values(), key=lambda each: each[0])

    def _of_shape(self, shape: PlanShape) -> list[tuple[float, Candidate]]:
        """The smallest candidate of each family that a shape has with each of its pipelines, and a floor of its
        bytes."""
        problem, ways = self._floors.problem, self._floors.ways(shape)
        found: list[tuple[float, Candidate]] = []
        plans = list(pipelined(problem, shape))
        for plan in [each for each in plans if each.schedule == SMALL] or plans:
            if not self._floors.follows(shape, plan):
                continue
            named = set[str]()
            order: list[int] = np.argsort(self._floors.bytes_of_ways(shape, plan), kind="stable").tolist()
            for way in order:
                if (name := family(ways.plans[way])) in named:
                    continue
                try:
                    candidate = legal(problem, shape, shared_as(plan, ways.plans[way]))
                except UserError:
                    continue
                if candidate is not None:
                    named.add(name)
                    found.append((self._floors.memory.of(shape, candidate), candidate))
        return found

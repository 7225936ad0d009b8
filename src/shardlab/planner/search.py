"""Best first search: what is likely to be fastest is forecast next, until floors say that nothing faster is left.

What is likely is a guess: what the time would be if no communication among data-parallel ranks ran beside passes. So
a good plan is found early, and floors leave out most of the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from shardlab.planner.dealer import AskedDeal, Change, Deals
from shardlab.planner.families import family, model_kinds
from shardlab.planner.found import Found, PlanOutcome
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.scouts import Scouts
from shardlab.planner.smallest import SmallestPlans
from shardlab.planner.space import shapes
from shardlab.planner.waiting import Waiting
from shardlab.planner.waiting_queue import WaitingQueue
from shardlab.planner.workers import Answer, Ask, Asked, Workers
from shardlab.program.world import gc_paused
from shardlab.strategies.plan import Plan

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
        kinds, wanted = model_kinds(candidate.plan.mesh), answer.forecast.memory.wanted
        self._queue.note_bytes(kinds, wanted / coming.bytes)
        outcome = PlanOutcome(candidate, answer.forecast, ran_out=candidate in self._ran_out)
        self.found.outcomes.append(outcome)
        if outcome.fits:
            self._best = min(self._best, outcome.seconds)

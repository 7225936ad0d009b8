"""Best first search: what is likely to be fastest is forecast next, until floors say that nothing faster is left.

What is likely is a guess: what the time would be if no communication among data-parallel ranks ran beside passes. So
a good plan is found early, and floors leave out most of the rest.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import count
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from shardlab.planner.dealing import deal
from shardlab.planner.families import family, model_kinds
from shardlab.planner.floors import Floors
from shardlab.planner.found import Found, PlanOutcome
from shardlab.planner.pipeline_floors import LaidPipelines
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.space import PlanShape, as_fixed, pipelined, shapes
from shardlab.planner.workers import Answer, Ask, Asked, Change
from shardlab.program.world import gc_paused
from shardlab.strategies.plan import Plan

SCOUTS = 6
"""Forecasts of each family before all others; the lowest floors come first."""

SCOUTING = 0.25
"""Share of the time that they may take."""

SCOUTED = 48
"""Pipelines of each family at most whose candidates are made for those; where hardly any fits, there is no end."""

ROOMY = 0.9
"""Share of the room that the floor of bytes of every second scout may take: what comes closer often does not fit."""

AHEAD = 0.85
"""By how much what was worked out further comes earlier than its guess: a shape, its pipelines, their candidates."""

TIGHT = 0.8
"""Share of the room above which a floor of bytes lets a plan come later."""

MANY = 2**15
"""Microbatches' passes through a pipeline's ranks for which a plan comes as late as one of twice the time."""

LATE = 24
"""Forecasts after the deadline at most, as long as none is of a plan that fits; the lowest floors of bytes first."""


class Waiting(NamedTuple):
    """What waits, first by its key: a shape, a shape's pipeline, or a candidate.

    Attributes:
        key: what comes first has the least.
        tie: its number.
        seconds, bytes: its floors.
        guess: seconds, if nothing ran beside passes.
        shape: whose it is.
        plan: the pipeline or the candidate (None: the shape itself).
        passes: seconds of a pipeline's passes alone, at least.
        timed: whether its order of work is in its floor.
    """

    key: float
    tie: int
    seconds: float
    bytes: float
    guess: float
    shape: PlanShape
    plan: Candidate | Plan | None
    passes: float = 0.0
    timed: bool = False


Phase = Literal["scouts", "all", "late"]
"""A phase of the search: it forecasts some plans of each family, all that may be faster, or whatever may fit."""

Told = Callable[[Found, int], None]
"""Is told what is found so far, and how many candidates wait."""


class Search:
    """One search of a problem's space.

    Args:
        problem: what is planned.
        deadline: seconds that it may take; then it goes on until a plan is found that fits, for `LATE` forecasts.
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
        ask: Ask,
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
        self._floors = Floors(problem)
        self._room = problem.room
        self._began = time.monotonic()
        self._until, self._scouting = self._began + deadline, self._began + SCOUTING * deadline
        self._ask, self._ahead = ask, ahead
        self._told = told
        self._heap: list[Waiting] = []
        self._kept: list[Waiting] = []  # out of the heap while families are scouted
        self._coming: dict[Future[Answer | None], tuple[Candidate, float]] = {}
        self._in_hand: float | None = None
        self._looked = 0  # forecasts when it was late
        self._generated = False
        self._shapes = shapes(problem)
        self._full: set[PlanShape] = set()  # of which a larger microbatch does not fit either
        self._tie = count()
        self._best, self._within, self._ran_out = best, within, ran_out
        self._forecasts: dict[str, int] = {}
        self._floor_of: dict[Candidate, float] = {}
        self._made: dict[str, int] = {}
        self._scouted: set[PlanShape] = set()
        self._pipelined: dict[PlanShape, LaidPipelines | None] = {}
        self._phase: Phase = "scouts"

    def run(self) -> Found:
        """Search to the end, to the deadline, or until it is interrupted."""
        try:
            self._fill(wholly=False)
            if not self._change:
                self._forecast_all()
            self._begin("all")
            self._forecast_all()
            if self._best == inf and (self._heap or not self._generated):
                self._looked = self._answers()
                self._fill(wholly=True)
                self._begin("late")
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
        self.found.open |= {model_kinds(each.shape.mesh) for each in (*self._heap, *self._kept)}
        self.found.seconds = time.monotonic() - self._began
        return self.found

    def _begin(self, phase: Phase) -> None:
        """Go on to a phase, in which other things come first: late, the smallest shapes."""
        self._phase = phase
        self._heap = [
            each._replace(key=each.bytes + (each.plan is not None) * self._room)
            if phase == "late"
            else self._keyed(each)
            for each in self._heap
        ]
        heapq.heapify(self._heap)

    def _enough(self) -> float:
        """The floor above which nothing is worth a forecast."""
        return self._best * (1.0 - self._within)

    def _left(self) -> float | None:
        """The lowest floor of what waits, was asked for or is in hand, if that could be worth a forecast."""
        if not self._generated:
            return 0.0
        floors = [each.seconds for each in (*self._heap, *self._kept)]
        floors += [floor for _, floor in self._coming.values()]
        floors += [] if self._in_hand is None else [self._in_hand]
        return min((floor for floor in floors if floor <= self._enough()), default=None)

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _over(self) -> bool:
        """Whether it is late; or, when it is late already, whether something fits or enough was looked for."""
        if self._phase == "scouts":
            return time.monotonic() > self._scouting
        if self._phase == "all":
            return self._late()
        return self._best < inf or self._answers() >= self._looked + LATE

    def _answers(self) -> int:
        return len(self.found.outcomes) + len(self.found.refused)

    @gc_paused()  # floors stay, and walking them again and again would cost a fifth
    def _fill(self, *, wholly: bool) -> None:
        """Every shape whose state may fit, with its floors; if not `wholly`, as long as there is time."""
        for shape in self._shapes:
            self.found.space["shapes"] += 1
            if (smallest := replace(shape, micro_batch_size=1)) in self._full:
                continue
            floor = self._floors.of_shape(shape)
            if self._room < floor.bytes < inf:
                self._note_too_large(shape.candidate, floor.bytes)
                self._full.add(smallest)
            elif floor.bytes < inf:
                self._push(floor.seconds, floor.passes + floor.sharing, floor.bytes, shape, None)
            if self._late() and self._heap and not wholly:
                return
        self._generated = True

    def _push(
        self,
        seconds: float,
        guess: float,
        bytes: float,
        shape: PlanShape,
        plan: Candidate | Plan | None,
        *,
        passes: float = 0.0,
        timed: bool = False,
    ) -> None:
        """Let something wait."""
        waiting = Waiting(0.0, next(self._tie), seconds, bytes, guess, shape, plan, passes, timed)
        heapq.heappush(self._heap, self._keyed(waiting))

    def _keyed(self, waiting: Waiting) -> Waiting:
        """What waits, with its key: soon comes what is worked out further, takes few passes, or leaves room.

        Scouts take the lowest floors, so that they tell the best of each family.
        """
        depth = 0 if waiting.plan is None else 1 if isinstance(waiting.plan, Plan) else 2
        if self._phase == "scouts":
            return waiting._replace(key=waiting.seconds)
        if self._phase == "late":
            return waiting._replace(key=waiting.bytes - depth * self._room)
        passes = waiting.shape.mesh.pp * self._floors.each(waiting.shape)
        tight = max(0.0, waiting.bytes / self._room - TIGHT)
        return waiting._replace(key=waiting.guess * AHEAD**depth * (1 + passes / MANY) * (1 + tight))

    def _nearer(self, name: str, bytes: float) -> bool:
        """Whether so many bytes are less than those of all of a family that do not fit."""
        known = self.found.too_large.get(name)
        return known is None or bytes < known[0]

    def _note_too_large(self, candidate: Candidate, bytes: float) -> None:
        candidate = as_fixed(self.problem, candidate)
        name = family(candidate.plan)
        if name not in self.found.too_large or bytes < self.found.too_large[name][0]:
            self.found.too_large[name] = bytes, candidate

    def _forecast_all(self) -> None:
        """Forecast what is wanted, likely ones first."""
        coming = self._coming
        while not self._over():
            while self._heap and len(coming) < self._ahead and not self._over():
                first = heapq.heappop(self._heap)
                self._in_hand = first.seconds
                if self._phase == "all" and first.seconds > self._enough():
                    self.found.open.add(model_kinds(first.shape.mesh))
                elif self._phase == "scouts" and not self._wants(first):
                    self._kept.append(first)
                elif first.plan is None:
                    self._expand(first)
                elif isinstance(first.plan, Plan):
                    self._deal(first, first.plan)
                elif not first.timed and self._phase != "late":
                    self._time(first, first.plan)
                else:
                    name = family(first.plan.plan)
                    self._forecasts[name] = self._forecasts.get(name, 0) + 1
                    if self._phase == "scouts":
                        self._scouted.add(first.shape)
                    else:
                        self._floor_of[first.plan] = first.seconds
                    coming[self._ask(Asked(first.plan, change=self._change))] = first.plan, first.seconds
                self._in_hand = None
            if not coming:
                break
            for done in wait(coming, 0.2, FIRST_COMPLETED).done:
                candidate, self._in_hand = coming[done]
                del coming[done]
                self._note(candidate, done.result())
                self._in_hand = None
            if self._told is not None:
                self._told(self.found, len(self._heap))
        self._heap += self._kept
        self._kept = []
        heapq.heapify(self._heap)

    @gc_paused()
    def _time(self, waiting: Waiting, candidate: Candidate) -> None:
        """Let a candidate wait with the floor of its whole step."""
        seconds = max(waiting.seconds, self._floors.seconds(waiting.shape, candidate))
        heapq.heappush(self._heap, self._keyed(waiting._replace(seconds=seconds, guess=seconds, timed=True)))

    def _wants(self, waiting: Waiting) -> bool:
        """Whether scouts look at this: more is to be known of its family, and half of them need no luck to fit."""
        name = family(waiting.plan.plan) if isinstance(waiting.plan, Candidate) else model_kinds(waiting.shape.mesh)
        known = self._forecasts.get(name, 0)
        if known >= SCOUTS or (known >= SCOUTS // 2 and waiting.bytes > ROOMY * self._room):
            return False
        if isinstance(waiting.plan, Candidate) and model_kinds(waiting.shape.mesh):  # those of one shape are much alike
            return waiting.shape not in self._scouted
        return isinstance(waiting.plan, Candidate) or self._made.get(name, 0) < SCOUTED

    @gc_paused()
    def _expand(self, waiting: Waiting) -> None:
        """Every pipeline of a shape, with its floors."""
        shape = waiting.shape
        alike = replace(shape, micro_batch_size=1, precision=self.problem.precisions[0])
        if alike not in self._pipelined:
            plans = list(pipelined(self.problem, shape))
            self._pipelined[alike] = self._floors.pipelines.laid(shape, plans) if plans else None
        if (laid := self._pipelined[alike]) is None:
            return
        sharing, all = waiting.guess - self._floors.passes_of(shape), self._floors.pipelines.seconds(shape, laid)
        least = inf if self._phase == "scouts" else max(self._best, self._enough())
        floors = self._floors.fitting(shape).least(all)
        for place in np.flatnonzero(floors <= least).tolist():
            seconds, passes = max(waiting.seconds, float(floors[place])), float(all[place])
            self._push(seconds, passes + sharing, waiting.bytes, shape, laid.plans[place], passes=passes)

    @gc_paused()
    def _deal(self, waiting: Waiting, plan: Plan) -> None:
        """Every candidate with a pipeline that may fit, with its floors."""
        shape, name = waiting.shape, model_kinds(waiting.shape.mesh)
        self._made[name] = self._made.get(name, 0) + 1
        whole = self._phase == "all"
        dealt = deal(
            self._floors,
            shape,
            plan,
            waiting.passes,
            least=self._enough() if whole else inf,
            whole=whole,
            open=name in self.found.open,
            nearer=self._nearer,
            too_large=self._note_too_large,
        )
        self.found.space["candidates"] += dealt.seen
        if dealt.open:
            self.found.open.add(name)
        for each in dealt.candidates:
            self._push(each.seconds, each.guess, each.bytes, shape, each.candidate, timed=whole)

    def _note(self, candidate: Candidate, answer: Answer | None) -> None:
        if answer is None:
            self.found.refused.append(candidate)
            return
        outcome = PlanOutcome(candidate, answer.forecast, ran_out=candidate in self._ran_out)
        self.found.outcomes.append(outcome)
        if outcome.fits:
            self._best = min(self._best, outcome.seconds)

"""Best first search: what has the lowest floor is forecast next, until nothing is left that could be faster."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from itertools import count

from shardlab.planner.bounds import Floors
from shardlab.planner.families import family, model_kinds
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.space import PlanShape, as_fixed, dealt, follows, pipelined, shapes
from shardlab.planner.workers import Answer, Ask, Asked, Change
from shardlab.predict.forecast import Forecast
from shardlab.strategies.plan import Plan

SCOUTS = 6
"""Forecasts of each family before all others; the lowest floors come first."""

LATE = 24
"""Forecasts after the deadline at most, as long as none is of a plan that fits."""

Waiting = tuple[float, int, PlanShape, Candidate | Plan | None]
"""What waits, first by its floor: a shape, a shape's pipeline, or a candidate."""


@dataclass(frozen=True)
class PlanOutcome:
    """A candidate and what was found of it.

    Attributes:
        candidate: which.
        forecast: its time and memory.
        corrected: seconds of a step by what was measured, of it or of others (None: nothing was).
    """

    candidate: Candidate
    forecast: Forecast
    corrected: float | None = None

    @property
    def family(self) -> str:
        return family(self.candidate.plan)

    @property
    def fits(self) -> bool:
        """Whether there is room, and as much beside it as the recipe wants of a plan that is chosen, or it ran."""
        return self.corrected is not None or (self.forecast.memory.fits and self.forecast.memory.safe)

    @property
    def seconds(self) -> float:
        return self.forecast.seconds if self.corrected is None else self.corrected

    @property
    def rank(self) -> tuple[float, float, str]:
        """A key that sorts the better one first, always the same of those that are equal."""
        return self.seconds, self.forecast.memory.total, repr(self.candidate)


@dataclass
class Found:
    """What a search has found.

    Attributes:
        outcomes: every candidate that was forecast.
        space: how many shapes and candidates were seen; those of shapes that a floor discards were not generated.
        too_large: of each family, the candidate with the lowest floor of bytes that does not fit, and that floor.
        refused: candidates that the code which runs plans does not accept.
        open: kinds of parallelism beside the data's of plans that were not forecast.
        left: the lowest floor of what was not forecast, 0 if not all was generated (None: nothing is left that could be
            faster).
        seconds: how long it took.
    """

    outcomes: list[PlanOutcome] = field(default_factory=list[PlanOutcome])
    space: dict[str, int] = field(default_factory=lambda: {"shapes": 0, "candidates": 0})
    too_large: dict[str, tuple[float, Candidate]] = field(default_factory=dict[str, tuple[float, Candidate]])
    refused: list[Candidate] = field(default_factory=list[Candidate])
    open: set[str] = field(default_factory=set[str])
    left: float | None = None
    seconds: float = 0.0

    @property
    def fitting(self) -> list[PlanOutcome]:
        """Those that fit, fastest first."""
        return sorted((each for each in self.outcomes if each.fits), key=lambda each: each.rank)

    @property
    def best(self) -> PlanOutcome | None:
        fitting = self.fitting
        return fitting[0] if fitting else None

    def families(self) -> dict[str, PlanOutcome]:
        """The best of each family that fits."""
        best: dict[str, PlanOutcome] = {}
        for each in self.fitting:
            best.setdefault(each.family, each)
        return best

    def misses(self) -> dict[str, tuple[float, Candidate]]:
        """Tell which plan comes nearest, of each family of which none fits, and its bytes or a floor of them."""
        nearest = dict(self.too_large)
        for each in self.outcomes:
            known = nearest.get(each.family)
            if not each.fits and (known is None or each.forecast.memory.wanted < known[0]):
                nearest[each.family] = each.forecast.memory.wanted, each.candidate
        fitting, shown = self.families(), {name: miss for name, miss in nearest.items() if name not in self.open}
        return {
            name: miss
            for name, miss in shown.items()
            if name not in fitting and not ("" in self.open and not model_kinds(miss[1].plan.mesh))
        }


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
    """

    def __init__(
        self,
        problem: Problem,
        ask: Ask,
        *,
        deadline: float = float("inf"),
        ahead: int = 1,
        told: Told | None = None,
        change: Change = "",
        best: float = float("inf"),
        within: float = 0.0,
    ) -> None:
        self.problem = problem
        self._change: Change = change
        self.found = Found()
        self._floors = Floors(problem)
        self._context = 0.0 if problem.cluster.on_cpu else problem.recipe.memory.context_bytes
        self._room = problem.room - self._context
        self._began = time.monotonic()
        self._until = self._began + deadline
        self._ask, self._ahead = ask, ahead
        self._told = told
        self._heap: list[Waiting] = []
        self._kept: list[Waiting] = []  # out of the heap while families are scouted
        self._coming: dict[Future[Answer | None], tuple[Candidate, float]] = {}
        self._in_hand: float | None = None
        self._generated = False
        self._tie = count()
        self._best, self._within = best, within
        self._forecasts: dict[str, int] = {}
        self._floor_of: dict[Candidate, float] = {}
        self._scouted = bool(change)

    def run(self) -> Found:
        """Search to the end, to the deadline, or until it is interrupted."""
        try:
            self._fill()
            if not self._change:
                self._forecast_all()
            self._scouted = True
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
        self.found.open = {model_kinds(shape.mesh) for _, _, shape, _ in (*self._heap, *self._kept)}
        self.found.seconds = time.monotonic() - self._began
        return self.found

    def _enough(self) -> float:
        """The floor above which nothing is worth a forecast."""
        return self._best * (1.0 - self._within)

    def _left(self) -> float | None:
        """The lowest floor of what waits, was asked for or is in hand, if that could be worth a forecast."""
        if not self._generated:
            return 0.0
        floors = [floor for floor, *_ in (*self._heap[:1], *self._kept)]
        floors += [floor for _, floor in self._coming.values()]
        floors += [] if self._in_hand is None else [self._in_hand]
        return min((floor for floor in floors if floor <= self._enough()), default=None)

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _over(self) -> bool:
        """Whether it is late, and something is found or was looked for."""
        asked = len(self.found.outcomes) + len(self.found.refused)
        return self._late() and (self._best < float("inf") or asked >= LATE)

    def _fill(self) -> None:
        """Every shape whose state may fit, with its floor."""
        full: set[PlanShape] = set()  # of which a larger microbatch does not fit either
        for shape in shapes(self.problem):
            self.found.space["shapes"] += 1
            if (smallest := replace(shape, micro_batch_size=1)) in full:
                continue
            if (bytes := self._floors.shape_bytes(shape)) > self._room:
                self._note_too_large(shape.candidate, bytes)
                full.add(smallest)
            else:
                self._push(self._floors.shape_seconds(shape), shape, None)
            if self._late() and self._heap:
                return
        self._generated = True

    def _push(self, floor: float, shape: PlanShape, candidate: Candidate | Plan | None) -> None:
        heapq.heappush(self._heap, (floor, next(self._tie), shape, candidate))

    def _note_too_large(self, candidate: Candidate, bytes: float) -> None:
        candidate, bytes = as_fixed(self.problem, candidate), bytes + self._context
        name = family(candidate.plan)
        if name not in self.found.too_large or bytes < self.found.too_large[name][0]:
            self.found.too_large[name] = bytes, candidate

    def _forecast_all(self) -> None:
        """Forecast what is wanted, lowest floor first."""
        coming = self._coming
        while not self._over():
            while self._heap and len(coming) < self._ahead and not self._over():
                floor, _, shape, candidate = self._heap[0]
                if self._scouted and floor > self._enough():
                    break
                self._in_hand = floor
                if not self._scouted and not self._lacks(shape, candidate):
                    self._kept.append(heapq.heappop(self._heap))
                    self._in_hand = None
                    continue
                heapq.heappop(self._heap)
                if candidate is None:
                    self._expand(shape)
                elif isinstance(candidate, Plan):
                    self._deal(shape, candidate)
                else:
                    name = family(candidate.plan)
                    self._forecasts[name] = self._forecasts.get(name, 0) + 1
                    if self._scouted:
                        self._floor_of[candidate] = floor
                    coming[self._ask(Asked(candidate, change=self._change))] = candidate, floor
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

    def _lacks(self, shape: PlanShape, candidate: Candidate | Plan | None) -> bool:
        """Whether more is to be known of a candidate's family, or of some family of a shape's kinds of parallelism."""
        name = family(candidate.plan) if isinstance(candidate, Candidate) else model_kinds(shape.mesh)
        return not name or self._forecasts.get(name, 0) < SCOUTS

    def _expand(self, shape: PlanShape) -> None:
        """Every pipeline of a shape, with its floor."""
        for plan in pipelined(self.problem, shape):
            floor = self._floors.pipeline_seconds(shape, plan)
            if floor <= max(self._best, self._enough()) or not self._scouted:
                self._push(floor, shape, plan)

    def _deal(self, shape: PlanShape, plan: Plan) -> None:
        """Every candidate with a pipeline that may fit, with its floor."""
        if not follows(self.problem, shape, plan):
            return
        bare = Candidate(plan, shape.micro_batch_size, shape.precision)
        if (bytes := self._floors.bytes(shape, bare, sharded=True)) > self._room:
            self._note_too_large(bare, bytes)
            return
        for candidate in dealt(self.problem, shape, plan):
            self.found.space["candidates"] += 1
            if (bytes := self._floors.bytes(shape, candidate)) > self._room:
                self._note_too_large(candidate, bytes)
            else:
                self._push(self._floors.seconds(shape, candidate), shape, candidate)

    def _note(self, candidate: Candidate, answer: Answer | None) -> None:
        if answer is None:
            self.found.refused.append(candidate)
            return
        outcome = PlanOutcome(candidate, answer.forecast)
        self.found.outcomes.append(outcome)
        if outcome.fits:
            self._best = min(self._best, outcome.seconds)

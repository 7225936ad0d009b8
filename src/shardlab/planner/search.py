"""Best-first search: simulate the plan that is likely the fastest, until no lower bound is below the best step time.

The search expands shapes into pipelines and pipelines into plans (`Search`), with a priority queue of all three
(`WaitingQueue`). The priority is a guess of the step time that ignores communication of data-parallel ranks. A good
plan is therefore found early, and lower bounds then discard most of the rest.

Before the main search, `WarmStart` picks a few plans of each family, so that results can compare families, and
`SmallestPlans` the plan of each family that needs least memory, which tells whether any plan of the family fits.
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
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.bounds.step import with_sharding_option
from shardlab.planner.problem import Candidate, PlanShape, Problem, family, model_kinds
from shardlab.planner.results import Phase, PlanOutcome, QueueEntry, Results, priority_of
from shardlab.planner.space import legal, pipelined, shapes
from shardlab.planner.workers import Answer, Ask, Change, Expansion, ExpansionRequest, Query, Workers
from shardlab.strategies.plan.plan import Plan

SHAPES_PER_REPORT = 64
"""Number of shapes between two progress reports."""

OnProgress = Callable[[Results, int], None]
"""Callback with the results so far and the number of entries in the queue."""


class PendingForecast(NamedTuple):
    """Candidate that is being simulated, with its lower bounds of seconds and bytes."""

    candidate: Candidate
    seconds: float
    bytes: float


WARM_START_SHARE = 0.4
"""Share of the time that the warm start may take."""


class Search:
    """Search of the space of one problem.

    Args:
        problem: the problem.
        ask: function that simulates a candidate.
        deadline: longest duration in seconds. After it, only the smallest plans are simulated, until one fits.
        ahead: number of candidates that are simulated at a time.
        on_progress: callback for progress reports.
        change: resource that `problem` has doubled.
        best: seconds of a known plan; only faster plans are searched.
        within: the search ends when no other plan can be faster by more than this share. If below 0, it also includes
            plans that are slower by less than this share.
        ran_out: plans that ran out of memory when they were run.
    """

    def __init__(
        self,
        problem: Problem,
        ask: Ask | Workers,
        *,
        deadline: float = inf,
        ahead: int = 1,
        on_progress: OnProgress | None = None,
        change: Change = "",
        best: float = inf,
        within: float = 0.0,
        ran_out: frozenset[Candidate] = frozenset(),
    ) -> None:
        self.problem = problem
        self._change: Change = change
        self.results = Results()
        self._memory = problem.room
        self._warm_start = WarmStart(problem.room)
        self._began = time.monotonic()
        self._until, self._warm_start_until = self._began + deadline, self._began + WARM_START_SHARE * deadline
        self._ahead = ahead
        self._workers = ask if isinstance(ask, Workers) else Workers(ask)
        self._expander = self._workers.expander(problem, change)
        self._bounds = self._expander.bounds
        self._on_progress = on_progress
        self._queue = WaitingQueue(self._bounds)
        self._pending: dict[Future[Any], PendingForecast] = {}
        self._expanding: dict[Future[Any], list[QueueEntry]] = {}
        self._current: float | None = None
        self._generated = False
        self._shapes = shapes(problem)
        self._full: set[PlanShape] = set()  # of which a larger microbatch does not fit either
        self._smallest = SmallestPlans(self._bounds)
        self._known: set[Candidate] = set()  # small plans, which need no second forecast
        self._best, self._within, self._ran_out = best, within, ran_out
        self._bound_of: dict[Candidate, float] = {}

    def run(self) -> Results:
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
            self.results.left = self._left()
        except KeyboardInterrupt:
            self.results.left = self._left()
        else:  # leave out plans that only timing let through, so that results do not depend on a clock
            least = self._enough()
            self.results.outcomes = [
                each
                for each in self.results.outcomes
                if each.seconds == self._best or self._bound_of.get(each.candidate, 0.0) <= least
            ]
        self.results.seconds = time.monotonic() - self._began
        return self.results

    def _enough(self) -> float:
        """Return the lower bound above which no candidate needs a simulation."""
        return self._best * (1.0 - self._within)

    def _left(self) -> float | None:
        """The lowest lower bound of what waits, was asked for or is in hand, if that could be worth a forecast."""
        if not self._generated:
            return 0.0
        bounds = [each.seconds for each in chain(self._queue, *self._expanding.values())]
        bounds += [each.seconds for each in self._pending.values()]
        bounds += [] if self._current is None else [self._current]
        return min((bound for bound in bounds if bound <= self._enough()), default=None)

    def _late(self) -> bool:
        return time.monotonic() > self._until

    def _phase_over(self) -> bool:
        """Return whether the time of the phase is up."""
        return time.monotonic() > self._warm_start_until if self._queue.phase == "warm start" else self._late()

    @gc_paused()  # lower bounds stay, and walking them again and again would cost a fifth
    def _fill(self, *, wholly: bool) -> None:
        """Every shape whose state may fit, with its lower bounds; if not `wholly`, as long as there is time."""
        for shape in self._shapes:
            self.results.space["shapes"] += 1
            if (smallest := replace(shape, micro_batch_size=1)) in self._full:
                continue
            bound = self._bounds.of_shape(shape)
            if bound.bytes < inf:
                self._smallest.note(shape, bound.bytes)
            if self._memory < bound.bytes < inf:
                self._full.add(smallest)
            elif bound.bytes < inf:
                guess = bound.passes + bound.sharing
                self._queue.push(QueueEntry(0.0, 0, bound.seconds, bound.bytes, guess, shape, passes=bound.passes))
            if self._on_progress is not None and self.results.space["shapes"] % SHAPES_PER_REPORT == 0:
                self._on_progress(self.results, len(self._queue))
            if self._late() and self._queue and not wholly:
                return
        self._generated = True

    def _forecast_smallest(self) -> None:
        """Forecast the smallest plan of each family of which none fits so far, in time or until one does."""
        fitting = self.results.families()
        for bytes, candidate in self._smallest.candidates():
            if candidate in self._known or family(candidate.plan) in fitting:
                continue
            while len(self._pending) >= self._ahead:
                self._collect_answers(wait=True)
            if self._late() and self._best < inf:
                break
            self._known.add(candidate)
            self._forecast(candidate, inf, bytes)
        while self._pending:
            self._collect_answers(wait=True)

    def _forecast(self, candidate: Candidate, seconds: float, bytes: float) -> None:
        self._warm_start.note_forecast(candidate)
        asked = self._workers.forecast(Query(candidate, change=self._change))
        self._pending[asked] = PendingForecast(candidate, seconds, bytes)

    def _forecast_all(self) -> None:
        """Simulate candidates in the order of their priorities."""
        while not self._phase_over():
            self._collect_answers(wait=not self._queue or len(self._pending) >= self._ahead)
            self._expand_in_workers()
            if self._queue and len(self._pending) < self._ahead:
                first = self._queue.pop()
                self._current = first.seconds
                self._process(first)
                self._current = None
            elif not self._queue and not self._pending and not self._expanding:
                break
        self._queue.take_back()

    def _process(self, first: QueueEntry) -> None:
        """Expand an entry of the queue, or start to simulate it."""
        if self._queue.phase == "all" and first.seconds > self._enough():
            return
        if self._queue.phase == "warm start" and not self._warm_start.want(first):
            self._queue.set_aside(first)
        elif first.plan is None:
            for each in self._expander.pipelines(first, self._below()):
                self._queue.push(each)
        elif isinstance(first.plan, Plan):
            self._expand(first)
        elif not first.timed:
            self._time(first, first.plan)
        elif first.plan not in self._known:
            if self._queue.phase == "warm start":
                self._warm_start.note_shape(first.shape)
            else:
                self._bound_of[first.plan] = first.seconds
            self._forecast(first.plan, first.seconds, first.bytes)

    def _collect_answers(self, *, wait: bool) -> None:
        """Note the answers that have come; or wait for one, for a while."""
        asked: set[Future[Any]] = {*self._pending, *self._expanding}
        if wait and asked:
            futures_wait(asked, 0.2, FIRST_COMPLETED)
        done = [each for each in asked if each.done()]
        for future in done:
            if future in self._pending:
                pending = self._pending.pop(future)
                self._current = pending.seconds
                self._note(pending, future.result())
            else:
                self._current = min(each.seconds for each in self._expanding.pop(future))
                self._note_expansion(future.result())
            self._current = None
        if self._on_progress is not None and (wait or done):
            self._on_progress(self.results, len(self._queue))

    def _expand_in_workers(self) -> None:
        """Let idle workers expand entries of the queue, once a first plan fits."""
        least = self._enough()

        def expand(waiting: list[QueueEntry]) -> None:
            self._expanding[self._workers.expand(ExpansionRequest(waiting, least, self._change))] = waiting

        idle = self._best < inf and self._bound_of and not self._pending
        if idle and len(self._expanding) < self._workers.beside:
            self._queue.hand_out(least, expand)

    def _note_expansion(self, expansion: Expansion) -> None:
        self.results.space["candidates"] += expansion.seen
        for each in expansion.candidates:
            self._queue.push(each)

    @gc_paused()
    def _time(self, waiting: QueueEntry, candidate: Candidate) -> None:
        """Queue a candidate again with the lower bound of its whole step."""
        seconds = max(waiting.seconds, self._bounds.seconds(waiting.shape, candidate))
        self._queue.push_back(waiting._replace(seconds=seconds, guess=seconds, timed=True))

    def _below(self) -> float:
        """Return the lower bound above which no pipeline is queued. The warm start queues all."""
        return inf if self._queue.phase == "warm start" else max(self._best, self._enough())

    def _expand(self, waiting: QueueEntry) -> None:
        """Queue every candidate of a pipeline that may fit."""
        whole = self._queue.phase == "all"
        self._warm_start.note_expanded(waiting)
        expanded, candidates = self._expander.expand(waiting, least=self._enough() if whole else inf, whole=whole)
        self.results.space["candidates"] += expanded.seen
        for each in candidates:
            self._queue.push(each)

    def _note(self, pending: PendingForecast, answer: Answer | None) -> None:
        candidate = pending.candidate
        if answer is None:
            self.results.refused.append(candidate)
            return
        kinds, wanted = model_kinds(candidate.plan.mesh), answer.forecast.memory.unlimited
        self._queue.note_bytes(kinds, wanted / pending.bytes)
        outcome = PlanOutcome(candidate, answer.forecast, ran_out=candidate in self._ran_out)
        self.results.outcomes.append(outcome)
        if outcome.fits:
            self._best = min(self._best, outcome.seconds)


HANDED_OUT = 128
"""Smallest number of entries that a worker expands at a time."""

HANDS = 32
"""A worker expands at least one of this many parts of the queue at a time."""


class WaitingQueue:
    """Priority queue of shapes, pipelines and candidates.

    Args:
        lower bounds: of the problem that is searched.

    Attributes:
        phase: of the search.
    """

    def __init__(self, bounds: LowerBounds) -> None:
        self.phase: Phase = "warm start"
        self._bounds = bounds
        self._memory = bounds.problem.room
        self._heap: list[QueueEntry] = []
        self._aside: list[QueueEntry] = []
        self._above: dict[str, float] = {}  # kinds of parallelism to the least ratio of bytes to their lower bound
        self._tie = count()

    def __len__(self) -> int:
        """How much waits, but for what is set aside."""
        return len(self._heap)

    def __iter__(self) -> Iterator[QueueEntry]:
        return chain(self._heap, self._aside)

    def begin(self, phase: Phase) -> None:
        """Go on to a phase, in which other things come first."""
        self.phase = phase
        self._heap = [self._keyed(each) for each in self._heap]
        heapq.heapify(self._heap)

    def push(self, waiting: QueueEntry) -> None:
        """Let something wait."""
        self.push_back(waiting._replace(tie=next(self._tie)))

    def push_back(self, waiting: QueueEntry) -> None:
        """Let something wait that has waited before, and that more is known of now."""
        heapq.heappush(self._heap, self._keyed(waiting))

    def pop(self) -> QueueEntry:
        """Take out what comes first."""
        return heapq.heappop(self._heap)

    def set_aside(self, waiting: QueueEntry) -> None:
        """Let something wait until it is taken back."""
        self._aside.append(waiting)

    def take_back(self) -> None:
        """Take back all that was set aside."""
        self._heap += self._aside
        self._aside = []
        heapq.heapify(self._heap)

    def note_bytes(self, kinds: str, above: float) -> None:
        """Note how many times its lower bound of bytes a plan of some kinds of parallelism takes."""
        self._above[kinds] = min(self._above.get(kinds, inf), above)

    def hand_out(self, least: float, expand: Callable[[list[QueueEntry]], None]) -> None:
        """Hand out shapes and pipelines, if many wait; what is slower than `least` seconds waits no longer.

        What takes many pipeline ranks goes first, one mesh after the other: so hardly any lower bound is worked out
        twice.

        Args:
            least: seconds above which nothing is worth a forecast.
            expand: function that is called with them before they leave the queue.
        """
        if len(self._heap) < 2 * HANDED_OUT:
            return
        wanted = [each for each in self._heap if each.seconds <= least]
        wanted.sort(key=lambda each: (each.depth == 2, -each.shape.mesh.pp, each.shape.mesh.tp, each.shape.mesh.cp))
        many = max(HANDED_OUT, len(wanted) // HANDS)
        entries = [each for each in wanted[:many] if each.depth < 2] if len(wanted) >= 2 * HANDED_OUT else []
        if entries:
            expand(entries)
        self._heap = wanted[len(entries) :]
        heapq.heapify(self._heap)

    def _keyed(self, waiting: QueueEntry) -> QueueEntry:
        """What waits, with its key."""
        passes = waiting.shape.mesh.pp * self._bounds.each(waiting.shape)
        likely = waiting.bytes * self._above.get(waiting.kinds, 1.0)
        return waiting._replace(key=priority_of(waiting, self.phase, likely / self._memory, passes))


FIRST_FORECASTS = 6
"""Number of candidates of each family in the warm start."""

FIRST_PIPELINES = 48
"""Pipelines of each family at most whose candidates are made for those; where hardly any fits, there is no end."""

ROOMY = 0.9
"""Largest share of the memory for half of the warm start, since plans above it often do not fit."""


class WarmStart:
    """Choice of the few candidates of each family that are simulated first.

    Args:
        room: bytes of each device.
    """

    def __init__(self, room: float) -> None:
        self._memory = room
        self._forecasts = Counter[str]()
        self._expanded = Counter[str]()
        self._shapes: set[PlanShape] = set()

    def note_forecast(self, candidate: Candidate) -> None:
        """Note that a candidate's forecast is asked for."""
        self._forecasts[family(candidate.plan)] += 1

    def note_expanded(self, pipeline: QueueEntry) -> None:
        """Note that the candidates with a pipeline are made."""
        self._expanded[pipeline.kinds] += 1

    def note_shape(self, shape: PlanShape) -> None:
        """Note that the warm start has a candidate of a shape."""
        self._shapes.add(shape)

    def want(self, waiting: QueueEntry) -> bool:
        """Return whether the warm start takes an entry: its family has too few candidates so far."""
        name = family(waiting.plan.plan) if isinstance(waiting.plan, Candidate) else waiting.kinds
        known = self._forecasts[name]
        if known >= FIRST_FORECASTS or (known >= FIRST_FORECASTS // 2 and waiting.bytes > ROOMY * self._memory):
            return False
        if isinstance(waiting.plan, Candidate) and waiting.kinds:  # those of one shape are much alike
            return waiting.shape not in self._shapes
        return isinstance(waiting.plan, Candidate) or self._expanded[name] < FIRST_PIPELINES


TRIED = 4
"""Meshes with the same kinds of parallelism on which the smallest plans are looked for."""

SMALL = "1f1b"
"""The schedule that holds least, but for what finer stages may save; others are looked at where it is not allowed."""


class SmallestPlans:
    """The plans that take least memory, of shapes that are noted one after the other."""

    def __init__(self, bounds: LowerBounds) -> None:
        self._bounds = bounds
        self._shapes: dict[str, dict[Mesh, tuple[float, PlanShape]]] = {}

    def note(self, shape: PlanShape, least: float) -> None:
        """Note a shape, no plan of which takes less than so many bytes."""
        known = self._shapes.setdefault(model_kinds(shape.mesh), {})
        most = known[shape.mesh][0] if shape.mesh in known else inf
        if len(known) >= TRIED:
            most = min(most, max(bytes for bytes, _ in known.values()))
        if least > most or (filled := self._bounds.filled(shape)) > most:
            return
        if shape.mesh not in known or (filled, -shape.share) < (most, -known[shape.mesh][1].share):
            known[shape.mesh] = filled, shape
        if len(known) > TRIED:
            del known[max(known, key=lambda mesh: known[mesh][0])]

    def candidates(self) -> list[tuple[float, Candidate]]:
        """Return (lower bound of bytes, candidate) of the smallest candidate of each family, smallest first."""
        found: dict[str, tuple[float, Candidate]] = {}
        for _, shape in chain(*(known.values() for known in self._shapes.values())):
            for bytes, candidate in self._of_shape(shape):
                known = found.get(name := family(candidate.plan))
                if known is None or bytes < known[0]:
                    found[name] = bytes, candidate
        return sorted(found.values(), key=lambda each: each[0])

    def _of_shape(self, shape: PlanShape) -> list[tuple[float, Candidate]]:
        """The smallest candidate of each family that a shape has with each of its pipelines, and a lower bound of its
        bytes."""
        problem, options = self._bounds.problem, self._bounds.options(shape)
        found: list[tuple[float, Candidate]] = []
        plans = list(pipelined(problem, shape))
        for plan in [each for each in plans if each.schedule == SMALL] or plans:
            if not self._bounds.follows(shape, plan):
                continue
            named = set[str]()
            order: list[int] = np.argsort(self._bounds.bytes_of_options(shape, plan), kind="stable").tolist()
            for option in order:
                if (name := family(options.plans[option])) in named:
                    continue
                try:
                    candidate = legal(problem, shape, with_sharding_option(plan, options.plans[option]))
                except UserError:
                    continue
                if candidate is not None:
                    named.add(name)
                    found.append((self._bounds.memory.of(shape, candidate), candidate))
        return found

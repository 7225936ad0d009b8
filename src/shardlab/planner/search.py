"""Best-first local search for the fastest plan.

The search moves between lines (see `shardlab.planner.lines`), and begins with the lines that an expert tries first.
Every line is guessed, in about a millisecond. The most promising lines are then explored: their plans are simulated
until the smallest share of recomputed blocks that fits is known. Then all neighbours of the fastest lines are guessed.
The search ends when no known line promises to be faster, or when its budget is used up. The best plan so far is known
at any time.

Guesses are corrected by the differences between forecasts and guesses of similar plans (`Corrections`). Answers of
workers are processed in the order of the questions, so the result of a search with a budget of forecasts depends
neither on the clock nor on the number of workers.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Any

from shardlab.language.world import gc_paused
from shardlab.planner.guesses import Guess, guess_line, share_between
from shardlab.planner.lines import neighbours, seeds, shares_of, with_share
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.problem import SHARES, Candidate, Problem, family
from shardlab.planner.results import Improvement, PlanOutcome, Results
from shardlab.planner.workers import Change, Query, Workers, answer_request, apply_change

OnProgress = Callable[[Results, int], None]
"""Callback with the results so far and the number of lines that wait to be explored."""

IN_FLIGHT = 8
"""Number of questions to workers in flight. It is fixed, so that results do not depend on the number of workers."""

GUESSED_AT_A_TIME = 6
"""Number of lines in a question for guesses."""

TOLERANCE = 1.03
"""A line counts as fitting if its guessed bytes are at most this multiple of the memory. Its forecasts then decide."""

PROMISING = 0.02
"""Lines are explored if their corrected guess is slower than the best plan by at most this share."""

FAMILY_PROMISING = -0.02
"""Value of `PROMISING` in the search for the best plan of a family, which need not be exact: a line must promise to be
faster by this share."""

EXPANDED = 0.05
"""Neighbours of a plan are guessed if the plan is slower than the best one by at most this share. In the search for a
family's best plan, only neighbours of the best plan are guessed."""

MAIN_SHARE = 0.75
"""Share of the budget for the best plan. The rest is for the best plan of each family."""

MISSES = 48
"""Largest number of lines that are explored if none fits."""

FAMILY_MISSES = 3
"""Largest number of lines of one family that are explored if none of them fits."""

SLOW_PASSES = 2**14
"""A line whose forecast replays this many passes is ranked as if its step took twice as long, so that plans that take
long to simulate come later."""

RECENT = 8
"""Number of the most recent forecasts of a kind by which its guesses are corrected."""


@dataclass(frozen=True)
class Budget:
    """Limits of a search.

    Attributes:
        seconds: longest duration.
        forecasts: largest number of simulated plans.
    """

    seconds: float = inf
    forecasts: float = inf

    def part(self, share: float) -> Budget:
        return Budget(share * self.seconds, share * self.forecasts)


UNLIMITED = Budget()
"""Budget of a search that ends by itself."""


def guess_lines(lines: Sequence[Candidate], costs: PassCosts) -> list[Guess | None]:
    """Guess seconds and bytes of lines (None: there is no such plan)."""
    return [guess_line(costs, line) for line in lines]


def explore(line: Candidate, guess: Guess, start: str, costs: PassCosts) -> dict[str, PlanOutcome]:
    """Simulate plans of a line until the smallest share of recomputed blocks that fits is known.

    Bytes are assumed to be linear in the share. After one forecast, the slope is that of the guess. After more, it is
    the slope between the forecasts with the smallest and the largest share.

    Args:
        line: the line.
        guess: guess of the line.
        start: share with which to begin.
        costs: costs of the problem's layers.

    Returns:
        The simulated plans by their share of recomputed blocks.
    """
    problem, explored = costs.problem, dict[str, PlanOutcome]()
    plans = [(share, plan) for share in shares_of(problem, line) if (plan := with_share(problem, line, share))]
    sizes = [SHARES[share] for share, _ in plans]
    low, high = -1, len(plans)  # the share at index `low` does not fit, and the share at `high` does
    index: int | None = max(place for place, size in enumerate(sizes) if place == 0 or size <= SHARES[start])
    while index is not None:
        share, candidate = plans[index]
        if (answer := answer_request(problem, Query(candidate))) is None:
            break
        outcome = explored[share] = PlanOutcome(candidate, answer.forecast)
        low, high = (low, index) if outcome.fits else (index, high)
        points = {SHARES[share]: outcome.forecast.memory.unlimited for share, outcome in explored.items()}
        index = next(
            (p for p in range(low + 1, high) if _bytes_at(points, guess, sizes[p]) <= problem.usable_bytes),
            None,
        )
        if index is None and low < high - 1 == len(plans) - 1:  # no share has fitted
            index = high - 1
    return explored


def _bytes_at(points: dict[float, float], guess: Guess, share: float) -> float:
    """Return the estimated bytes of the plan that recomputes a share of the blocks: linear in the share.

    The slope is that between the known points or, if only one is known, that of the guess.
    """
    first, bytes = min(points.items(), key=lambda point: abs(point[0] - share))
    slope = guess.full_bytes - guess.bytes
    if len(points) > 1:
        smallest, largest = min(points), max(points)
        slope = (points[largest] - points[smallest]) / (largest - smallest)
    return bytes + (share - first) * slope


class Corrections:
    """Corrections of guesses, learned from forecasts of plans of the same kind.

    A correction of seconds is a factor. A correction of bytes is a number of bytes to add.

    Args:
        unknown: correction of a guess if none has been learned for its kinds.
    """

    def __init__(self, unknown: float) -> None:
        self._corrections: defaultdict[Hashable, deque[float]] = defaultdict(lambda: deque[float](maxlen=RECENT))
        self._unknown = unknown

    def learn(self, kinds: Sequence[Hashable], correction: float) -> None:
        """Record the correction that a forecast has shown for a guess of these kinds."""
        for kind in kinds:
            self._corrections[kind].append(correction)

    def expect(self, kinds: Sequence[Hashable]) -> float:
        """Return the mean correction of the first kind, or if none is known, the smallest one of the second kind.

        Args:
            kinds: the kind of a guess, and a broader kind that includes it.
        """
        kind, similar = kinds
        corrections = self._corrections.get(kind) or [min(self._corrections.get(similar) or [self._unknown])]
        return sum(corrections) / len(corrections)


def _time_kinds(line: Candidate) -> list[Hashable]:
    plan = line.plan
    context = (plan.context, plan.ulysses_degree) if plan.mesh.cp > 1 else ""
    kind = context, plan.schedule if plan.mesh.pp > 1 else "", plan.zero_stage, plan.shard_optimizer, plan.reshard_after
    return [kind, context]


def _memory_kinds(line: Candidate, share: float) -> list[Hashable]:
    kind = share > 0, line.plan.mesh.cp > 1, line.plan.mesh.tp > 1, line.plan.mesh.pp > 1, line.plan.zero_stage
    return [kind, share > 0]


@dataclass
class Goal:
    """State of the search for the fastest plan, among all lines or among the lines of one family.

    Attributes:
        family: the family (None: all).
        best: seconds of the fastest plan that fits.
        missed: number of explored lines without a plan that fits.
        fitting: heap of (seconds, serial number, plan) of plans whose neighbours are not queued yet. The plans fit, or
            ran out of memory in a measured run.
        misses: heap of (bytes, serial number, plan) of all other plans whose neighbours are not queued yet.
    """

    family: str | None
    best: float = inf
    missed: int = 0
    fitting: list[tuple[float, int, Candidate]] = field(default_factory=list[tuple[float, int, Candidate]])
    misses: list[tuple[float, int, Candidate]] = field(default_factory=list[tuple[float, int, Candidate]])

    def accepts(self, family: str) -> bool:
        return self.family in (None, family)

    def note(self, outcome: PlanOutcome, serial: int) -> None:
        """Record a simulated plan."""
        if outcome.fits:
            self.best = min(self.best, outcome.seconds)
        if outcome.fits or outcome.ran_out:
            heappush(self.fitting, (outcome.seconds, serial, outcome.candidate))
        else:
            heappush(self.misses, (outcome.forecast.memory.unlimited, serial, outcome.candidate))

    def expand(self, slack: float) -> Candidate | None:
        """Pop the plan whose neighbours are guessed next (None: there is none).

        It is the fastest plan of `fitting`, unless that plan is slower than the best one by more than the larger of
        `EXPANDED` and `slack` (in the search for a family: slower at all). If no plan fits, it is the plan with the
        fewest bytes.
        """
        if self.best == inf:
            return heappop(self.misses)[2] if self.misses else None
        limit = self.best * (1 + (max(EXPANDED, slack) if self.family is None else 0.0))
        return heappop(self.fitting)[2] if self.fitting and self.fitting[0][0] <= limit else None

    @property
    def gives_up(self) -> bool:
        """Whether no plan fits and enough lines were tried."""
        return self.best == inf and self.missed >= (MISSES if self.family is None else FAMILY_MISSES)


class Search:
    """Search for the fastest plan of a problem, and then for that of each family.

    Args:
        problem: the problem.
        workers: processes that guess and simulate plans.
        budget: limits of the search.
        on_progress: callback for progress reports.
        change: resource of the problem that is doubled for the search ("": none).
        best: seconds of a known plan. Only faster plans are searched.
        slack: share by which a plan may be expected to be slower than the fastest one and still be simulated.
        families: whether to search for the fastest plan of each family too.
        ran_out: plans that ran out of memory when they were run.
    """

    def __init__(
        self,
        problem: Problem,
        workers: Workers,
        *,
        budget: Budget = UNLIMITED,
        on_progress: OnProgress | None = None,
        change: Change = "",
        best: float = inf,
        slack: float = 0.0,
        families: bool = False,
        ran_out: frozenset[Candidate] = frozenset(),
    ) -> None:
        self.problem = apply_change(problem, change)
        self.results = Results()
        self._workers, self._budget, self._on_progress = workers, budget, on_progress
        self._change: Change = change
        self._slack, self._families, self._ran_out = slack, families, ran_out
        self._main = Goal(None, best)
        self._began = time.monotonic()
        self._factors, self._further_bytes, self._tie = Corrections(1.0), Corrections(0.0), count()
        self._known_lines: set[Candidate] = set()
        self._unguessed: deque[Candidate] = deque()
        self._guesses: dict[Candidate, Guess] = {}
        self._queue: list[tuple[tuple[bool, float], int, Candidate]] = []  # guessed lines, the most promising first
        self._deferred: list[tuple[tuple[bool, float], int, Candidate]] = []  # lines that do not promise better plans
        self._unsorted = 0  # forecasts since the lines were sorted
        self._in_flight: deque[tuple[Future[Any], list[Candidate], bool]] = deque()

    def run(self) -> Results:
        """Search until no line promises a better plan, the budget is used up, or Ctrl-C is pressed.

        Raises:
            KeyboardInterrupt: if Ctrl-C is pressed before a plan that fits is known.
        """
        try:
            with gc_paused():  # lines and guesses are kept, so collections would only take time
                self._add(seeds(self.problem))
            main = self._budget.part(MAIN_SHARE if self._families else 1.0)
            self.results.complete = self._reach(self._main, main)
            if self._families:
                self._search_families()
        except KeyboardInterrupt:
            if self._main.best == inf:
                raise
        self.results.seconds = time.monotonic() - self._began
        return self.results

    def _search_families(self) -> None:
        """Search for the fastest plan of each family, the most promising family first."""
        if (best := self.results.best) is not None and self.results.complete:
            self.results.searched.add(best.family)
        families: dict[str, float] = {outcome.family: outcome.seconds for outcome in reversed(self.results.fitting)}
        for line, guessed in self._guesses.items():
            families.setdefault(family(line.plan), guessed.full_seconds)
        for name in sorted(families, key=families.__getitem__):
            if name in self.results.searched:
                continue
            goal = Goal(name)
            for outcome in self.results.fitting:
                if outcome.family == name:
                    goal.note(outcome, next(self._tie))
            if not self._reach(goal, self._budget):
                return
            self.results.searched.add(name)

    def _reach(self, goal: Goal, budget: Budget) -> bool:
        """Search until no line promises a better plan for a goal, or the goal gives up.

        Returns False if the budget is used up first. The budget applies only once a plan that fits is known.
        """
        turn, deadline = 0, self._began + budget.seconds
        self._sort()
        while True:
            while len(self._in_flight) < IN_FLIGHT and not goal.gives_up and self._ask(goal, turn):
                turn += 1
            if not self._in_flight:
                return True
            future, lines, guessed = self._in_flight[0]
            limited = self._main.best < inf and deadline < inf
            try:
                answer = future.result(max(0.0, deadline - time.monotonic()) if limited else None)
            except TimeoutError:
                return False
            self._in_flight.popleft()
            if guessed:
                self._note_guesses(lines, answer)
            else:
                self._note_explored(goal, lines[0], answer)
            if self._on_progress is not None:
                self._on_progress(self.results, len(self._queue))
            exhausted = len(self.results.outcomes) >= budget.forecasts or time.monotonic() >= deadline
            if exhausted and self._main.best < inf:
                return False

    def _add(self, lines: Iterable[Candidate]) -> None:
        """Queue new lines to be guessed."""
        new_lines = [line for line in lines if line not in self._known_lines]
        self._known_lines.update(new_lines)
        self._unguessed.extend(new_lines)
        self.results.lines += len(new_lines)

    def _ask(self, goal: Goal, turn: int) -> bool:
        """Ask a worker to guess some lines, or to explore one. Return False if there is nothing to ask."""
        while True:
            if goal.fitting and goal.fitting[0][0] <= goal.best < inf:  # the best plan is new
                self._expand(goal, heappop(goal.fitting)[2])
            line = self._most_promising(goal)
            if self._unguessed and (line is None or turn % 2 or not self._guesses):
                if line is not None:
                    heappush(self._queue, self._entry(line))
                lines = [self._unguessed.popleft() for _ in range(min(GUESSED_AT_A_TIME, len(self._unguessed)))]
                self._submit(partial(guess_lines, lines), lines, guessed=True)
                return True
            if line is not None:
                _, share = self._expected(line)
                self._submit(partial(explore, line, self._guesses[line], share), [line], guessed=False)
                return True
            if (plan := goal.expand(self._slack)) is None:
                return False
            self._expand(goal, plan)

    def _submit(self, question: Callable[[PassCosts], Any], lines: list[Candidate], *, guessed: bool) -> None:
        self._in_flight.append((self._workers.submit(question, self._change), lines, guessed))

    def _most_promising(self, goal: Goal) -> Candidate | None:
        """Pop the first line that promises a better plan for a goal. Lines before it are set aside."""
        if self._unsorted >= RECENT:
            self._sort()
        limit = goal.best * (1 + (max(PROMISING, self._slack) if goal.family is None else FAMILY_PROMISING))
        while self._queue:
            (misses, _), _, line = entry = heappop(self._queue)
            promises = goal.best == inf or not (misses or self._expected(line)[0] > limit)
            if promises and goal.accepts(family(line.plan)):
                return line
            self._deferred.append(entry)
        return None

    def _sort(self) -> None:
        """Sort all unexplored lines again with the current corrections."""
        self._unsorted = 0
        self._queue = [self._entry(line) for _, _, line in (*self._queue, *self._deferred)]
        self._deferred.clear()
        heapify(self._queue)

    def _entry(self, line: Candidate) -> tuple[tuple[bool, float], int, Candidate]:
        """Return a line with its sort key: first lines that fit, by expected seconds, then the others, by bytes."""
        guess = self._guesses[line]
        smallest_bytes = guess.full_bytes + self._further_bytes.expect(_memory_kinds(line, 1.0))
        if smallest_bytes > TOLERANCE * self.problem.usable_bytes:
            return (True, smallest_bytes), next(self._tie), line
        return (False, self._expected(line)[0] * (1 + guess.passes / SLOW_PASSES)), next(self._tie), line

    def _expected(self, line: Candidate) -> tuple[float, str]:
        """Return the expected seconds of a line, and the smallest share of recomputed blocks that should fit."""
        guess, memory_limit = self._guesses[line], TOLERANCE * self.problem.usable_bytes
        none = guess.bytes + self._further_bytes.expect(_memory_kinds(line, 0.0))
        full = guess.full_bytes + self._further_bytes.expect(_memory_kinds(line, 1.0))
        needed = (
            0.0 if none <= memory_limit else 1.0 if full >= none else min(1.0, (none - memory_limit) / (none - full))
        )
        shares = shares_of(self.problem, line)
        share = next((name for name in shares if SHARES[name] >= needed), shares[-1])
        seconds = share_between(guess.seconds, guess.full_seconds, share)
        return seconds * self._factors.expect(_time_kinds(line)), share

    def _expand(self, goal: Goal, plan: Candidate) -> None:
        """Queue the neighbours of a plan to be guessed."""
        with gc_paused():
            lines = neighbours(self.problem, plan)
        self._add(line for line in lines if goal.accepts(family(line.plan)))

    def _note_guesses(self, lines: Sequence[Candidate], guesses: Sequence[Guess | None]) -> None:
        for line, guess in zip(lines, guesses, strict=True):
            if guess is not None:
                self._guesses[line] = guess
                heappush(self._queue, self._entry(line))

    def _note_explored(self, goal: Goal, line: Candidate, explored: Mapping[str, PlanOutcome]) -> None:
        if not explored:
            self.results.refused.append(line)
        goal.missed += not any(plan.fits for plan in explored.values())
        for share, predicted in explored.items():
            self._unsorted += 1
            guess, forecast = self._guesses[line], predicted.forecast
            seconds = share_between(guess.seconds, guess.full_seconds, share)
            bytes = share_between(guess.bytes, guess.full_bytes, share)
            self._factors.learn(_time_kinds(line), forecast.seconds / seconds)
            self._further_bytes.learn(_memory_kinds(line, SHARES[share]), forecast.memory.unlimited - bytes)
            outcome = replace(predicted, ran_out=predicted.candidate in self._ran_out)
            self.results.outcomes.append(outcome)
            if outcome.fits and outcome.seconds < self._main.best:
                elapsed = time.monotonic() - self._began
                self.results.improvements.append(Improvement(elapsed, len(self.results.outcomes), outcome.seconds))
            for one_goal in (self._main, *([] if goal is self._main else [goal])):
                if one_goal.accepts(outcome.family):
                    one_goal.note(outcome, next(self._tie))

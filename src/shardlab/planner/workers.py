"""Processes that forecast candidates, one for each core."""

from __future__ import annotations

import gc
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import active_children, get_context
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from shardlab.common.errors import Refused, UserError
from shardlab.common.user_code import Endless
from shardlab.language.world import gc_paused
from shardlab.planner.bounds import Floors
from shardlab.planner.bounds.step import LaidPipelines, shared_as
from shardlab.planner.describe import StepShares, shares_of, trace_seconds
from shardlab.planner.problem import Candidate, PlanShape, Problem
from shardlab.planner.results import Waiting
from shardlab.planner.space import legal, pipelined
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.hardware.cluster import cores
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.strategies.plan.plan import Plan

# What works out a search's shapes and pipelines: by itself, or many at a time in another process.


Change = Literal["", "memory", "links", "batch"]
"""A doubling that the planner tries on a problem: of each device's memory, of the bandwidth between nodes, or of the
global batch ("": none)."""


@dataclass(frozen=True)
class AskedDeal:
    """A question to a worker: which candidates of shapes and pipelines may be faster than what is known.

    Attributes:
        waiting: the shapes and pipelines.
        least: seconds above which a floor discards a candidate.
        change: in a problem that is changed.
    """

    waiting: Sequence[Waiting]
    least: float
    change: Change = ""


@dataclass
class Deals:
    """Candidates that may be faster than what is known.

    Attributes:
        candidates: these.
        seen: how many there were of which more than their pipeline's floors was asked.
    """

    candidates: list[Waiting] = field(default_factory=list[Waiting])
    seen: int = 0


class Dealer:
    """Works out the shapes and pipelines of a problem, with their floors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.floors = Floors(problem)
        self._pipelined: dict[PlanShape, LaidPipelines | None] = {}

    @gc_paused()  # floors stay, and walking them again and again would cost a fifth
    def pipelines(self, waiting: Waiting, least: float) -> Iterator[Waiting]:
        """Every pipeline of a shape whose floor is no more than so many seconds."""
        shape = waiting.shape
        alike = replace(shape, micro_batch_size=1, precision=self.problem.precisions[0])
        if alike not in self._pipelined:
            plans = list(pipelined(self.problem, shape))
            self._pipelined[alike] = self.floors.pipelines.laid(shape, plans) if plans else None
        if (laid := self._pipelined[alike]) is None:
            return iter(())
        all = self.floors.pipelines.seconds(shape, laid)
        sharing, floors = waiting.guess - waiting.passes, self.floors.least(shape, all)

        def pipeline(place: int) -> Waiting:
            seconds, passes = max(waiting.seconds, float(floors[place])), float(all[place])
            return waiting._replace(seconds=seconds, guess=passes + sharing, plan=laid.plans[place], passes=passes)

        return map(pipeline, np.flatnonzero(floors <= least).tolist())

    @gc_paused()
    def deal(self, waiting: Waiting, *, least: float, whole: bool) -> tuple[Dealt, list[Waiting]]:
        """Deal a pipeline's candidates, as `deal` does; and let them wait."""
        shape, plan = waiting.shape, waiting.plan
        assert isinstance(plan, Plan), "a pipeline has candidates"
        dealt = deal(self.floors, shape, plan, waiting.passes, least=least, whole=whole)
        return dealt, [Waiting(0.0, 0, *each[1:], shape, each.candidate, timed=whole) for each in dealt.candidates]

    def all(self, asked: AskedDeal) -> Deals:
        """Deal the candidates of many shapes and pipelines."""
        deals = Deals()
        for each in asked.waiting:
            for waiting in [each] if each.plan else self.pipelines(each, asked.least):
                if waiting.seconds <= asked.least:
                    dealt, candidates = self.deal(waiting, least=asked.least, whole=True)
                    deals.seen += dealt.seen
                    deals.candidates += candidates
        return deals


T = TypeVar("T")


@dataclass(frozen=True)
class Asked:
    """A question to a worker.

    Attributes:
        candidate: of which.
        known: its forecast, if that is known.
        shares: whether also for what its time goes to.
        change: in a problem that is changed.
    """

    candidate: Candidate
    known: Forecast | None = None
    shares: bool = False
    change: Change = ""


@dataclass(frozen=True)
class Answer:
    """A candidate's forecast, and what its step's time goes to, if that was asked and can be traced."""

    forecast: Forecast
    shares: StepShares | None


Ask = Callable[[Asked], "Future[Answer | None]"]
"""An answer that comes: None if the code that runs plans does not accept the candidate."""

AskDeal = Callable[[AskedDeal], "Future[Deals]"]
"""Candidates that come."""


def _deals_nothing(_: AskedDeal) -> Future[Deals]:
    raise AssertionError("nobody deals beside this process")


@dataclass(frozen=True)
class Workers:
    """What answers questions.

    Attributes:
        forecast: forecasts candidates.
        deal: deals candidates beside this process.
        beside: how many questions of these it may be asked at a time.
        dealers: what deals candidates in this process; whoever answers in another one begins with what these have
            worked out until the first question.
    """

    forecast: Ask
    deal: AskDeal = _deals_nothing
    beside: int = 0
    dealers: dict[Change, Dealer] = field(default_factory=dict[Change, Dealer])

    def __call__(self, asked: Asked) -> Future[Answer | None]:
        """Ask for a forecast."""
        return self.forecast(asked)

    def dealer(self, problem: Problem, change: Change) -> Dealer:
        """Find what deals a problem's candidates in this process.

        Args:
            change: what the problem has more of than the one that all questions are about.
        """
        known = self.dealers.get(change)
        if known is None or known.problem != problem:
            known = self.dealers[change] = Dealer(problem)
        return known


def answer(problem: Problem, asked: Asked) -> Answer | None:
    """Forecast a candidate."""
    try:
        workload = changed(problem, asked.change).workload(asked.candidate)
        if broken_limit(workload):
            return None
        made = asked.known or forecast(workload)
        return Answer(made, traced(lambda: shares_of(workload)) if asked.shares else None)
    except (UserError, Refused):
        return None


def traced(told: Callable[[], T]) -> T | None:
    """What a trace tells of a step that has a forecast (None: the step has more ops than are traced)."""
    try:
        return told()
    except (UserError, Endless):
        return None


def changed(problem: Problem, change: Change) -> Problem:
    """A problem with twice as much of something."""
    cluster = problem.cluster
    if change == "memory":
        return replace(problem, cluster=with_memory(cluster, 2 * cluster.device.memory))
    if change == "links":
        faster = replace(cluster.inter_node, bandwidth=2 * cluster.inter_node.bandwidth)
        return replace(problem, cluster=replace(cluster, inter_node=faster))
    return replace(problem, sequences=2 * problem.sequences) if change == "batch" else problem


def with_memory(cluster: Cluster, bytes: float) -> Cluster:
    """A cluster whose devices have so much memory."""
    return replace(cluster, device=replace(cluster.device, memory=bytes))


@contextmanager
def workers(problem: Problem, count: int | None = None) -> Generator[Workers]:
    """What forecasts candidates while this context lasts: processes forked from this one; of one, this one itself.

    They are forked at the first question, so that they begin with all floors that are known by then. Until then this
    process must start no thread.

    Args:
        count: how many (None: one for each core that this process may use).
    """
    count = cores() if count is None else count
    if count < 2:

        def here(asked: Asked) -> Future[Answer | None]:
            future: Future[Answer | None] = Future()
            future.set_result(answer(problem, asked))
            return future

        yield Workers(here)
        return
    others, dealers = active_children(), dict[Change, Dealer]()
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (problem, dealers))
    try:
        yield Workers(partial(pool.submit, _answer_here), partial(pool.submit, _deal_here), count - 1, dealers)
    finally:  # nobody waits for what they are still at, which may take long; all are killed, so that no lock is missed
        forked = [each for each in active_children() if each not in others]
        pool.shutdown(wait=False, cancel_futures=True)
        for each in forked:
            each.kill()
        for each in forked:
            each.join()


_problems: list[Problem] = []
"""The problem of a worker's process."""

_dealers: dict[Change, Dealer] = {}
"""What a worker's process has worked out of it."""


def _begin(problem: Problem, dealers: dict[Change, Dealer]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what is shared with the parent stays, and walking it would copy it
    _problems[:] = [problem]
    _dealers.update(dealers)


def _answer_here(asked: Asked) -> Answer | None:
    return answer(_problems[0], asked)


def _deal_here(asked: AskedDeal) -> Deals:
    if asked.change not in _dealers:
        _dealers[asked.change] = Dealer(changed(_problems[0], asked.change))
    return _dealers[asked.change].all(asked)


# Every candidate with a pipeline, with its floors; the cheapest floors first, so that they discard most.


class DealtCandidate(NamedTuple):
    """A candidate that may fit, and may be fast enough.

    Attributes:
        candidate: which.
        seconds, bytes: its floors.
        guess: seconds, if nothing ran beside passes.
    """

    candidate: Candidate
    seconds: float
    bytes: float
    guess: float


@dataclass
class Dealt:
    """What a pipeline's candidates are.

    Attributes:
        candidates: those that are left.
        seen: how many there were of which more than their pipeline's floors was asked.
    """

    candidates: list[DealtCandidate] = field(default_factory=list[DealtCandidate])
    seen: int = 0


def deal(floors: Floors, shape: PlanShape, plan: Plan, passes: float, *, least: float, whole: bool) -> Dealt:
    """Deal a pipeline's candidates that may fit.

    Args:
        floors: of the problem.
        shape, plan: the pipeline.
        passes: seconds of its passes alone, at least.
        least: seconds above which a floor discards a candidate.
        whole: whether floors of the whole step are wanted; else its order of work is left out.
    """
    dealt, problem = Dealt(), floors.problem
    if not floors.follows(shape, plan):
        return dealt
    ways = floors.ways(shape)
    fits, seconds = floors.bytes_of_ways(shape, plan) <= problem.room, ways.seconds(passes)
    if not (wanted := np.flatnonzero(fits & (seconds <= least))).size:
        return dealt
    seconds[wanted] = np.maximum(seconds[wanted], floors.seconds_of_ways(shape, plan, wanted))
    if not (fits & (seconds <= least)).any() or floors.memory.of_pipeline(shape, plan, problem.room) > problem.room:
        return dealt
    if whole:
        passes = max(passes, floors.steps.of_pipeline(shape, plan))
        seconds = np.maximum(seconds, ways.seconds(passes))
    made: list[tuple[Candidate, float, float]] = []
    for place in np.flatnonzero(fits & (seconds <= least)).tolist():
        try:
            candidate = legal(problem, shape, shared_as(plan, ways.plans[place]))
        except UserError:
            continue
        if candidate is not None:
            made.append((candidate, float(seconds[place]), passes + float(ways.sharing[place])))
    dealt.seen = len(made)
    if made and whole:
        floors.timed.follow(shape, [candidate for candidate, *_ in made])
    for candidate, floor, guess in made:
        if whole:
            floor = guess = max(floor, floors.seconds(shape, candidate))
        if floor <= least and (kept := floors.memory.of(shape, candidate)) <= problem.room:
            dealt.candidates.append(DealtCandidate(candidate, floor, kept, guess))
    return dealt


# Questions that are asked as long as there is time, and how many were left out.


class InTime:
    """Asks, and waits for answers, until a time.

    Args:
        problem: that is planned.
        ask: what answers.
        until: seconds of `time.monotonic`; later nothing is asked, and no answer waited for.

    Attributes:
        missed: how many answers were left out, by what they were about.
    """

    def __init__(self, problem: Problem, ask: Ask, until: float = math.inf) -> None:
        self.problem = problem
        self._ask, self._until = ask, until
        self.missed = Counter[str]()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self._until - time.monotonic())

    def ask(self, asked: Asked) -> Future[Answer | None] | None:
        """Ask, if there is time (None: there is too little)."""
        takes = trace_seconds(self.problem.workload(asked.candidate)) if asked.shares else 0.0
        return self._ask(asked) if self.left > takes else None

    def answer(self, coming: Future[Answer | None] | None, about: str) -> Answer | None:
        """Wait for an answer (None: the code that runs plans does not accept the candidate, or time was up).

        Args:
            about: what is missed if there is no answer in time.
        """
        if coming is not None:
            try:
                return coming.result(None if self.left == math.inf else self.left)
            except TimeoutError:
                coming.cancel()
        self.missed[about] += 1
        return None

    def __str__(self) -> str:
        """What was left out, and how often: `what limits a family (4), an alternative (2)`."""
        return ", ".join(f"{about} ({count})" for about, count in self.missed.items())

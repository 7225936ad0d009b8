"""Processes that simulate and expand plans, one for each core.

`workers` starts them. `Question` and `Answer` are their messages, `Expander` expands shapes and pipelines into plans,
and `TimedRequests` asks questions until a deadline.
"""

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
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.bounds.step import LaidPipelines, with_sharding_option
from shardlab.planner.describe import StepShares, step_shares, trace_seconds
from shardlab.planner.problem import Candidate, PlanShape, Problem
from shardlab.planner.results import QueueEntry
from shardlab.planner.space import legal, pipelined
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.hardware.cluster import cores
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.memory_advice import broken_limit
from shardlab.strategies.plan.plan import Plan

Change = Literal["", "memory", "links", "batch"]
"""A doubling that the planner tries on a problem: of each device's memory, of the bandwidth between nodes, or of the
global batch ("": none)."""


@dataclass(frozen=True)
class ExpansionRequest:
    """A question to a worker: which candidates of shapes and pipelines may be faster than what is known.

    Attributes:
        waiting: the shapes and pipelines.
        least: seconds above which a lower bound discards a candidate.
        change: in a problem that is changed.
    """

    waiting: Sequence[QueueEntry]
    least: float
    change: Change = ""


@dataclass
class Expansion:
    """Candidates that may be faster than what is known.

    Attributes:
        candidates: these.
        seen: how many there were of which more than their pipeline's lower bounds was asked.
    """

    candidates: list[QueueEntry] = field(default_factory=list[QueueEntry])
    seen: int = 0


class Expander:
    """Works out the shapes and pipelines of a problem, with their lower bounds."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bounds = LowerBounds(problem)
        self._pipelined: dict[PlanShape, LaidPipelines | None] = {}

    @gc_paused()  # lower bounds stay, and walking them again and again would cost a fifth
    def pipelines(self, waiting: QueueEntry, least: float) -> Iterator[QueueEntry]:
        """Every pipeline of a shape whose lower bound is no more than so many seconds."""
        shape = waiting.shape
        alike = replace(shape, micro_batch_size=1, precision=self.problem.precisions[0])
        if alike not in self._pipelined:
            plans = list(pipelined(self.problem, shape))
            self._pipelined[alike] = self.bounds.pipelines.laid(shape, plans) if plans else None
        if (laid := self._pipelined[alike]) is None:
            return iter(())
        all = self.bounds.pipelines.seconds(shape, laid)
        sharing, bounds = waiting.guess - waiting.passes, self.bounds.least(shape, all)

        def pipeline(place: int) -> QueueEntry:
            seconds, passes = max(waiting.seconds, float(bounds[place])), float(all[place])
            return waiting._replace(seconds=seconds, guess=passes + sharing, plan=laid.plans[place], passes=passes)

        return map(pipeline, np.flatnonzero(bounds <= least).tolist())

    @gc_paused()
    def expand(self, waiting: QueueEntry, *, least: float, whole: bool) -> tuple[Expanded, list[QueueEntry]]:
        """Return the candidates of a pipeline as entries of the queue."""
        shape, plan = waiting.shape, waiting.plan
        assert isinstance(plan, Plan), "a pipeline has candidates"
        expanded = expand(self.bounds, shape, plan, waiting.passes, least=least, whole=whole)
        all = expanded.candidates
        return expanded, [QueueEntry(0.0, 0, *each[1:], shape, each.candidate, timed=whole) for each in all]

    def all(self, asked: ExpansionRequest) -> Expansion:
        """Deal the candidates of many shapes and pipelines."""
        expansion = Expansion()
        for each in asked.waiting:
            for waiting in [each] if each.plan else self.pipelines(each, asked.least):
                if waiting.seconds <= asked.least:
                    expanded, candidates = self.expand(waiting, least=asked.least, whole=True)
                    expansion.seen += expanded.seen
                    expansion.candidates += candidates
        return expansion


T = TypeVar("T")


@dataclass(frozen=True)
class Query:
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


Ask = Callable[[Query], "Future[Answer | None]"]
"""An answer that comes: None if the code that runs plans does not accept the candidate."""

RequestExpansion = Callable[[ExpansionRequest], "Future[Expansion]"]
"""Candidates that come."""


def _expands_nothing(_: ExpansionRequest) -> Future[Expansion]:
    raise AssertionError("no other process expands")


@dataclass(frozen=True)
class Workers:
    """Processes, or this process, that answer queries.

    Attributes:
        forecast: forecasts candidates.
        expand: expands shapes and pipelines beside this process.
        beside: how many questions of these it may be asked at a time.
        expanders: expanders of this process. Worker processes start with what these have
            worked out until the first question.
    """

    forecast: Ask
    expand: RequestExpansion = _expands_nothing
    beside: int = 0
    expanders: dict[Change, Expander] = field(default_factory=dict[Change, Expander])

    def __call__(self, asked: Query) -> Future[Answer | None]:
        """Ask for a forecast."""
        return self.forecast(asked)

    def expander(self, problem: Problem, change: Change) -> Expander:
        """Return the expander of a problem in this process.

        Args:
            change: what the problem has more of than the one that all questions are about.
        """
        known = self.expanders.get(change)
        if known is None or known.problem != problem:
            known = self.expanders[change] = Expander(problem)
        return known


def answer_request(problem: Problem, asked: Query) -> Answer | None:
    """Forecast a candidate."""
    try:
        workload = apply_change(problem, asked.change).workload(asked.candidate)
        if broken_limit(workload):
            return None
        made = asked.known or forecast(workload)
        return Answer(made, trace_or_none(lambda: step_shares(workload)) if asked.shares else None)
    except (UserError, Refused):
        return None


def trace_or_none(compute: Callable[[], T]) -> T | None:
    """What a trace tells of a step that has a forecast (None: the step has more ops than are traced)."""
    try:
        return compute()
    except (UserError, Endless):
        return None


def apply_change(problem: Problem, change: Change) -> Problem:
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

    They are forked at the first question, so that they begin with all lower bounds that are known by then. Until then
    this process must start no thread.

    Args:
        count: how many (None: one for each core that this process may use).
    """
    count = cores() if count is None else count
    if count < 2:

        def here(asked: Query) -> Future[Answer | None]:
            future: Future[Answer | None] = Future()
            future.set_result(answer_request(problem, asked))
            return future

        yield Workers(here)
        return
    others, expanders = active_children(), dict[Change, Expander]()
    pool = ProcessPoolExecutor(count, get_context("fork"), _begin, (problem, expanders))
    try:
        yield Workers(partial(pool.submit, _answer_here), partial(pool.submit, _expand_here), count - 1, expanders)
    finally:  # nobody waits for what they are still at, which may take long; all are killed, so that no lock is missed
        forked = [each for each in active_children() if each not in others]
        pool.shutdown(wait=False, cancel_futures=True)
        for each in forked:
            each.kill()
        for each in forked:
            each.join()


_problems: list[Problem] = []
"""The problem of a worker's process."""

_expanders: dict[Change, Expander] = {}
"""What a worker's process has worked out of it."""


def _begin(problem: Problem, expanders: dict[Change, Expander]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # what is shared with the parent stays, and walking it would copy it
    _problems[:] = [problem]
    _expanders.update(expanders)


def _answer_here(asked: Query) -> Answer | None:
    return answer_request(_problems[0], asked)


def _expand_here(asked: ExpansionRequest) -> Expansion:
    if asked.change not in _expanders:
        _expanders[asked.change] = Expander(apply_change(_problems[0], asked.change))
    return _expanders[asked.change].all(asked)


class ExpandedCandidate(NamedTuple):
    """A candidate that may fit, and may be fast enough.

    Attributes:
        candidate: which.
        seconds, bytes: its lower bounds.
        guess: seconds, if nothing ran beside passes.
    """

    candidate: Candidate
    seconds: float
    bytes: float
    guess: float


@dataclass
class Expanded:
    """What a pipeline's candidates are.

    Attributes:
        candidates: those that are left.
        seen: how many there were of which more than their pipeline's lower bounds was asked.
    """

    candidates: list[ExpandedCandidate] = field(default_factory=list[ExpandedCandidate])
    seen: int = 0


def expand(bounds: LowerBounds, shape: PlanShape, plan: Plan, passes: float, *, least: float, whole: bool) -> Expanded:
    """Deal a pipeline's candidates that may fit.

    Args:
        lower bounds: of the problem.
        shape, plan: the pipeline.
        passes: seconds of its passes alone, at least.
        least: seconds above which a lower bound discards a candidate.
        whole: whether lower bounds of the whole step are wanted; else its order of work is left out.
    """
    expanded, problem = Expanded(), bounds.problem
    if not bounds.follows(shape, plan):
        return expanded
    options = bounds.options(shape)
    fits, seconds = bounds.bytes_of_options(shape, plan) <= problem.room, options.seconds(passes)
    if not (wanted := np.flatnonzero(fits & (seconds <= least))).size:
        return expanded
    seconds[wanted] = np.maximum(seconds[wanted], bounds.seconds_of_options(shape, plan, wanted))
    if not (fits & (seconds <= least)).any() or bounds.memory.of_pipeline(shape, plan, problem.room) > problem.room:
        return expanded
    if whole:
        passes = max(passes, bounds.steps.of_pipeline(shape, plan))
        seconds = np.maximum(seconds, options.seconds(passes))
    made: list[tuple[Candidate, float, float]] = []
    for place in np.flatnonzero(fits & (seconds <= least)).tolist():
        try:
            candidate = legal(problem, shape, with_sharding_option(plan, options.plans[place]))
        except UserError:
            continue
        if candidate is not None:
            made.append((candidate, float(seconds[place]), passes + float(options.sharing[place])))
    expanded.seen = len(made)
    if made and whole:
        bounds.timed.follow(shape, [candidate for candidate, *_ in made])
    for candidate, bound, guess in made:
        if whole:
            bound = guess = max(bound, bounds.seconds(shape, candidate))
        if bound <= least and (kept := bounds.memory.of(shape, candidate)) <= problem.room:
            expanded.candidates.append(ExpandedCandidate(candidate, bound, kept, guess))
    return expanded


class TimedQueries:
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

    def ask(self, asked: Query) -> Future[Answer | None] | None:
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

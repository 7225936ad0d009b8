"""Processes that answer the planner's questions, one for each core.

`workers` starts them, and `Workers.submit` sends a question to one of them. A question is a function of `PassCosts`,
whose caches are kept in the process. `forecast_query` is the usual question, about one plan. `TimedQueries` asks
questions until a deadline.
"""

from __future__ import annotations

import gc
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import active_children, get_context
from typing import Literal, TypeVar

from shardlab.common.errors import Refused, UserError
from shardlab.common.processes import end_with_starter
from shardlab.common.user_code import Endless
from shardlab.planner.describe import StepShares, shares_seconds, step_shares
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.problem import Candidate, Problem
from shardlab.simulate.hardware.cluster import cores
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.limits import broken_limit

T = TypeVar("T")

Change = Literal["", "memory", "links", "batch"]
"""Resource of a problem that is doubled: each device's memory, the bandwidth between nodes, or the global batch ("":
none)."""

Question = Callable[[PassCosts], T]
"""Question about a problem. `PassCosts` has the problem and caches for it."""


@dataclass(frozen=True)
class Query:
    """Question about a candidate.

    Attributes:
        candidate: the candidate.
        forecast: forecast of the candidate, if known.
        shares: whether to compute the parts of its step time as well.
    """

    candidate: Candidate
    forecast: Forecast | None = None
    shares: bool = False


@dataclass(frozen=True)
class Answer:
    """Forecast of a candidate, and the parts of its step time if requested and if the step can be traced."""

    forecast: Forecast
    shares: StepShares | None


def answer_request(problem: Problem, query: Query) -> Answer | None:
    """Answer a query (None: the code that runs plans does not accept the candidate)."""
    try:
        workload = problem.workload(query.candidate)
        if broken_limit(workload):
            return None
        predicted = query.forecast or forecast(workload)
        return Answer(predicted, trace_or_none(lambda: step_shares(workload)) if query.shares else None)
    except (UserError, Refused):
        return None


def forecast_query(query: Query, costs: PassCosts) -> Answer | None:
    """Answer a query in a worker."""
    return answer_request(costs.problem, query)


def trace_or_none(compute: Callable[[], T]) -> T | None:
    """Return the result of a function that traces a step (None: the step has more ops than are traced)."""
    try:
        return compute()
    except (UserError, Endless):
        return None


def apply_change(problem: Problem, change: Change) -> Problem:
    """Return the problem with a doubled resource."""
    cluster = problem.cluster
    if change == "memory":
        larger = replace(cluster.device, memory=2 * cluster.device.memory)
        return replace(problem, cluster=replace(cluster, device=larger))
    if change == "links":
        faster = replace(cluster.inter_node, bandwidth=2 * cluster.inter_node.bandwidth)
        return replace(problem, cluster=replace(cluster, inter_node=faster))
    return replace(problem, sequences=2 * problem.sequences) if change == "batch" else problem


class Workers:
    """Processes that answer questions about a problem.

    Args:
        problem: the problem.
        pool: processes that were started with `_begin` (None: this process answers each question at once).
    """

    def __init__(self, problem: Problem, pool: ProcessPoolExecutor | None = None) -> None:
        self._problem, self._pool = problem, pool
        self._costs: dict[Change, PassCosts] = {}

    def submit(self, question: Question[T], change: Change = "") -> Future[T]:
        """Let a process answer a question about the problem, or about the problem with a change."""
        if self._pool is not None:
            with interrupts_blocked():
                return self._pool.submit(_answer_in_worker, question, change)
        if change not in self._costs:
            self._costs[change] = PassCosts(apply_change(self._problem, change))
        future: Future[T] = Future()
        future.set_result(question(self._costs[change]))
        return future


@contextmanager
def workers(problem: Problem, count: int | None = None) -> Generator[Workers]:
    """Yield workers for a problem: processes forked from this one, or this one itself if one is enough.

    They are forked at the first question. Until then, this process must not start a thread.

    Args:
        problem: the problem.
        count: number of processes (None: one for each core that this process may use).
    """
    count = cores() if count is None else count
    if count < 2:
        yield Workers(problem)
        return
    with killed_at_end(ProcessPoolExecutor(count, get_context("fork"), _begin, (problem,))) as pool:
        yield Workers(problem, pool)


@contextmanager
def killed_at_end(pool: ProcessPoolExecutor) -> Generator[ProcessPoolExecutor]:
    """Yield a pool of processes. At the end, unfinished answers are dropped and all its processes are killed."""
    others = active_children()
    try:
        yield pool
    finally:
        started = [process for process in active_children() if process not in others]
        pool.shutdown(wait=False, cancel_futures=True)
        for process in started:  # so that none keeps a lock
            process.kill()
        for process in started:
            process.join()


@contextmanager
def interrupts_blocked() -> Generator[None]:
    """Block SIGINT in processes that the block starts, from their first moment: their parent ends them on Ctrl-C.

    This process receives a SIGINT when the block ends.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


_in_worker: list[Workers] = []
"""The `Workers` of a worker process, which answer in the process itself. The list is empty in other processes."""


def _begin(problem: Problem) -> None:
    end_with_starter()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # a garbage collection would copy the memory that is shared with the parent
    _in_worker[:] = [Workers(problem)]


def _answer_in_worker(question: Question[T], change: Change) -> T:
    return _in_worker[0].submit(question, change).result()


class TimedQueries:
    """Sender of queries to workers, which waits for answers until a deadline.

    Args:
        problem: the problem.
        workers: processes that answer.
        deadline: time in seconds of `time.monotonic`. After it, no query is sent and no answer is awaited.

    Attributes:
        problem, workers: as given.
        missed: number of answers that did not arrive in time, by subject.
    """

    def __init__(self, problem: Problem, workers: Workers, deadline: float = math.inf) -> None:
        self.problem = problem
        self.workers, self._deadline = workers, deadline
        self.missed = Counter[str]()

    @property
    def remaining_seconds(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._deadline - time.monotonic())

    def ask(self, query: Query, change: Change = "") -> Future[Answer | None] | None:
        """Send a query (None: there is too little time)."""
        cost = shares_seconds(self.problem.workload(query.candidate)) if query.shares else 0.0
        return self.workers.submit(partial(forecast_query, query), change) if self.remaining_seconds > cost else None

    def answer(self, future: Future[Answer | None] | None, subject: str) -> Answer | None:
        """Wait for an answer (None: the plan is not possible, or the time is up).

        Args:
            future: future of the answer.
            subject: subject for `missed` if the answer does not arrive in time.
        """
        if future is not None:
            try:
                return future.result(None if self.remaining_seconds == math.inf else self.remaining_seconds)
            except TimeoutError:
                future.cancel()
        self.missed[subject] += 1
        return None

    def __str__(self) -> str:
        """Return the missed subjects with their numbers: `what limits a family (4), an alternative (2)`."""
        return ", ".join(f"{subject} ({count})" for subject, count in self.missed.items())

"""Processes that forecast candidates, one for each core."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import active_children, get_context
from typing import TypeVar

from shardlab.errors import Refused, UserError
from shardlab.hardware import Cluster
from shardlab.hardware.cores import cores
from shardlab.planner.dealer import AskedDeal, Change, Dealer, Deals
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.shares import StepShares, shares_of
from shardlab.predict.forecast import Forecast, forecast
from shardlab.predict.limits import broken_limit
from shardlab.program.bounds import Endless

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

"""Workers answer as this process does, and nobody waits for them after a deadline."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from shardlab.language import Mesh
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.workers import (
    Change,
    Query,
    TimedQueries,
    Workers,
    answer_request,
    apply_change,
    forecast_query,
    workers,
)
from shardlab.strategies.plan.plan import Plan
from tests.planner.enumeration import candidates, shapes
from tests.planner.problems import problem
from tests.support.processes import PATIENCE, started
from tests.support.warm import ROOT, WarmStarts

LONG = 60.0
"""Seconds that a worker is busy in a test, far longer than the test takes."""

PROBLEM = problem()
ASKED = Query(next(candidates(PROBLEM, next(shapes(PROBLEM)))))


def sleep(_: PassCosts) -> None:
    time.sleep(LONG)


def sequences(costs: PassCosts) -> int:
    return costs.problem.sequences


@pytest.mark.parametrize("count", [1, 2])
def test_a_worker_answers_as_this_process_does(count: int) -> None:
    with workers(PROBLEM, count) as processes:
        answer = processes.submit(partial(forecast_query, ASKED)).result()
        doubled = processes.submit(sequences, "batch").result()
    assert answer == answer_request(PROBLEM, ASKED)
    assert doubled == 2 * PROBLEM.sequences


@pytest.mark.parametrize("change", ["", "memory", "links", "batch"])
def test_a_change_doubles_one_resource(change: Change) -> None:
    changed = apply_change(PROBLEM, change)
    factors = {
        "memory": changed.cluster.device.memory / PROBLEM.cluster.device.memory,
        "links": changed.cluster.inter_node.bandwidth / PROBLEM.cluster.inter_node.bandwidth,
        "batch": changed.sequences / PROBLEM.sequences,
    }
    assert factors == {**dict.fromkeys(factors, 1.0), **({change: 2.0} if change else {})}


def test_workers_that_are_busy_are_ended_with_their_context() -> None:
    others, began = multiprocessing.active_children(), time.monotonic()
    with workers(PROBLEM, 2) as processes:
        for _ in range(4):
            processes.submit(sleep)
        time.sleep(0.2)  # they have begun
    while _others(others) and time.monotonic() - began < LONG / 2:
        time.sleep(0.01)  # the pool's own thread hears of an end first, and has yet to note it
    assert time.monotonic() - began < LONG / 2
    assert not _others(others)


def blocked_signals(_: PassCosts) -> set[int]:
    return {int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])}


def test_ctrl_c_reaches_only_the_process_that_ends_the_workers() -> None:
    with workers(PROBLEM, 2) as processes:
        assert signal.SIGINT in processes.submit(blocked_signals).result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


KILLED = """
import os, signal
from shardlab.planner.workers import workers
from tests.planner.test_workers import PROBLEM, sequences

with workers(PROBLEM, 2) as processes:
    processes.submit(sequences).result()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_a_process_that_is_killed(warm: WarmStarts) -> None:
    with started(["-c", KILLED], warm.start, cwd=ROOT) as process:
        process.communicate(timeout=PATIENCE)  # the pipes end with the last process that holds them
    assert process.returncode == -signal.SIGKILL


def _others(processes: Sequence[BaseProcess]) -> set[BaseProcess]:
    return set(multiprocessing.active_children()).difference(processes)


class NeverAnswers(Workers):
    """Workers that never answer.

    Attributes:
        questions: number of questions.
    """

    def __init__(self) -> None:
        super().__init__(PROBLEM)
        self.questions = 0

    def submit(self, question: Callable[[PassCosts], Any], change: Change = "") -> Future[Any]:
        self.questions += 1
        return Future()


def test_an_answer_that_does_not_come_in_time_is_missed_and_its_question_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queries = TimedQueries(PROBLEM, NeverAnswers(), now + 0.05)
    future = queries.ask(ASKED)
    assert queries.answer(future, "an alternative") is None
    assert future is not None
    assert future.cancelled()
    assert str(queries) == "an alternative (1)"


def test_nothing_is_asked_after_the_deadline() -> None:
    silent = NeverAnswers()
    queries = TimedQueries(PROBLEM, silent, time.monotonic() - 1)
    assert queries.answer(queries.ask(ASKED), "why") is queries.answer(queries.ask(ASKED), "why") is None
    assert not silent.questions
    assert str(queries) == "why (2)"


def test_no_trace_is_begun_that_would_take_longer_than_there_is_time() -> None:
    queries = TimedQueries(problem(sequences=2**20), NeverAnswers(), time.monotonic() + 60)
    unsteady = replace(ASKED.candidate, plan=replace(ASKED.candidate.plan, schedule="gpipe"))
    assert queries.ask(replace(ASKED, shares=True)) is not None, "few microbatches tell it"
    assert queries.ask(replace(ASKED, candidate=unsteady)) is not None, "a forecast is no trace"
    assert queries.ask(replace(ASKED, candidate=unsteady, shares=True)) is not None, "passes are replayed as wholes"
    every_op = replace(unsteady, plan=replace(unsteady.plan, recompute="uniform-2"))
    assert queries.ask(replace(ASKED, candidate=every_op)) is not None
    assert queries.ask(replace(ASKED, candidate=every_op, shares=True)) is None


def test_a_refusal_is_no_missed_answer() -> None:
    impossible = replace(ASKED, candidate=replace(ASKED.candidate, plan=Plan(Mesh(dp_shard=8))))
    queries = TimedQueries(PROBLEM, Workers(PROBLEM), inf)
    assert queries.answer(queries.ask(impossible), "why") is None
    assert not str(queries)

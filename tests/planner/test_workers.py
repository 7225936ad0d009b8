"""Workers answer, and end with who asks them, whatever they are at."""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from math import inf
from multiprocessing.process import BaseProcess
from unittest.mock import patch

import pytest

from shardlab.planner import search
from shardlab.planner import workers as module
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.problem import Limits, PlanShape, Problem
from shardlab.planner.results import QueueEntry
from shardlab.planner.search import Search
from shardlab.planner.space import candidates, candidates_of_pipeline, follows, pipelined, shapes
from shardlab.planner.workers import (
    Answer,
    Expanded,
    Expander,
    Expansion,
    ExpansionRequest,
    Query,
    TimedQueries,
    Workers,
    answer_request,
    apply_change,
    expand,
    workers,
)
from shardlab.simulate.predict.recipe import OWN
from shardlab.strategies.plan.plan import Plan
from tests.planner.problems import GIB, passes_of, problem

LONG = 600.0
"""Seconds for which nobody waits."""


def _never(problem: Problem, asked: Query) -> None:
    time.sleep(LONG)


def test_workers_answer_as_this_process_does() -> None:
    asked = problem()
    candidate = next(candidates(asked, next(iter(shapes(asked)))))
    with workers(asked, 2) as ask:
        found = ask(Query(candidate)).result()
    expected = answer_request(asked, Query(candidate))
    assert found is not None
    assert expected is not None
    assert found.forecast.seconds == expected.forecast.seconds


def test_nobody_waits_for_what_a_worker_is_at_when_time_is_up() -> None:
    asked, others = problem(), multiprocessing.active_children()
    candidate = next(candidates(asked, next(iter(shapes(asked)))))
    began = time.monotonic()
    with (
        patch.object(module, "answer_request", _never),
        workers(asked, 2) as ask,
    ):
        for _ in range(4):
            ask(Query(candidate))
        time.sleep(0.2)  # they are at it
    left = _others(others)
    while left and time.monotonic() - began < LONG / 2:
        time.sleep(0.01)  # the pool's own thread has heard of an end first, and has yet to note it
        left = _others(others)
    assert time.monotonic() - began < LONG / 2
    assert not left


def _others(processes: Sequence[BaseProcess]) -> set[BaseProcess]:
    """Return the children of this process that are none of these, of which some may have ended meanwhile."""
    return {*multiprocessing.active_children()} - {*processes}


def _knows(asked: ExpansionRequest) -> Expansion:
    """Whether a worker has an expander before the first question, as a number."""
    known = module._expanders.get(asked.change)  # pyright: ignore[reportPrivateUsage]
    return Expansion(seen=0 if known is None else len(known.bounds.sharing._known))  # pyright: ignore[reportPrivateUsage]


def test_workers_begin_with_the_lower_bounds_that_are_known_at_the_first_question() -> None:
    asked = problem()
    with patch.object(module, "_expand_here", _knows), workers(asked, 2) as ask:
        expander = ask.expander(asked, "")
        for shape in shapes(asked):
            expander.bounds.of_shape(shape)
        found = ask.expand(ExpansionRequest([], 1.0)).result()
        other = ask.expand(ExpansionRequest([], 1.0, "memory")).result()
    assert found.seen == len(expander.bounds.sharing._known) > 0  # pyright: ignore[reportPrivateUsage]
    assert other.seen == 0


def test_a_process_deals_a_problem_with_what_it_has_worked_out() -> None:
    asked = problem()
    larger = apply_change(asked, "batch")
    with workers(asked, 2) as ask:
        expander = ask.expander(asked, "")
        assert ask.expander(asked, "") is expander
        assert ask.expander(larger, "batch").problem is larger
        assert ask.expander(asked, "") is expander
        assert ask.expander(larger, "").problem is larger  # never another problem's lower bounds


# Candidates that are dealt many at a time, in another process or here, are those that are dealt one by one.


PROBLEM = problem(limits=Limits(fixed={"recompute": "none"}, most={"tp": 2, "micro_batch_size": 2}))


def asked_of(expander: Expander, least: float = math.inf) -> ExpansionRequest:
    """All shapes of the problem, to be dealt."""
    bounds = [(shape, expander.bounds.of_shape(shape)) for shape in shapes(expander.problem)]
    waiting = [
        QueueEntry(0.0, 0, each.seconds, each.bytes, each.passes, shape, passes=each.passes) for shape, each in bounds
    ]
    return ExpansionRequest(waiting, least)


def test_all_candidates_are_dealt_if_all_are_fast_enough() -> None:
    expander = Expander(PROBLEM)
    dealt = [each.plan for each in expander.all(asked_of(expander)).candidates]
    assert dealt == [each for shape in shapes(PROBLEM) for each in candidates(PROBLEM, shape)]


def test_a_worker_deals_as_this_process_does() -> None:
    expander = Expander(PROBLEM)
    seconds = sorted(each.seconds for each in expander.all(asked_of(expander)).candidates)
    asked = asked_of(expander, seconds[len(seconds) // 4])
    with workers(PROBLEM, 2) as ask:
        found = ask.expand(asked).result()
    assert found == Expander(PROBLEM).all(asked)
    assert 0 < len(found.candidates) < len(seconds)


@pytest.mark.parametrize("beside", [1, 3])
def test_a_search_finds_the_same_plans_when_workers_deal_beside_it(beside: int) -> None:
    expander, handed = Expander(PROBLEM), list[int]()

    def forecast(asked: Query) -> Future[Answer | None]:
        future: Future[Answer | None] = Future()
        future.set_result(answer_request(PROBLEM, asked))
        return future

    def deal(asked: ExpansionRequest) -> Future[Expansion]:
        handed.append(len(asked.waiting))
        future: Future[Expansion] = Future()
        future.set_result(expander.all(asked))
        return future

    with patch.object(search, "HANDED_OUT", 2), patch.object(search, "FIRST_FORECASTS", 0):
        alone = Search(PROBLEM, forecast, ahead=2).run()
        found = Search(PROBLEM, Workers(forecast, deal, beside), ahead=2).run()
    assert len(handed) > 2
    assert found.left is alone.left is None
    assert found.best == alone.best
    assert {each.rank for each in found.outcomes} == {each.rank for each in alone.outcomes}


# Dealing discards only what does not fit, or is slower than what is wanted.


LITTLE = problem(
    devices=8,
    memory=0.2 * GIB + OWN.memory.context_bytes,
    limits=Limits(fixed={"tp": 2, "pp": 2, "recompute": "none"}, micro_batch_size=1),
    hidden_size=1024,
)


def dealt_by(bounds: LowerBounds, shape: PlanShape, plan: Plan, least: float, *, whole: bool = True) -> Expanded:
    return expand(bounds, shape, plan, passes_of(bounds, shape, plan), least=least, whole=whole)


def pipelines(asked: Problem) -> list[tuple[PlanShape, Plan]]:
    return [(shape, plan) for shape in shapes(asked) for plan in pipelined(asked, shape) if follows(asked, shape, plan)]


@cache
def forecasts_of_what_fits() -> dict[str, float]:
    """Forecast step times in seconds of all candidates that fit."""
    forecasts: dict[str, float] = {}
    for shape, plan in pipelines(LITTLE):
        for candidate in candidates_of_pipeline(LITTLE, shape, plan):
            found = answer_request(LITTLE, Query(candidate))
            if found is not None and found.forecast.memory.fits and found.forecast.memory.safe:
                forecasts[repr(candidate)] = found.forecast.seconds
    return forecasts


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_what_fits_and_is_fast_enough_is_dealt(share: float) -> None:
    bounds, forecasts, every = LowerBounds(LITTLE), forecasts_of_what_fits(), pipelines(LITTLE)
    assert len(every) > 5
    least = sorted(forecasts.values())[int(share * len(forecasts))]
    wanted = {name for name, seconds in forecasts.items() if seconds <= least}
    for whole in (False, True):
        found = [each for shape, plan in every for each in dealt_by(bounds, shape, plan, least, whole=whole).candidates]
        assert wanted <= {repr(each.candidate) for each in found}
        assert all(each.seconds <= least for each in found)
        assert len(found) < sum(1 for shape, plan in every for _ in candidates_of_pipeline(LITTLE, shape, plan))


# Questions are asked, and answers waited for, until time is up.


ASKED = Query(next(candidates(problem(), next(shapes(problem())))))


def never(_: Query) -> Future[Answer | None]:
    return Future()


def test_an_answer_that_does_not_come_in_time_is_missed_and_its_question_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timed = TimedQueries(problem(), never, now + 0.05)
    coming = timed.ask(ASKED)
    assert timed.answer(coming, "an alternative") is None
    assert coming is not None
    assert coming.cancelled()
    assert str(timed) == "an alternative (1)"


def test_nothing_is_asked_when_time_is_up() -> None:
    asked: list[Query] = []

    def ask(question: Query) -> Future[Answer | None]:
        asked.append(question)
        return Future()

    timed = TimedQueries(problem(), ask, time.monotonic() - 1)
    assert timed.answer(timed.ask(ASKED), "why") is timed.answer(timed.ask(ASKED), "why") is None
    assert not asked
    assert str(timed) == "why (2)"


def test_no_trace_is_begun_that_would_take_longer_than_there_is_time() -> None:
    timed = TimedQueries(problem(sequences=2**20), never, time.monotonic() + 60)
    unsteady = replace(ASKED.candidate, plan=replace(ASKED.candidate.plan, schedule="gpipe"))
    assert timed.ask(replace(ASKED, shares=True)) is not None, "few microbatches tell it"
    assert timed.ask(replace(ASKED, candidate=unsteady)) is not None, "a forecast is no trace"
    assert timed.ask(replace(ASKED, candidate=unsteady, shares=True)) is None


def test_a_refusal_is_no_answer_that_was_missed() -> None:
    refused: Future[Answer | None] = Future()
    refused.set_result(None)
    timed = TimedQueries(problem(), lambda _: refused, inf)
    assert timed.answer(timed.ask(ASKED), "why") is None
    assert not str(timed)

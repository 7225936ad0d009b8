"""Questions are asked, and answers waited for, until time is up."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import replace
from math import inf

import pytest

from shardlab.planner.in_time import InTime
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Answer, Asked
from tests.planner.problems import problem

ASKED = Asked(next(candidates(problem(), next(shapes(problem())))))


def never(_: Asked) -> Future[Answer | None]:
    return Future()


def test_an_answer_that_does_not_come_in_time_is_missed_and_its_question_withdrawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timed = InTime(problem(), never, now + 0.05)
    coming = timed.ask(ASKED)
    assert timed.answer(coming, "an alternative") is None
    assert coming is not None
    assert coming.cancelled()
    assert str(timed) == "an alternative (1)"


def test_nothing_is_asked_when_time_is_up() -> None:
    asked: list[Asked] = []

    def ask(question: Asked) -> Future[Answer | None]:
        asked.append(question)
        return Future()

    timed = InTime(problem(), ask, time.monotonic() - 1)
    assert timed.answer(timed.ask(ASKED), "why") is timed.answer(timed.ask(ASKED), "why") is None
    assert not asked
    assert str(timed) == "why (2)"


def test_no_trace_is_begun_that_would_take_longer_than_there_is_time() -> None:
    timed = InTime(problem(sequences=2**20), never, time.monotonic() + 60)
    unsteady = replace(ASKED.candidate, plan=replace(ASKED.candidate.plan, schedule="gpipe"))
    assert timed.ask(replace(ASKED, shares=True)) is not None, "few microbatches tell it"
    assert timed.ask(replace(ASKED, candidate=unsteady)) is not None, "a forecast is no trace"
    assert timed.ask(replace(ASKED, candidate=unsteady, shares=True)) is None


def test_a_refusal_is_no_answer_that_was_missed() -> None:
    refused: Future[Answer | None] = Future()
    refused.set_result(None)
    timed = InTime(problem(), lambda _: refused, inf)
    assert timed.answer(timed.ask(ASKED), "why") is None
    assert not str(timed)

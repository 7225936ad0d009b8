"""Workers answer, and end with who asks them, whatever they are at."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from unittest.mock import patch

from shardlab.planner import workers as module
from shardlab.planner.dealer import AskedDeal, Deals
from shardlab.planner.problem import Problem
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Asked, answer, changed, workers
from tests.planner.problems import problem

LONG = 600.0
"""Seconds for which nobody waits."""


def _never(problem: Problem, asked: Asked) -> None:
    time.sleep(LONG)


def test_workers_answer_as_this_process_does() -> None:
    asked = problem()
    candidate = next(candidates(asked, next(iter(shapes(asked)))))
    with workers(asked, 2) as ask:
        found = ask(Asked(candidate)).result()
    expected = answer(asked, Asked(candidate))
    assert found is not None
    assert expected is not None
    assert found.forecast.seconds == expected.forecast.seconds


def test_nobody_waits_for_what_a_worker_is_at_when_time_is_up() -> None:
    asked, others = problem(), multiprocessing.active_children()
    candidate = next(candidates(asked, next(iter(shapes(asked)))))
    began = time.monotonic()
    with (
        patch.object(module, "answer", _never),
        workers(asked, 2) as ask,
    ):
        for _ in range(4):
            ask(Asked(candidate))
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


def _knows(asked: AskedDeal) -> Deals:
    """Whether a worker has a dealer before it deals, as a number."""
    known = module._dealers.get(asked.change)  # pyright: ignore[reportPrivateUsage]
    return Deals(seen=0 if known is None else len(known.floors.sharing._known))  # pyright: ignore[reportPrivateUsage]


def test_workers_begin_with_the_floors_that_are_known_at_the_first_question() -> None:
    asked = problem()
    with patch.object(module, "_deal_here", _knows), workers(asked, 2) as ask:
        dealer = ask.dealer(asked, "")
        for shape in shapes(asked):
            dealer.floors.of_shape(shape)
        found = ask.deal(AskedDeal([], 1.0)).result()
        other = ask.deal(AskedDeal([], 1.0, "memory")).result()
    assert found.seen == len(dealer.floors.sharing._known) > 0  # pyright: ignore[reportPrivateUsage]
    assert other.seen == 0


def test_a_process_deals_a_problem_with_what_it_has_worked_out() -> None:
    asked = problem()
    larger = changed(asked, "batch")
    with workers(asked, 2) as ask:
        dealer = ask.dealer(asked, "")
        assert ask.dealer(asked, "") is dealer
        assert ask.dealer(larger, "batch").problem is larger
        assert ask.dealer(asked, "") is dealer
        assert ask.dealer(larger, "").problem is larger  # never another problem's floors

"""Workers answer, and end with who asks them, whatever they are at."""

from __future__ import annotations

import multiprocessing
import time
from unittest.mock import patch

from shardlab.planner import workers as module
from shardlab.planner.problem import Problem
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Asked, answer, workers
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
    assert time.monotonic() - began < LONG / 2
    assert multiprocessing.active_children() == others

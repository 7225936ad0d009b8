"""The search: its result is that of simulating everything."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.search import Search
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Answer, Asked, answer
from shardlab.predict.recipe import OWN
from tests.planner.problems import GIB, asked_at_once, problem


def every(asked: Problem) -> list[tuple[Candidate, Answer]]:
    """Every candidate that can be run, and its forecast."""
    found = [
        (candidate, answer(asked, Asked(candidate)))
        for shape in shapes(asked)
        for candidate in candidates(asked, shape)
    ]
    return [(candidate, each) for candidate, each in found if each is not None]


def search(asked: Problem, deadline: float = float("inf")) -> Search:
    return Search(asked, asked_at_once(asked), deadline=deadline)


@pytest.mark.parametrize(
    "asked",
    [
        problem(limits=Limits(fixed={"recompute": "none"}, most={"tp": 2, "micro_batch_size": 2})),
        problem(memory=0.7 * GIB + OWN.memory.context_bytes, limits=Limits(most={"pp": 1}), hidden_size=1024),
        problem(devices=8, limits=Limits(fixed={"tp": 2, "pp": 2, "recompute": "full"}, micro_batch_size=1)),
    ],
    ids=["all kinds", "little memory", "3d"],
)
def test_the_search_finds_what_simulating_everything_finds(asked: Problem) -> None:
    fitting = [
        (each.forecast.seconds, repr(candidate))
        for candidate, each in every(asked)
        if each.forecast.memory.fits and each.forecast.memory.safe
    ]
    found = search(asked).run()
    assert found.left is None
    assert found.best is not None
    assert found.best.seconds == min(fitting)[0]
    assert len(found.outcomes) < len(fitting)


def test_what_a_search_leaves_when_it_is_interrupted_is_no_faster_than_it_says() -> None:
    asked = problem(limits=Limits(fixed={"recompute": "none", "cp": 1, "pp": 1}, micro_batch_size=1))
    seconds = {repr(candidate): each.forecast.seconds for candidate, each in every(asked)}
    cut = 0
    for most in range(1, 16, 3):
        questions: list[Asked] = []

        def ask(question: Asked, most: int = most, questions: list[Asked] = questions) -> Future[Answer | None]:
            if len(questions) == most:
                raise KeyboardInterrupt
            questions.append(question)
            future: Future[Answer | None] = Future()
            future.set_result(answer(asked, question))
            return future

        found = Search(asked, ask, ahead=2).run()
        known = {repr(question.candidate) for question in questions}
        if found.left is not None:
            cut += 1
            assert found.left <= min(each for name, each in seconds.items() if name not in known)
    assert cut > 2


@pytest.mark.parametrize("memory", [80 * GIB, OWN.memory.context_bytes + 0.225 * GIB], ids=["roomy", "hard to fit"])
def test_a_search_whose_time_is_up_at_once_finds_a_plan_that_fits(memory: float) -> None:
    asked = problem(memory=memory, hidden_size=1024)
    found = search(asked, deadline=0).run()
    assert found.best is not None
    assert found.left is not None
    assert len(found.outcomes) + len(found.refused) <= 24

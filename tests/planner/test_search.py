"""The search: its result is that of simulating everything."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from math import inf

import pytest

from shardlab.language import Mesh
from shardlab.planner.bounds import LowerBounds
from shardlab.planner.problem import Candidate, Limits, PlanShape, Problem, family
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.search import Search, SmallestPlans
from shardlab.planner.space import candidates, pipelined, shapes
from shardlab.planner.workers import Answer, Query, answer_request
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.recipe import OWN
from shardlab.strategies.plan.plan import Plan
from tests.planner.problems import GIB, asked_at_once, problem


def every(asked: Problem) -> list[tuple[Candidate, Answer]]:
    """Every candidate that can be run, and its forecast."""
    found = [
        (candidate, answer_request(asked, Query(candidate)))
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
        questions: list[Query] = []

        def ask(question: Query, most: int = most, questions: list[Query] = questions) -> Future[Answer | None]:
            if len(questions) == most:
                raise KeyboardInterrupt
            questions.append(question)
            future: Future[Answer | None] = Future()
            future.set_result(answer_request(asked, question))
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


# The smallest plan of each family is known before any search, and lower bounds of memory tell which it is.


PROBLEM = problem(devices=8, sequences=64, hidden_size=1024, limits=Limits(most={"micro_batch_size": 2}))


def smallest(asked: Problem) -> list[tuple[float, Candidate]]:
    bounds = LowerBounds(asked)
    plans = SmallestPlans(bounds)
    for shape in shapes(asked):
        if (least := bounds.of_shape(shape).bytes) < inf:
            plans.note(shape, least)
    return plans.candidates()


def bytes_of(asked: Problem, candidate: Candidate) -> float:
    found = answer_request(asked, Query(candidate))
    return inf if found is None else found.forecast.memory.unlimited


def test_every_family_has_one_and_hardly_any_plan_takes_less() -> None:
    found = {family(candidate.plan): bytes_of(PROBLEM, candidate) for _, candidate in smallest(PROBLEM)}
    every = [candidate for shape in shapes(PROBLEM) for candidate in candidates(PROBLEM, shape)]
    assert set(found) == {family(each.plan) for each in every}
    for each in every[::401]:
        assert found[family(each.plan)] <= 1.1 * bytes_of(PROBLEM, each), each


def test_lower_bounds_say_which_comes_first_and_are_lower_bounds() -> None:
    found = smallest(PROBLEM)
    assert [bound for bound, _ in found] == sorted(bound for bound, _ in found)
    assert all(bound <= bytes_of(PROBLEM, candidate) for bound, candidate in found)


def test_a_search_without_time_finds_a_plan_if_only_small_ones_fit() -> None:
    sizes = sorted(bytes_of(PROBLEM, candidate) for _, candidate in smallest(PROBLEM))
    little = replace(PROBLEM, cluster=problem(devices=8, memory=1.02 * sizes[0] + 1).cluster)
    found = Search(little, asked_at_once(little), deadline=1e-9).run()
    assert found.best is not None
    assert found.best.forecast.memory.fits


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first"])
def test_a_schedule_that_holds_all_microbatches_has_a_lower_bound_of_all(schedule: str) -> None:
    """Its order of work is made of few, but it keeps as many more as there are."""
    fixed = {"pp": 2, "dp_shard": 1, "tp": 1, "schedule": schedule, "recompute": "none"}
    asked = problem(devices=2, sequences=64, memory=1000 * GIB, limits=Limits(fixed, {}, 1))
    bounds = LowerBounds(asked)
    pipelines: list[tuple[PlanShape, Plan]] = [(s, plan) for s in shapes(asked) for plan in pipelined(asked, s)]
    assert pipelines
    for shape, plan in pipelines:
        wanted = bytes_of(asked, Candidate(plan, 1, shape.precision)) - OWN.memory.context_bytes
        bound = bounds.memory.of_pipeline(shape, plan) - OWN.memory.context_bytes
        assert 0.8 * wanted < bound <= wanted


# What a search has found is told alike, in whatever order the forecasts came.


def outcome(asked: Problem, plan: Plan, size: int) -> PlanOutcome:
    candidate = Candidate(plan, size, asked.precisions[0])
    return PlanOutcome(candidate, forecast(asked.workload(candidate)))


def test_misses_are_in_a_tables_order_and_the_nearest_of_their_family() -> None:
    asked = problem(memory=2**20)
    mesh = Mesh(dp_shard=4)
    plans = [Plan(Mesh(tp=4)), Plan(mesh, shard_optimizer=("dp_shard",)), Plan(Mesh(dp_replicate=4))]
    outcomes = [outcome(asked, plan, size) for size in (2, 1) for plan in plans]
    assert not any(each.fits for each in outcomes)
    misses = Results(outcomes).misses()
    assert [*misses] == ["data parallel", "ZeRO-1", "TP"]
    assert {candidate.micro_batch_size for _, candidate in misses.values()} == {1}
    again = Results(outcomes[::-1]).misses()
    assert [*again.items()] == [*misses.items()]

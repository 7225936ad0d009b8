"""The search finds the best plan, or one as good, and says truly what it has not searched."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from shardlab.language import Mesh
from shardlab.planner.pass_costs import PassCosts
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.search import UNLIMITED, Budget, Search
from shardlab.planner.workers import Change, Workers, workers
from shardlab.simulate.predict.forecast import forecast
from shardlab.strategies.plan.plan import Plan
from tests.planner.problems import EXHAUSTED, GIB, every_answer, every_candidate, fastest_seconds, problem
from tests.support.thorough import sampled

WITHIN = 1.02
"""The best plan that is found takes at most this many times as long as the best plan there is."""


def search(problem: Problem, budget: Budget = UNLIMITED) -> Results:
    return Search(problem, Workers(problem), budget=budget).run()


@pytest.mark.parametrize("name", sampled(EXHAUSTED, lambda name: name != "3d"))
def test_the_search_finds_a_plan_as_fast_as_simulating_every_plan(name: str) -> None:
    results = search(EXHAUSTED[name])
    assert results.complete
    assert results.best is not None
    assert results.best.seconds <= WITHIN * fastest_seconds(name)
    assert len(results.outcomes) < len(every_candidate(EXHAUSTED[name])) / 2 or len(results.outcomes) < 10


def test_the_best_plan_of_a_family_is_within_a_tenth_of_simulating_every_plan() -> None:
    problem = EXHAUSTED["all kinds"]
    results = Search(problem, Workers(problem), families=True).run()
    best: dict[str, float] = {}
    for candidate, answer in every_answer("all kinds"):
        outcome = PlanOutcome(candidate, answer.forecast)
        if outcome.fits:
            best[outcome.family] = min(best.get(outcome.family, outcome.seconds), outcome.seconds)
    rows = {name: row for name, row in results.families().items() if name in results.searched}
    assert len(rows) > 5
    assert rows.keys() == best.keys()
    for name, row in rows.items():
        assert row.seconds <= 1.1 * best[name], name


def test_a_budget_of_forecasts_gives_the_same_result_with_any_number_of_workers() -> None:
    search_problem = problem(devices=8, sequences=64, hidden_size=1024)
    budget = Budget(forecasts=20)
    alone = search(search_problem, budget)
    assert not alone.complete
    with workers(search_problem, 3) as processes:
        with_workers = Search(search_problem, processes, budget=budget).run()
    assert [result.candidate for result in with_workers.outcomes] == [result.candidate for result in alone.outcomes]
    assert [improvement.seconds for improvement in with_workers.improvements] == [
        improvement.seconds for improvement in alone.improvements
    ]


@pytest.mark.parametrize("memory", [80 * GIB, 1.325 * GIB], ids=["roomy", "hard to fit"])
def test_a_search_without_time_finds_a_plan_that_fits(memory: float) -> None:
    results = search(problem(memory=memory, hidden_size=1024), Budget(seconds=0.0))
    assert results.best is not None
    assert not results.complete
    assert len(results.outcomes) < 30


class Interrupted(Workers):
    """Workers that are interrupted at a question."""

    def __init__(self, problem: Problem, question: int) -> None:
        super().__init__(problem)
        self.remaining = question

    def submit(self, question: Callable[[PassCosts], Any], change: Change = "") -> Future[Any]:
        self.remaining -= 1
        if not self.remaining:
            raise KeyboardInterrupt
        return super().submit(question, change)


def test_an_interrupted_search_has_the_best_plan_so_far() -> None:
    search_problem = problem(limits=Limits(fixed={"recompute": "none"}))
    whole = search(search_problem)
    interrupted = Search(search_problem, Interrupted(search_problem, 20)).run()
    assert interrupted.best is not None
    assert not interrupted.complete
    assert len(interrupted.outcomes) < len(whole.outcomes)


def test_a_search_that_is_interrupted_before_it_knows_a_plan_is_not_called_out_of_time() -> None:
    search_problem = problem()
    with pytest.raises(KeyboardInterrupt):
        Search(search_problem, Interrupted(search_problem, 1)).run()
    assert Search(search_problem, Interrupted(search_problem, 1), best=1.0).run().best is None


def test_a_search_for_less_than_a_known_time_finds_only_faster_plans_or_none() -> None:
    problem = EXHAUSTED["pipelines"]
    best = fastest_seconds("pipelines")
    assert not any(
        result.seconds < 0.5 * best for result in Search(problem, Workers(problem), best=0.5 * best).run().fitting
    )


def test_a_problem_that_nothing_fits_ends_and_names_the_smallest_plan_of_each_family() -> None:
    search_problem = problem(memory=1.01 * GIB, hidden_size=1024)
    results = Search(search_problem, Workers(search_problem), families=True).run()
    assert results.complete
    assert results.best is None
    misses = results.misses()
    assert {"ZeRO-3", "TP", "PP"} <= misses.keys()
    assert all(bytes > search_problem.usable_bytes for bytes, _ in misses.values())


# Results do not depend on the order in which plans were simulated.


def outcome(problem: Problem, plan: Plan, size: int) -> PlanOutcome:
    candidate = Candidate(plan, size, problem.precisions[0])
    return PlanOutcome(candidate, forecast(problem.workload(candidate)))


def test_misses_are_in_the_order_of_a_table_and_the_nearest_of_their_family() -> None:
    search_problem = problem(memory=2**20)
    mesh = Mesh(dp_shard=4)
    plans = [Plan(Mesh(tp=4)), Plan(mesh, shard_optimizer=("dp_shard",)), Plan(Mesh(dp_replicate=4))]
    outcomes = [outcome(search_problem, plan, size) for size in (2, 1) for plan in plans]
    assert not any(result.fits for result in outcomes)
    misses = Results(outcomes).misses()
    assert [*misses] == ["data parallel", "ZeRO-1", "TP"]
    assert {candidate.micro_batch_size for _, candidate in misses.values()} == {1}
    reversed_misses = Results(outcomes[::-1]).misses()
    assert [*reversed_misses.items()] == [*misses.items()]


def test_a_plan_that_ran_out_of_memory_is_not_chosen() -> None:
    problem = EXHAUSTED["pipelines"]
    best = search(problem).best
    assert best is not None
    other = Search(problem, Workers(problem), ran_out=frozenset({best.candidate})).run().best
    assert other is not None
    assert other.candidate != best.candidate
    assert replace(best, ran_out=True).fits is False

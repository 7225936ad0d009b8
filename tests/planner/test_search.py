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


def search(asked: Problem, budget: Budget = UNLIMITED) -> Results:
    return Search(asked, Workers(asked), budget=budget).run()


@pytest.mark.parametrize("name", sampled(EXHAUSTED, lambda name: name != "3d"))
def test_the_search_finds_a_plan_as_fast_as_simulating_every_plan(name: str) -> None:
    found = search(EXHAUSTED[name])
    assert found.complete
    assert found.best is not None
    assert found.best.seconds <= WITHIN * fastest_seconds(name)
    assert len(found.outcomes) < len(every_candidate(EXHAUSTED[name])) / 2 or len(found.outcomes) < 10


def test_the_best_plan_of_a_family_is_within_a_tenth_of_simulating_every_plan() -> None:
    asked = EXHAUSTED["all kinds"]
    found = Search(asked, Workers(asked), families=True).run()
    best: dict[str, float] = {}
    for candidate, answer in every_answer("all kinds"):
        outcome = PlanOutcome(candidate, answer.forecast)
        if outcome.fits:
            best[outcome.family] = min(best.get(outcome.family, outcome.seconds), outcome.seconds)
    rows = {name: each for name, each in found.families().items() if name in found.searched}
    assert len(rows) > 5
    assert rows.keys() == best.keys()
    for name, each in rows.items():
        assert each.seconds <= 1.1 * best[name], name


def test_a_budget_of_forecasts_gives_the_same_result_with_any_number_of_workers() -> None:
    asked = problem(devices=8, sequences=64, hidden_size=1024)
    budget = Budget(forecasts=20)
    alone = search(asked, budget)
    assert not alone.complete
    with workers(asked, 3) as processes:
        found = Search(asked, processes, budget=budget).run()
    assert [each.candidate for each in found.outcomes] == [each.candidate for each in alone.outcomes]
    assert [each.seconds for each in found.improvements] == [each.seconds for each in alone.improvements]


@pytest.mark.parametrize("memory", [80 * GIB, 1.325 * GIB], ids=["roomy", "hard to fit"])
def test_a_search_without_time_finds_a_plan_that_fits(memory: float) -> None:
    found = search(problem(memory=memory, hidden_size=1024), Budget(seconds=0.0))
    assert found.best is not None
    assert not found.complete
    assert len(found.outcomes) < 30


class Interrupted(Workers):
    """Workers that are interrupted at a question."""

    def __init__(self, asked: Problem, question: int) -> None:
        super().__init__(asked)
        self.left = question

    def submit(self, question: Callable[[PassCosts], Any], change: Change = "") -> Future[Any]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().submit(question, change)


def test_an_interrupted_search_has_the_best_plan_so_far() -> None:
    asked = problem(limits=Limits(fixed={"recompute": "none"}))
    whole = search(asked)
    found = Search(asked, Interrupted(asked, 20)).run()
    assert found.best is not None
    assert not found.complete
    assert len(found.outcomes) < len(whole.outcomes)


def test_a_search_that_is_interrupted_before_it_knows_a_plan_is_not_called_out_of_time() -> None:
    asked = problem()
    with pytest.raises(KeyboardInterrupt):
        Search(asked, Interrupted(asked, 1)).run()
    assert Search(asked, Interrupted(asked, 1), best=1.0).run().best is None


def test_a_search_for_less_than_a_known_time_finds_only_faster_plans_or_none() -> None:
    asked = EXHAUSTED["pipelines"]
    best = fastest_seconds("pipelines")
    assert not any(each.seconds < 0.5 * best for each in Search(asked, Workers(asked), best=0.5 * best).run().fitting)


def test_a_problem_that_nothing_fits_ends_and_names_the_smallest_plan_of_each_family() -> None:
    asked = problem(memory=1.01 * GIB, hidden_size=1024)
    found = Search(asked, Workers(asked), families=True).run()
    assert found.complete
    assert found.best is None
    misses = found.misses()
    assert {"ZeRO-3", "TP", "PP"} <= misses.keys()
    assert all(bytes > asked.usable_bytes for bytes, _ in misses.values())


# Results do not depend on the order in which plans were simulated.


def outcome(asked: Problem, plan: Plan, size: int) -> PlanOutcome:
    candidate = Candidate(plan, size, asked.precisions[0])
    return PlanOutcome(candidate, forecast(asked.workload(candidate)))


def test_misses_are_in_the_order_of_a_table_and_the_nearest_of_their_family() -> None:
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


def test_a_plan_that_ran_out_of_memory_is_not_chosen() -> None:
    asked = EXHAUSTED["pipelines"]
    best = search(asked).best
    assert best is not None
    other = Search(asked, Workers(asked), ran_out=frozenset({best.candidate})).run().best
    assert other is not None
    assert other.candidate != best.candidate
    assert replace(best, ran_out=True).fits is False

"""What a search has found is told alike, in whatever order the forecasts came."""

from __future__ import annotations

from shardlab.language import Mesh
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import Found, PlanOutcome
from shardlab.simulate.predict.forecast import forecast
from shardlab.strategies.plan.plan import Plan
from tests.planner.problems import problem


def outcome(asked: Problem, plan: Plan, size: int) -> PlanOutcome:
    candidate = Candidate(plan, size, asked.precisions[0])
    return PlanOutcome(candidate, forecast(asked.workload(candidate)))


def test_misses_are_in_a_tables_order_and_the_nearest_of_their_family() -> None:
    asked = problem(memory=2**20)
    mesh = Mesh(dp_shard=4)
    plans = [Plan(Mesh(tp=4)), Plan(mesh, shard_optimizer=("dp_shard",)), Plan(Mesh(dp_replicate=4))]
    outcomes = [outcome(asked, plan, size) for size in (2, 1) for plan in plans]
    assert not any(each.fits for each in outcomes)
    misses = Found(outcomes).misses()
    assert [*misses] == ["data parallel", "ZeRO-1", "TP"]
    assert {candidate.micro_batch_size for _, candidate in misses.values()} == {1}
    again = Found(outcomes[::-1]).misses()
    assert [*again.items()] == [*misses.items()]

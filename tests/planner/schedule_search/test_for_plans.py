"""Schedules for the planner's plans: what they gain, and why none could be searched."""

from __future__ import annotations

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import PlanOutcome, Results
from shardlab.planner.schedule_search.for_plans import schedules_for_plans
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import forecast
from shardlab.strategies.plan.plan import Plan


def results_of(problem: Problem, *plans: Plan) -> Results:
    candidates = [Candidate(plan, 1, problem.precisions[0]) for plan in plans]
    outcomes = [PlanOutcome(candidate, forecast(problem.workload(candidate))) for candidate in candidates]
    return Results(outcomes)


def test_a_pipeline_plan_gains_from_a_searched_schedule() -> None:
    problem = Problem(find_model("gpt2"), find_cluster("a100x4"), 32, (find_precision("bf16"),))
    results = results_of(problem, Plan(Mesh(pp=4)), Plan(Mesh(dp_shard=4)), Plan(Mesh(pp=2, dp_shard=2)))
    plans = schedules_for_plans(problem, results, 2)
    assert {result.candidate.plan.mesh.pp for result in plans} == {2, 4}, "the plan without a pipeline is left out"
    assert all(result.schedule is not None and result.gain > 0 for result in plans)
    assert all(result.seconds < result.published_seconds for result in plans)


def test_a_plan_whose_model_is_too_shallow_says_so() -> None:
    problem = Problem(find_model("gpt2"), find_cluster("a100x4"), 32, (find_precision("bf16"),))
    assert schedules_for_plans(problem, results_of(problem, Plan(Mesh(dp_shard=4))), 1) == []

"""The smallest plan of each family is known before any search, and floors of memory tell which it is."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from shardlab.planner.families import family
from shardlab.planner.floors import Floors
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.search import Search
from shardlab.planner.shape_pipelines import pipelined
from shardlab.planner.smallest import SmallestPlans
from shardlab.planner.space import candidates, shapes
from shardlab.planner.workers import Asked, answer
from shardlab.predict.recipe import OWN
from shardlab.strategies.plan import Plan
from tests.planner.problems import GIB, asked_at_once, problem

PROBLEM = problem(devices=8, sequences=64, hidden_size=1024, limits=Limits(most={"micro_batch_size": 2}))


def smallest(asked: Problem) -> list[tuple[float, Candidate]]:
    floors = Floors(asked)
    plans = SmallestPlans(floors)
    for shape in shapes(asked):
        if (least := floors.of_shape(shape).bytes) < inf:
            plans.note(shape, least)
    return plans.candidates()


def bytes_of(asked: Problem, candidate: Candidate) -> float:
    found = answer(asked, Asked(candidate))
    return inf if found is None else found.forecast.memory.wanted


def test_every_family_has_one_and_hardly_any_plan_takes_less() -> None:
    found = {family(candidate.plan): bytes_of(PROBLEM, candidate) for _, candidate in smallest(PROBLEM)}
    every = [candidate for shape in shapes(PROBLEM) for candidate in candidates(PROBLEM, shape)]
    assert set(found) == {family(each.plan) for each in every}
    for each in every[::401]:
        assert found[family(each.plan)] <= 1.1 * bytes_of(PROBLEM, each), each


def test_floors_say_which_comes_first_and_are_floors() -> None:
    found = smallest(PROBLEM)
    assert [floor for floor, _ in found] == sorted(floor for floor, _ in found)
    assert all(floor <= bytes_of(PROBLEM, candidate) for floor, candidate in found)


def test_a_search_without_time_finds_a_plan_if_only_small_ones_fit() -> None:
    sizes = sorted(bytes_of(PROBLEM, candidate) for _, candidate in smallest(PROBLEM))
    little = replace(PROBLEM, cluster=problem(devices=8, memory=1.02 * sizes[0] + 1).cluster)
    found = Search(little, asked_at_once(little), deadline=1e-9).run()
    assert found.best is not None
    assert found.best.forecast.memory.fits


@pytest.mark.parametrize("schedule", ["gpipe", "breadth-first"])
def test_a_schedule_that_holds_all_microbatches_has_a_floor_of_all(schedule: str) -> None:
    """Its order of work is made of few, but it keeps as many more as there are."""
    fixed = {"pp": 2, "dp_shard": 1, "tp": 1, "schedule": schedule, "recompute": "none"}
    asked = problem(devices=2, sequences=64, memory=1000 * GIB, limits=Limits(fixed, {}, 1))
    floors = Floors(asked)
    pipelines: list[tuple[PlanShape, Plan]] = [(s, plan) for s in shapes(asked) for plan in pipelined(asked, s)]
    assert pipelines
    for shape, plan in pipelines:
        wanted = bytes_of(asked, Candidate(plan, 1, shape.precision)) - OWN.memory.context_bytes
        floor = floors.memory.of_pipeline(shape, plan) - OWN.memory.context_bytes
        assert 0.8 * wanted < floor <= wanted

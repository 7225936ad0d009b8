"""Contenders: what may be faster than the plan that is predicted fastest, as far as time and memory allow."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from shardlab.planner.chosen import PlanChoice, choose
from shardlab.planner.contenders import STEPS, contenders
from shardlab.planner.problem import Limits
from shardlab.planner.workers import workers
from tests.planner.problems import problem


@pytest.fixture(scope="module")
def choice() -> PlanChoice:
    asked = problem(limits=Limits({"recompute": "none", "cp": 1}, {}, 1))
    with workers(asked, 1) as ask:
        return choose(asked, ask, measured=())


def test_the_plan_that_is_predicted_fastest_comes_first_and_none_is_far_slower(choice: PlanChoice) -> None:
    found = contenders(choice, inf)
    assert found[0] == choice.best
    assert len(found) > 1
    assert all(each.seconds <= choice.best.seconds * (1 + choice.sure.mean) for each in found)
    assert len({each.candidate for each in found}) == len(found)


def test_no_more_take_turns_than_there_is_time_for(choice: PlanChoice) -> None:
    found = contenders(choice, inf)
    two = STEPS * sum(each.seconds for each in found[:2])
    assert contenders(choice, 1.001 * two) == found[:2]
    assert contenders(choice, 0.999 * two) == found[:1]
    assert contenders(choice, -1.0) == found[:1]


def test_those_that_take_turns_lie_in_memory_at_once(choice: PlanChoice) -> None:
    found = contenders(choice, inf)
    room = sum(each.forecast.memory.total for each in found[:2]) + choice.problem.recipe.memory.margin_bytes
    device = replace(choice.problem.cluster.device, memory=1.001 * room)
    tight = replace(choice.problem, cluster=replace(choice.problem.cluster, device=device))
    assert contenders(replace(choice, problem=tight), inf) == found[:2]

"""Lines are plans of the space, whatever the user fixes, and neighbours reach all kinds of plans."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from shardlab.planner.lines import every_line, seeds, shares_of, with_share
from shardlab.planner.problem import Candidate, Limits, Problem, family
from shardlab.simulate.predict.recipe import find_recipe
from tests.planner.enumeration import candidates, shape_of
from tests.planner.problems import every_candidate, problem
from tests.planner.test_space import FIXED, LLAMA
from tests.support.thorough import sampled


def plans_of(problem: Problem, line: Candidate) -> list[Candidate]:
    plans = [with_share(problem, line, share) for share in shares_of(problem, line)]
    return [plan for plan in plans if plan is not None]


@pytest.mark.parametrize("limits", [Limits({"pp": 2}, {}, 1)], ids=str)
def test_every_plan_of_a_line_is_in_the_space(limits: Limits) -> None:
    search_problem = replace(problem(4, 8, limits=limits), model=LLAMA)
    lines = set(every_line(search_problem))
    assert len(lines) > 50
    for line in sorted(lines, key=repr)[::15]:
        for candidate in plans_of(search_problem, line):
            recompute = next(
                share
                for share in shares_of(search_problem, line)
                if with_share(search_problem, line, share) == candidate
            )
            shape = replace(shape_of(line), recompute=recompute)
            assert candidate in list(candidates(search_problem, shape)), candidate


def test_neighbours_reach_every_family_and_the_plans_of_the_space() -> None:
    search_problem = replace(problem(4, 8, limits=Limits({"recompute": "none"}, {}, 1)), model=LLAMA)
    lines, all_candidates = set(every_line(search_problem)), set(every_candidate(search_problem))
    assert {family(candidate.plan) for candidate in all_candidates} == {family(candidate.plan) for candidate in lines}
    assert lines <= all_candidates
    assert len(lines) > len(all_candidates) / 2


@pytest.mark.parametrize("name", sampled(FIXED, list(FIXED)[::3].__contains__))
def test_a_fixed_field_has_its_value_in_every_line(name: str) -> None:
    fixed: dict[str, Any] = {"recompute": "none", name: FIXED[name]}
    search_problem = replace(problem(4, 8, limits=Limits(fixed, {}, 1)), model=LLAMA)
    lines = set(every_line(search_problem))
    assert lines
    assert {getattr(line.plan, name) for line in lines} == {FIXED[name]}


def test_a_line_recomputes_what_its_framework_can() -> None:
    search_problem = replace(problem(4, 8, limits=Limits({"pp": 2, "tp": 1, "cp": 1}, {}, 1)), model=LLAMA)
    modes: dict[str, set[Any]] = {}
    for name in ("nanotron", "megatron-core", "torchtitan"):
        with_recipe = replace(search_problem, recipe=find_recipe(name))
        modes[name] = {
            candidate.plan.recompute for line in seeds(with_recipe) for candidate in plans_of(with_recipe, line)
        }
    assert modes["nanotron"] == {"none", "full"}
    assert modes["megatron-core"] > {"none", "full", "first-1"}
    assert not any(isinstance(mode, tuple) for mode in modes["megatron-core"])
    assert modes["torchtitan"] == {"none", "per-op", "full"}


def test_shares_of_a_line_recompute_more_and_more_blocks_of_each_stage() -> None:
    search_problem = replace(problem(4, 8, limits=Limits({"pp": 2, "tp": 1, "cp": 1}, {}, 1)), model=LLAMA)
    line = next(seed for seed in seeds(search_problem) if seed.plan.schedule == "1f1b")
    blocks = [
        set(candidate.plan.recompute)
        for candidate in plans_of(search_problem, line)
        if isinstance(candidate.plan.recompute, tuple)
    ]
    assert blocks == sorted(blocks, key=len)
    assert all(smaller <= larger for smaller, larger in pairwise(blocks))
    recomputed = [candidate.plan.recompute for candidate in plans_of(search_problem, line)]
    assert (recomputed[0], recomputed[-1]) == ("none", "full")

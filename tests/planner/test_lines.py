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


def plans_of(asked: Problem, line: Candidate) -> list[Candidate]:
    found = [with_share(asked, line, share) for share in shares_of(asked, line)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize("limits", [Limits({"pp": 2}, {}, 1)], ids=str)
def test_every_plan_of_a_line_is_in_the_space(limits: Limits) -> None:
    asked = replace(problem(4, 8, limits=limits), model=LLAMA)
    lines = set(every_line(asked))
    assert len(lines) > 50
    for line in sorted(lines, key=repr)[::15]:
        for each in plans_of(asked, line):
            recompute = next(share for share in shares_of(asked, line) if with_share(asked, line, share) == each)
            shape = replace(shape_of(line), recompute=recompute)
            assert each in list(candidates(asked, shape)), each


def test_neighbours_reach_every_family_and_the_plans_of_the_space() -> None:
    asked = replace(problem(4, 8, limits=Limits({"recompute": "none"}, {}, 1)), model=LLAMA)
    lines, every = set(every_line(asked)), set(every_candidate(asked))
    assert {family(each.plan) for each in every} == {family(each.plan) for each in lines}
    assert lines <= every
    assert len(lines) > len(every) / 2


@pytest.mark.parametrize("name", sampled(FIXED, list(FIXED)[::3].__contains__))
def test_a_fixed_field_has_its_value_in_every_line(name: str) -> None:
    fixed: dict[str, Any] = {"recompute": "none", name: FIXED[name]}
    asked = replace(problem(4, 8, limits=Limits(fixed, {}, 1)), model=LLAMA)
    lines = set(every_line(asked))
    assert lines
    assert {getattr(each.plan, name) for each in lines} == {FIXED[name]}


def test_a_line_recomputes_what_its_framework_can() -> None:
    asked = replace(problem(4, 8, limits=Limits({"pp": 2, "tp": 1, "cp": 1}, {}, 1)), model=LLAMA)
    modes: dict[str, set[Any]] = {}
    for name in ("nanotron", "megatron-core", "torchtitan"):
        own = replace(asked, recipe=find_recipe(name))
        modes[name] = {each.plan.recompute for line in seeds(own) for each in plans_of(own, line)}
    assert modes["nanotron"] == {"none", "full"}
    assert modes["megatron-core"] > {"none", "full", "first-1"}
    assert not any(isinstance(mode, tuple) for mode in modes["megatron-core"])
    assert modes["torchtitan"] == {"none", "per-op", "full"}


def test_shares_of_a_line_recompute_more_and_more_blocks_of_each_stage() -> None:
    asked = replace(problem(4, 8, limits=Limits({"pp": 2, "tp": 1, "cp": 1}, {}, 1)), model=LLAMA)
    line = next(each for each in seeds(asked) if each.plan.schedule == "1f1b")
    blocks = [set(each.plan.recompute) for each in plans_of(asked, line) if isinstance(each.plan.recompute, tuple)]
    assert blocks == sorted(blocks, key=len)
    assert all(few <= more for few, more in pairwise(blocks))
    recomputed = [each.plan.recompute for each in plans_of(asked, line)]
    assert (recomputed[0], recomputed[-1]) == ("none", "full")

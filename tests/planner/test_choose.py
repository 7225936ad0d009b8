"""The whole answer, where a part of it cannot be had."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from rich.console import Console

from shardlab.cli.plan.report import as_json, print_choice, print_explained, searched
from shardlab.common.text import seconds_text
from shardlab.common.user_code import trace_limits
from shardlab.planner.choose import STEPS, PlanChoice, choose, find_contenders
from shardlab.planner.explain import explain_choice
from shardlab.planner.problem import Limits
from shardlab.planner.workers import workers
from tests.planner.problems import asked_at_once, problem


@cache
def chosen(ops: int | None = None) -> PlanChoice:
    """A choice of a pipeline of which at most so many ops are traced."""
    asked = problem(sequences=32, limits=Limits({"pp": 4, "schedule": "gpipe", "recompute": "none"}, {}, 1))

    with trace_limits(ops):
        return choose(asked, asked_at_once(asked))


def test_a_plan_whose_step_has_more_ops_than_are_traced_is_chosen_all_the_same() -> None:
    """Its forecast replays stages as wholes; what its time goes to takes every op."""
    whole, cut = chosen(), chosen(1000)
    assert cut.best == whole.best
    assert cut.answer.forecast == whole.answer.forecast
    assert (cut.answer.shares, cut.path) == (None, {})
    assert whole.path
    told = as_json(cut, "small", "h100x4", {}, 1)
    assert told["chosen"]["shares"] == {}
    console = Console(record=True, width=80)
    print_choice(whole, "small", "h100x4", {}, None, 1, console)
    assert "what the step waits for" in console.export_text()
    print_choice(cut, "small", "h100x4", {}, None, 1, console)
    assert console.export_text().count("the step has more ops than are traced") == 2, "its time and its path"
    print_explained(cut, "small", "h100x4", {}, None, console)
    assert "is not known: the step has more ops than are traced" in " ".join(console.export_text().split())


def test_what_there_was_no_time_for_is_said_to_be_left_out() -> None:
    asked = problem(limits=Limits({"recompute": "none", "cp": 1, "pp": 1}, {}, 1))

    late = choose(asked, asked_at_once(asked), seconds=1e-9)
    assert late.best.fits
    assert (late.alternatives, late.path, late.answer.shares) == ([], {}, None)
    console = Console(record=True, width=80)
    print_choice(late, "small", "h100x4", {}, None, 1, console)
    told = " ".join(console.export_text().split())
    assert "critical path time was up" in told
    assert re.search(r"left out as time was up: an alternative \(\d+\), what the step.s time goes to \(1\)", told)
    assert as_json(late, "small", "h100x4", {}, 1)["searched"]["left_out"] == late.missed


def test_what_a_search_has_left_is_told_as_the_step_that_it_could_take() -> None:
    whole = chosen()
    left = replace(whole, results=replace(whole.results, left=whole.best.seconds / 2))
    assert searched(left).endswith(", 50% less: give more --seconds")
    assert f"could take {seconds_text(whole.best.seconds / 2)} instead of" in searched(left)


def test_a_small_model_is_not_said_to_have_no_parameters() -> None:
    first = explain_choice(chosen())[0].lines[0]
    assert first.startswith(f"{problem().model.parameter_count:,} parameters in bf16")


def test_what_would_help_says_what_stays_as_it_is() -> None:
    """Twice the memory is planned anew; with the others the plan stays."""
    console = Console(record=True, width=80)
    for helps in ({"links": 0.023, "batch": 0.001, "memory": 0.082}, {"batch": 0.1, "memory": 0.001}, {}):
        print_choice(replace(chosen(), helps=helps), "small", "h100x4", {}, None, 1, console)
    told = " ".join(console.export_text().split())
    links = "twice the bandwidth between nodes +2.3% and twice the batch +0.1% tokens/s with this very plan"
    assert f"{links}; twice the memory, planned anew, +8.2%" in told
    assert "twice the batch +10.0% tokens/s with this very plan; twice the memory, planned anew, less than +2%" in told
    assert "would help twice the memory, planned anew, was not searched to the end" in told


# Contenders: what may be faster than the plan that is predicted fastest, as far as time and memory allow.


@pytest.fixture(scope="module")
def choice() -> PlanChoice:
    asked = problem(limits=Limits({"recompute": "none", "cp": 1}, {}, 1))
    with workers(asked, 1) as ask:
        return choose(asked, ask, measured=())


def test_the_plan_that_is_predicted_fastest_comes_first_and_none_is_far_slower(choice: PlanChoice) -> None:
    found = find_contenders(choice, inf)
    assert found[0] == choice.best
    assert len(found) > 1
    assert all(each.seconds <= choice.best.seconds * (1 + choice.published_errors.mean) for each in found)
    assert len({each.candidate for each in found}) == len(found)


def test_no_more_take_turns_than_there_is_time_for(choice: PlanChoice) -> None:
    found = find_contenders(choice, inf)
    two = STEPS * sum(each.seconds for each in found[:2])
    assert find_contenders(choice, 1.001 * two) == found[:2]
    assert find_contenders(choice, 0.999 * two) == found[:1]
    assert find_contenders(choice, -1.0) == found[:1]


def test_those_that_take_turns_lie_in_memory_at_once(choice: PlanChoice) -> None:
    found = find_contenders(choice, inf)
    room = sum(each.forecast.memory.total for each in found[:2]) + choice.problem.recipe.memory.margin_bytes
    device = replace(choice.problem.cluster.device, memory=1.001 * room)
    tight = replace(choice.problem, cluster=replace(choice.problem.cluster, device=device))
    assert find_contenders(replace(choice, problem=tight), inf) == found[:2]

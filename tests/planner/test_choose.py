"""The whole answer, where a part of it cannot be had."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from math import inf

import pytest
from rich.console import Console

from shardlab.cli.plan.report import PlanReport, print_families, search_text
from shardlab.common.text import seconds_text
from shardlab.common.user_code import trace_limits
from shardlab.planner.choose import STEPS, PlanChoice, choose, expected_error, find_contenders
from shardlab.planner.explain import explain_choice
from shardlab.planner.problem import Limits
from shardlab.planner.search import Budget
from shardlab.planner.workers import Workers, workers
from shardlab.simulate.predict.confidence import MOST_MARGIN
from tests.planner.problems import problem


@cache
def choose_plan(ops: int | None = None) -> PlanChoice:
    """A choice of a pipeline of which at most so many ops are traced."""
    search_problem = problem(sequences=32, limits=Limits({"pp": 4, "schedule": "gpipe", "recompute": "none"}, {}, 1))

    with trace_limits(ops):
        return choose(search_problem, Workers(search_problem))


def test_a_plan_whose_step_has_more_ops_than_are_traced_is_chosen_all_the_same() -> None:
    """Its forecast and what its time goes to replay stages as wholes; the critical path takes every op."""
    whole, cut = choose_plan(), choose_plan(1000)
    assert cut.best == whole.best
    assert cut.answer.forecast == whole.answer.forecast
    assert cut.answer.shares == whole.answer.shares is not None
    assert (cut.path, bool(whole.path)) == ({}, True)
    console = Console(record=True, width=80)
    PlanReport(whole, "small", "h100x4", {}, 1).report(explain=True).print(console)
    assert "ops and waits that add up to the step" in console.export_text()
    PlanReport(cut, "small", "h100x4", {}, 1).report(explain=True).print(console)
    assert " ".join(console.export_text().split()).count("the step has more ops than are traced") == 1


def test_what_there_was_no_time_for_is_said_to_be_left_out() -> None:
    search_problem = problem(limits=Limits({"recompute": "none", "cp": 1, "pp": 1}, {}, 1))

    late = choose(search_problem, Workers(search_problem), budget=Budget(seconds=1e-9))
    assert late.best.fits
    assert (late.alternatives, late.path, late.answer.shares) == ([], {}, None)
    console = Console(record=True, width=80)
    PlanReport(late, "small", "h100x4", {}, 1).report(explain=True).print(console)
    output = " ".join(console.export_text().split())
    assert "critical path the time was up" in output
    assert "the time was up: more --seconds may find a faster one" in output
    assert re.search(r"left out as time was up: an alternative \(\d+\), what the step.s time goes to \(1\)", output)
    assert PlanReport(late, "small", "h100x4", {}, 1).fields()["searched"]["left_out"] == late.missed


def test_the_report_says_how_much_was_searched_and_what_no_plan_can_undercut() -> None:
    whole = choose_plan()
    lower_bound = whole.problem.workload(whole.best.candidate).mfu(1.0)
    assert search_text(whole).startswith("best of 1 simulated plan, after 1 estimate, in ")
    assert search_text(whole).endswith(
        f"no plan can be faster than {seconds_text(lower_bound)}, the model's matrix products at the peak"
    )
    assert lower_bound < whole.best.seconds
    assert "the time was up" not in search_text(whole)


def test_the_first_screen_has_the_plan_its_figures_three_others_and_the_commands(choice: PlanChoice) -> None:
    console = Console(record=True, width=80)
    commands = {"simulate": "shardlab simulate ...", "train": "shardlab train ..."}
    PlanReport(replace(choice, error_model=None), "small", "h100x4", commands, 3).report().print(console)
    text = console.export_text()
    assert len(text.splitlines()) <= 40
    for word in ("plan ", "step time", "free", "how sure", "runners-up", "simulate it", "train it", "searched"):
        assert word in text, word


def test_a_family_that_was_not_searched_has_no_figures() -> None:
    whole = choose_plan()
    names = {outcome.family for outcome, _ in whole.families}
    console = Console(record=True, width=160)
    for searched_families in (names, set[str]()):
        results = replace(whole.results, searched=searched_families)
        print_families(replace(whole, results=results), console)
        unsearched = names - searched_families - {whole.best.family}
        assert console.export_text().count("not searched") == len(unsearched)


def test_a_small_model_is_not_said_to_have_no_parameters() -> None:
    first = explain_choice(choose_plan())["1. Does it fit?"][0]
    assert first.startswith(f"{problem().model.parameter_count:,} parameters in bf16")


def test_what_would_help_says_what_stays_as_it_is() -> None:
    """Twice the memory is planned anew; with the others the plan stays."""
    console = Console(record=True, width=80)
    for helps in ({"links": 0.023, "batch": 0.001, "memory": 0.082}, {"batch": 0.1, "memory": 0.001}, {}):
        PlanReport(replace(choose_plan(), helps=helps), "small", "h100x4", {}, 1).report(explain=True).print(console)
    output = " ".join(console.export_text().split())
    links = "twice the bandwidth between nodes +2.3% and twice the batch +0.1% tokens/s with this very plan"
    assert f"{links}; twice the memory, planned anew, +8.2%" in output
    assert (
        "twice the batch +10.0% tokens/s with this very plan; twice the memory, planned anew, less than +2%" in output
    )
    assert "would help twice the memory, planned anew, was not searched to the end" in output


# Contenders: what may be faster than the plan that is predicted fastest, as far as time and memory allow.


@pytest.fixture(scope="module")
def choice() -> PlanChoice:
    search_problem = problem(limits=Limits({"recompute": "none", "cp": 1}, {}, 1))
    with workers(search_problem, 1) as processes:
        return choose(search_problem, processes, measured=())


def test_the_plan_that_is_predicted_fastest_comes_first_and_none_is_far_slower(choice: PlanChoice) -> None:
    contenders = find_contenders(choice, inf)
    assert contenders[0] == choice.best
    assert len(contenders) > 1
    assert all(outcome.seconds <= choice.best.seconds * (1 + expected_error(choice.problem)) for outcome in contenders)
    assert len({outcome.candidate for outcome in contenders}) == len(contenders)


def test_no_more_take_turns_than_there_is_time_for(choice: PlanChoice) -> None:
    contenders = find_contenders(choice, inf)
    two = STEPS * sum(outcome.seconds for outcome in contenders[:2])
    assert find_contenders(choice, 1.001 * two) == contenders[:2]
    assert find_contenders(choice, 0.999 * two) == contenders[:1]
    assert find_contenders(choice, -1.0) == contenders[:1]


def test_those_that_take_turns_lie_in_memory_at_once(choice: PlanChoice) -> None:
    contenders = find_contenders(choice, inf)
    capacity = sum(outcome.forecast.memory.total for outcome in contenders[:2]) / (1 - MOST_MARGIN)
    device = replace(choice.problem.cluster.device, memory=1.001 * capacity)
    tight = replace(choice.problem, cluster=replace(choice.problem.cluster, device=device))
    assert find_contenders(replace(choice, problem=tight), inf) == contenders[:2]

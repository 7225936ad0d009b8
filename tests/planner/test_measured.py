"""Measured steps: they stand for themselves, whatever is predicted, or are refused."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import pytest

from shardlab.errors import UserError
from shardlab.hardware import find_cluster
from shardlab.models import GPT
from shardlab.planner.chosen import PlanChoice, choose
from shardlab.planner.measured import MeasuredStep
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.workers import Answer, Asked, workers
from shardlab.program import Mesh
from shardlab.program.precision import PRECISIONS
from shardlab.strategies.plan import Plan
from tests.planner.beliefs import DDP, PP

SMALL = GPT(layers=4, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)
PROBLEM = Problem(
    SMALL, find_cluster("h100x2"), 4, (PRECISIONS["bf16"],), limits=Limits(fixed={"recompute": "none", "cp": 1})
)


def chosen(problem: Problem, measured: Sequence[MeasuredStep] | None) -> PlanChoice:
    with workers(problem, 1) as ask:
        return choose(problem, ask, measured=measured)


def test_a_plan_that_was_measured_slow_loses_and_the_next_one_is_chosen() -> None:
    before = chosen(PROBLEM, None).best
    step = MeasuredStep(before.candidate, 2 * before.seconds, "here")
    other = MeasuredStep(Candidate(PP, 4, PRECISIONS["bf16"]), before.seconds, "there")
    after = chosen(PROBLEM, [step, other])
    assert after.best.candidate == other.candidate
    assert after.best.seconds == before.seconds
    assert after.found.fitting[0] == after.best
    assert next(each.seconds for each in after.found.fitting if each.candidate == before.candidate) == step.seconds


def test_a_plan_that_ran_out_of_memory_does_not_fit_whatever_was_predicted() -> None:
    before = chosen(PROBLEM, None)
    first, second = before.found.fitting[:2]
    after = chosen(PROBLEM, [MeasuredStep(first.candidate, None, "here")])
    assert after.best.candidate == second.candidate
    (out,) = [each for each in after.found.outcomes if each.candidate == first.candidate]
    assert out.ran_out
    assert not out.fits
    assert first.candidate not in {each.candidate for each in after.beliefs.plans} if after.beliefs else True


def test_of_several_measurements_the_median_counts() -> None:
    best = chosen(PROBLEM, None).best.candidate
    made = chosen(PROBLEM, [MeasuredStep(best, seconds, "here") for seconds in (9.0, 1e-3, 2e-3)])
    assert 2e-3 in [each.seconds for each in made.found.fitting]


@pytest.mark.parametrize("times", [1000, 1 / 11, 1e9, 11])
def test_a_time_that_is_written_in_another_unit_is_refused(times: float) -> None:
    best = chosen(PROBLEM, None).best
    step = MeasuredStep(best.candidate, times * best.seconds, "results.json, experiment 1", by_hand=True)
    with pytest.raises(UserError) as refused:
        chosen(PROBLEM, [step])
    told = str(refused.value)
    assert told.startswith(f"results.json, experiment 1: {best.family}, ")
    assert f"is said to take {step.seconds:g} s, and {best.seconds:.3g} s are predicted" in told
    assert "more than 10 times off; is it in seconds?" in told
    assert chosen(PROBLEM, [replace(step, seconds=9 * best.seconds)]).best.seconds == pytest.approx(9 * best.seconds)


def test_a_run_of_whatever_length_is_taken_at_its_word() -> None:
    best = chosen(PROBLEM, None).best
    first, second = (MeasuredStep(Candidate(plan, 1, PRECISIONS["bf16"]), 1e9, "runs/x") for plan in (DDP, PP))
    assert chosen(PROBLEM, [first, second]).best.seconds > best.seconds
    assert chosen(PROBLEM, [first, replace(second, seconds=1e-9)]).best.seconds == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("candidate", "told"),
    [
        (Candidate(Plan(Mesh(tp=4)), 1, PRECISIONS["bf16"]), "on 4 ranks, and the plan is for 2"),
        (Candidate(DDP, 4, PRECISIONS["bf16"]), "cannot share 4 sequences"),
        (Candidate(Plan(Mesh(tp=2), recompute="full"), 1, PRECISIONS["bf16"]), "the limits --recompute none --cp 1"),
        (Candidate(DDP, 1, PRECISIONS["fp32"]), "measured in fp32; add it to --precision"),
        (Candidate(Plan(Mesh(pp=2), layers_per_stage=(1, 1)), 1, PRECISIONS["bf16"]), "this plan is none that"),
    ],
)
def test_what_is_no_plan_of_the_problem_is_refused(candidate: Candidate, told: str) -> None:
    with pytest.raises(UserError, match=r"^runs/x") as refused:
        chosen(PROBLEM, [MeasuredStep(candidate, 1.0, "runs/x")])
    assert told in str(refused.value)


def test_what_is_to_be_measured_is_told_in_the_time_that_there_is() -> None:
    """When it is up, it is not known what plans' time goes to; that is said, and plans are told all the same."""
    asked: list[Asked] = []
    with workers(PROBLEM, 1) as ask:

        def noting(question: Asked) -> Future[Answer | None]:
            asked.append(question)
            return ask(question)

        choice = choose(PROBLEM, noting, seconds=1e-9, measured=())
    assert asked
    assert not any(question.shares for question in asked)
    assert choice.beliefs is not None
    assert choice.beliefs.plans
    assert "what a plan's time goes to" in choice.missed

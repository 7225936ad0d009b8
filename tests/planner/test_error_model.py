"""Measured steps correct the predicted step times of other plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.language.precision import PRECISIONS
from shardlab.models import GPT
from shardlab.planner.choose import PlanChoice, choose
from shardlab.planner.error_model import (
    ErrorModel,
    MeasuredStep,
    choose_experiments,
)
from shardlab.planner.problem import Candidate, Limits, Problem
from shardlab.planner.search import Budget
from shardlab.planner.workers import Workers, workers
from shardlab.simulate.hardware import find_cluster
from shardlab.strategies.plan.plan import Plan
from tests.planner.error_models import DDP, GPIPE, PP, TP, ZERO_1, D, Row, error_model_of
from tests.support.thorough import sampled


def test_nothing_measured_leaves_predictions_as_they_are() -> None:
    model = error_model_of([D, (TP, 1.2, {"all-reduce on tp": 0.2})])
    assert model.seconds == [1.0, 1.2]
    assert model.expected_errors[0] == pytest.approx(0.05)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 2.15, 5.0])
@pytest.mark.parametrize("ran", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_what_all_measured_plans_share_leaves_the_ranking_as_it_was(factor: float, ran: list[int]) -> None:
    plans: list[Row] = [
        (DDP, 1.0, {}),
        (ZERO_1, 1.001, {"all-gather on dp_shard": 0.02}),
        (TP, 1.01, {"all-reduce on tp": 0.3}),
        (PP, 1.02, {"idle": 0.4}),
        (GPIPE, 1.0201, {"idle": 0.4}),
    ]
    model = error_model_of(plans, {at: factor * plans[at][1] for at in ran})
    assert model.seconds == pytest.approx([factor * seconds for _, seconds, _ in plans])
    assert [*model.factors.values()] == pytest.approx([factor] * len(model.factors))
    assert max(model.expected_errors) < 0.06


def test_what_measured_plans_do_not_share_is_shrunk_around_what_they_do() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.0, {"all-reduce on tp": 0.3}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    model = error_model_of(plans, {0: 2.0, 1: 2.2})
    assert 2.0 < model.seconds[2] < 2.2
    assert 2.0 < model.factors["compute"] < model.factors["communication on tp"] < 2.3


def test_one_measured_step_corrects_all_by_the_same_factor_and_stands_for_itself() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.2, {"all-reduce on tp": 0.2}), (PP, 1.1, {"idle": 0.3})]
    model = error_model_of(plans, {0: 1.1})
    assert model.seconds[0] == 1.1
    for seconds, (_, predicted, _) in zip(model.seconds[1:], plans[1:], strict=True):
        assert seconds / predicted == pytest.approx(1.1)
    assert model.expected_errors[0] < model.expected_errors[1] < 0.05


def test_several_measured_steps_tell_which_part_was_predicted_wrongly() -> None:
    """Communication on tp takes twice as long as predicted, and nothing else does."""
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.0, {"all-reduce on tp": 0.3}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    model = error_model_of([*plans, (TP, 1.2, {"all-gather on tp": 0.5})], {0: 1.0, 1: 1.3, 2: 1.0, 3: 1.0})
    assert model.factors["communication on tp"] > model.factors["compute"]
    assert model.seconds[-1] > 1.3


def test_what_is_like_a_measured_plan_is_surer_than_what_is_not() -> None:
    rest: list[Row] = [(ZERO_1, 1.0, {"all-gather on dp_shard": 0.01}), (PP, 1.0, {"idle": 0.4})]
    model = error_model_of([D, *rest], {0: 1.0})
    assert model.expected_errors[0] < model.expected_errors[1] < model.expected_errors[2]


def test_steps_that_contradict_each_other_make_all_less_sure() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    agreeing, apart = error_model_of(plans, {0: 1.2, 1: 1.2}), error_model_of(plans, {0: 1.2, 1: 1.6})
    assert apart.expected_errors[2] > 2 * agreeing.expected_errors[2]


# Experiments: plans whose measured steps could change the choice, and that tell of different things.


NEAR: list[Row] = [
    (DDP, 1.0, {}),
    (ZERO_1, 1.001, {}),
    (TP, 1.01, {"all-reduce on tp": 0.2}),
    (PP, 1.02, {"idle": 0.3}),
]


def plans(model: ErrorModel, count: int) -> list[object]:
    return [experiment.outcome.candidate.plan for experiment in choose_experiments(model, count)]


def test_the_fastest_is_first_and_the_others_differ_in_what_is_unsure() -> None:
    experiments = choose_experiments(error_model_of(NEAR), 3)
    assert [experiment.outcome.candidate.plan for experiment in experiments] == [DDP, TP, PP]
    assert "compared" in experiments[0].reason
    assert "expected 1.0% slower" in experiments[1].reason
    assert "all-reduce on tp (20.0% of its step instead of 0.0%)" in experiments[1].reason


def test_no_more_are_named_than_were_asked_for() -> None:
    assert plans(error_model_of(NEAR), 2) == [DDP, TP]


def test_plans_beyond_the_error_are_not_worth_a_run() -> None:
    assert plans(error_model_of([NEAR[0], (TP, 1.3, {"all-reduce on tp": 0.2})]), 3) == [DDP]


def test_what_was_measured_is_not_run_again() -> None:
    assert DDP not in plans(error_model_of(NEAR, {0: 1.0}), 4)
    assert plans(error_model_of([NEAR[0]], {0: 1.0}), 3) == []


def test_plans_that_do_the_same_are_run_once() -> None:
    assert len(plans(error_model_of([NEAR[0], (PP, 1.02, {"idle": 0.3}), (GPIPE, 1.02, {"idle": 0.3})]), 3)) == 2


# Measured steps: they stand for themselves, whatever is predicted, or are refused.


SMALL = GPT(layers=4, heads=8, hidden_size=512, vocab_size=1024, seq_len=512)
PROBLEM = Problem(
    SMALL, find_cluster("h100x2"), 4, (PRECISIONS["bf16"],), limits=Limits(fixed={"recompute": "none", "cp": 1})
)


def choose_plan(problem: Problem, measured: Sequence[MeasuredStep] | None) -> PlanChoice:
    with workers(problem, 1) as processes:
        return choose(problem, processes, measured=measured)


@cache
def unmeasured() -> PlanChoice:
    """Return the choice without any measured step."""
    return choose_plan(PROBLEM, None)


def test_a_plan_that_was_measured_slow_loses_and_the_next_one_is_chosen() -> None:
    predicted_best = unmeasured().best
    step = MeasuredStep(predicted_best.candidate, 2 * predicted_best.seconds, "here")
    other = MeasuredStep(Candidate(PP, 4, PRECISIONS["bf16"]), predicted_best.seconds, "there")
    choice = choose_plan(PROBLEM, [step, other])
    assert choice.best.candidate == other.candidate
    assert choice.best.seconds == predicted_best.seconds
    assert choice.results.fitting[0] == choice.best
    assert (
        next(outcome.seconds for outcome in choice.results.fitting if outcome.candidate == predicted_best.candidate)
        == step.seconds
    )


def test_a_plan_that_ran_out_of_memory_does_not_fit_whatever_was_predicted() -> None:
    predicted = choose_plan(PROBLEM, None)
    first, second = predicted.results.fitting[:2]
    choice = choose_plan(PROBLEM, [MeasuredStep(first.candidate, None, "here")])
    assert choice.best.candidate != first.candidate
    assert choice.best.seconds <= second.seconds
    (failed,) = [outcome for outcome in choice.results.outcomes if outcome.candidate == first.candidate]
    assert failed.ran_out
    assert not failed.fits
    assert first.candidate not in {plan.candidate for plan in choice.error_model.plans} if choice.error_model else True


def test_of_several_measurements_the_median_counts() -> None:
    best = unmeasured().best.candidate
    choice = choose_plan(PROBLEM, [MeasuredStep(best, seconds, "here") for seconds in (9.0, 1e-3, 2e-3)])
    assert 2e-3 in [outcome.seconds for outcome in choice.results.fitting]


@pytest.mark.parametrize("times", sampled([1000, 1 / 11, 1e9, 11], [1 / 11, 11].__contains__))
def test_a_time_that_is_written_in_another_unit_is_refused(times: float) -> None:
    best = unmeasured().best
    step = MeasuredStep(best.candidate, times * best.seconds, "results.json, experiment 1", by_hand=True)
    with pytest.raises(UserError) as refused:
        choose_plan(PROBLEM, [step])
    output = str(refused.value)
    assert output.startswith(f"results.json, experiment 1: {best.family}, ")
    assert f"is said to take {step.seconds:g} s, and {best.seconds:.3g} s are predicted" in output
    assert "more than 10 times off; is it in seconds?" in output
    assert choose_plan(PROBLEM, [replace(step, seconds=9 * best.seconds)]).best.seconds == pytest.approx(
        9 * best.seconds
    )


def test_a_run_of_whatever_length_is_taken_at_its_word() -> None:
    best = unmeasured().best
    first, second = (MeasuredStep(Candidate(plan, 1, PRECISIONS["bf16"]), 1e9, "runs/x") for plan in (DDP, PP))
    assert choose_plan(PROBLEM, [first, second]).best.seconds > best.seconds
    assert choose_plan(PROBLEM, [first, replace(second, seconds=1e-9)]).best.seconds == pytest.approx(1e-9)


@pytest.mark.parametrize(
    ("candidate", "output"),
    [
        (Candidate(Plan(Mesh(tp=4)), 1, PRECISIONS["bf16"]), "on 4 ranks, and the plan is for 2"),
        (Candidate(DDP, 4, PRECISIONS["bf16"]), "cannot share 4 sequences"),
        (Candidate(Plan(Mesh(tp=2), recompute="full"), 1, PRECISIONS["bf16"]), "the limits --recompute none --cp 1"),
        (Candidate(DDP, 1, PRECISIONS["fp32"]), "measured in fp32; add it to --precision"),
        (Candidate(Plan(Mesh(pp=2), layers_per_stage=(1, 1)), 1, PRECISIONS["bf16"]), "cannot run this plan on"),
    ],
)
def test_what_is_no_plan_of_the_problem_is_refused(candidate: Candidate, output: str) -> None:
    with pytest.raises(UserError, match=r"^runs/x") as refused:
        choose_plan(PROBLEM, [MeasuredStep(candidate, 1.0, "runs/x")])
    assert output in str(refused.value)


def test_what_is_to_be_measured_is_named_in_the_time_that_there_is() -> None:
    """When it is up, it is not known what plans' time goes to; that is said, and plans are told all the same."""
    choice = choose(PROBLEM, Workers(PROBLEM), budget=Budget(seconds=1e-9), measured=())
    assert choice.answer.shares is None
    assert choice.error_model is not None
    assert choice.error_model.plans
    assert "what a plan's time goes to" in choice.missed

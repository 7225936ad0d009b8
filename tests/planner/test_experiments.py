"""Experiments: plans whose measured steps could change the choice, and that tell of different things."""

from __future__ import annotations

from shardlab.planner.beliefs import Beliefs
from shardlab.planner.experiments import experiments
from tests.planner.beliefs import DDP, GPIPE, PP, TP, ZERO_1, Row, beliefs

NEAR: list[Row] = [
    (DDP, 1.0, {}),
    (ZERO_1, 1.001, {}),
    (TP, 1.01, {"all-reduce on tp": 0.2}),
    (PP, 1.02, {"bubble": 0.3}),
]


def plans(found: Beliefs, count: int) -> list[object]:
    return [each.outcome.candidate.plan for each in experiments(found, count)]


def test_the_fastest_is_first_and_the_others_differ_in_what_is_unsure() -> None:
    chosen = experiments(beliefs(NEAR), 3)
    assert [each.outcome.candidate.plan for each in chosen] == [DDP, TP, PP]
    assert "compared" in chosen[0].why
    assert "expected 1.0% slower" in chosen[1].why
    assert "all-reduce on tp (20.0% of its step instead of 0.0%)" in chosen[1].why


def test_no_more_are_named_than_were_asked_for() -> None:
    assert plans(beliefs(NEAR), 2) == [DDP, TP]


def test_plans_beyond_the_error_are_not_worth_a_run() -> None:
    assert plans(beliefs([NEAR[0], (TP, 1.3, {"all-reduce on tp": 0.2})]), 3) == [DDP]


def test_what_was_measured_is_not_run_again() -> None:
    assert DDP not in plans(beliefs(NEAR, {0: 1.0}), 4)
    assert plans(beliefs([NEAR[0]], {0: 1.0}), 3) == []


def test_plans_that_do_the_same_are_run_once() -> None:
    assert len(plans(beliefs([NEAR[0], (PP, 1.02, {"bubble": 0.3}), (GPIPE, 1.02, {"bubble": 0.3})]), 3)) == 2

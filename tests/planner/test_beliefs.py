"""Beliefs: measured steps correct what is predicted of other plans."""

from __future__ import annotations

import pytest

from tests.planner.beliefs import DDP, GPIPE, PP, TP, ZERO_1, D, Row, beliefs


def test_nothing_measured_leaves_predictions_as_they_are() -> None:
    found = beliefs([D, (TP, 1.2, {"all-reduce on tp": 0.2})])
    assert found.seconds == [1.0, 1.2]
    assert found.sure[0] == pytest.approx(0.05)


@pytest.mark.parametrize("factor", [0.5, 0.9, 1.0, 1.1, 2.15, 5.0])
@pytest.mark.parametrize("ran", [[0], [1], [2], [0, 1], [1, 2], [0, 1, 2]])
def test_what_all_measured_plans_share_leaves_the_ranking_as_it_was(factor: float, ran: list[int]) -> None:
    plans: list[Row] = [
        (DDP, 1.0, {}),
        (ZERO_1, 1.001, {"all-gather on dp_shard": 0.02}),
        (TP, 1.01, {"all-reduce on tp": 0.3}),
        (PP, 1.02, {"bubble": 0.4}),
        (GPIPE, 1.0201, {"bubble": 0.4}),
    ]
    found = beliefs(plans, {at: factor * plans[at][1] for at in ran})
    assert found.seconds == pytest.approx([factor * seconds for _, seconds, _ in plans])
    assert [*found.factors.values()] == pytest.approx([factor] * len(found.factors))
    assert max(found.sure) < 0.06


def test_what_measured_plans_do_not_share_is_shrunk_around_what_they_do() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.0, {"all-reduce on tp": 0.3}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    found = beliefs(plans, {0: 2.0, 1: 2.2})
    assert 2.0 < found.seconds[2] < 2.2
    assert 2.0 < found.factors["compute"] < found.factors["communication on tp"] < 2.3


def test_one_measured_step_corrects_all_by_the_same_factor_and_stands_for_itself() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.2, {"all-reduce on tp": 0.2}), (PP, 1.1, {"bubble": 0.3})]
    found = beliefs(plans, {0: 1.1})
    assert found.seconds[0] == 1.1
    for seconds, (_, predicted, _) in zip(found.seconds[1:], plans[1:], strict=True):
        assert seconds / predicted == pytest.approx(1.1)
    assert found.sure[0] < found.sure[1] < 0.05


def test_several_measured_steps_tell_which_part_was_predicted_wrongly() -> None:
    """Communication on tp takes twice as long as predicted, and nothing else does."""
    plans: list[Row] = [(DDP, 1.0, {}), (TP, 1.0, {"all-reduce on tp": 0.3}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    found = beliefs([*plans, (TP, 1.2, {"all-gather on tp": 0.5})], {0: 1.0, 1: 1.3, 2: 1.0, 3: 1.0})
    assert found.factors["communication on tp"] > found.factors["compute"]
    assert found.seconds[-1] > 1.3


def test_what_is_like_a_measured_plan_is_surer_than_what_is_not() -> None:
    rest: list[Row] = [(ZERO_1, 1.0, {"all-gather on dp_shard": 0.01}), (PP, 1.0, {"bubble": 0.4})]
    found = beliefs([D, *rest], {0: 1.0})
    assert found.sure[0] < found.sure[1] < found.sure[2]


def test_steps_that_contradict_each_other_make_all_less_sure() -> None:
    plans: list[Row] = [(DDP, 1.0, {}), (PP, 1.0, {}), (GPIPE, 1.0, {})]
    agreeing, apart = beliefs(plans, {0: 1.2, 1: 1.2}), beliefs(plans, {0: 1.2, 1: 1.6})
    assert apart.sure[2] > 2 * agreeing.sure[2]

"""Choices graded: cells of a few configurations, whose regret can be told by eye."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlab.language import UserError
from shardlab.planner.published.grade import GradedCell, Grades, TriedPlan, group_cells, predict_plan
from shardlab.simulate.predict.recipe import find_recipe
from tests.planner.nanotron_rows import row


def tried_plan(
    measured: float | None, predicted: float | None = 1.0, *, fits: bool = True, safe: bool = True
) -> TriedPlan:
    name = f"measured {measured}, predicted {predicted}"
    return TriedPlan(name, "model", 8, 1, measured, None, predicted, None, fits, safe)


def cell(*candidates: TriedPlan) -> GradedCell:
    return GradedCell("model", 8, 1, candidates)


def test_nothing_is_lost_where_the_best_is_chosen() -> None:
    some = cell(tried_plan(100.0, 9.0), tried_plan(80.0, 8.0), tried_plan(50.0, 5.0))
    assert (some.regret, some.regret_of_first, some.rank_correlation) == (0.0, 0.0, 1.0)
    assert some.choice is some.best
    assert some.first_runs


def test_what_is_lost_is_the_share_of_the_best_speed() -> None:
    some = cell(tried_plan(60.0, 9.0), tried_plan(80.0, 8.0), tried_plan(70.0, 7.0), tried_plan(100.0, 5.0))
    assert some.regret == pytest.approx(0.4)
    assert some.regret_of_first == pytest.approx(0.2)  # of the first three
    assert some.rank_correlation == pytest.approx(-0.8)


def test_a_crashed_run_is_chosen_first_and_has_no_speed() -> None:
    some = cell(tried_plan(None, 9.0), tried_plan(90.0, 8.0), tried_plan(100.0, 5.0))
    assert not some.first_runs
    assert some.regret == pytest.approx(0.1)
    assert some.choice is some.candidates[1]


def test_what_leaves_too_little_memory_free_is_not_chosen_while_something_else_is_there() -> None:
    tight, roomy = tried_plan(100.0, 9.0, safe=False), tried_plan(80.0, 5.0)
    assert cell(tight, roomy).choice is roomy
    assert cell(tight, tried_plan(90.0, 10.0, fits=False, safe=False)).choice is tight
    assert cell(tried_plan(90.0, 1.0, fits=False, safe=False)).choice is not None


def test_what_breaks_a_limit_is_never_chosen() -> None:
    illegal = replace(tried_plan(100.0, None), reason="too few microbatches")
    some = cell(illegal, tried_plan(80.0))
    assert not illegal.legal
    assert some.choice is some.candidates[1]
    assert some.best is illegal


def test_equal_predictions_share_a_rank_and_one_run_has_no_correlation() -> None:
    assert cell(tried_plan(1.0, 2.0), tried_plan(2.0, 2.0)).rank_correlation is None
    assert cell(tried_plan(1.0), tried_plan(None)).rank_correlation is None
    assert cell(tried_plan(1.0, 2.0), tried_plan(2.0, 2.0), tried_plan(3.0, 5.0)).rank_correlation == pytest.approx(
        0.866, abs=1e-3
    )


def test_a_cell_is_a_model_on_some_devices_in_which_something_ran() -> None:
    one, other = tried_plan(1.0), replace(tried_plan(1.0), devices=16)
    crashed = replace(tried_plan(None), model="another")
    assert [
        (group.model, group.devices, len(group.candidates)) for group in group_cells([one, other, one, crashed])
    ] == [
        ("model", 8, 2),
        ("model", 16, 1),
    ]


def test_errors_are_those_of_good_configurations() -> None:
    fast, near, slow = tried_plan(100.0, 110.0), tried_plan(50.0, 40.0), tried_plan(40.0, 400.0, fits=False)
    grades = Grades.of([cell(replace(fast, bytes=9.0, measured_bytes=10.0), near, slow)])
    assert grades.time == pytest.approx((1 / 11 + 1 / 4) / 2)
    assert grades.time_bias == pytest.approx((-1 / 11 + 1 / 4) / 2)
    assert (grades.memory, grades.memory_bias) == pytest.approx((0.1, -0.1))
    assert grades.refused == pytest.approx(1 / 3)
    assert (grades.cells, grades.first_runs) == (1, 1)


def test_a_row_is_predicted_by_the_recipe_that_is_given() -> None:
    shardlab, nanotron = (predict_plan(row(tp=2, dp=4), find_recipe(name)) for name in ("shardlab", "nanotron"))
    assert shardlab.legal
    assert nanotron.legal
    assert shardlab.predicted
    assert nanotron.predicted
    assert shardlab.predicted > nanotron.predicted
    assert (nanotron.nodes, nanotron.devices, nanotron.measured) == (1, 8, 1000.0)


def test_a_row_that_breaks_a_limit_says_which() -> None:
    result = predict_plan(row(pp=8, micro_batch=64))
    assert not result.legal
    assert result.breaks_limit
    assert result.predicted is None
    assert result.reason == (
        "nanotron's 1f1b needs at least pp - 1 microbatches; with pp 8 give at least 7 to each data-parallel rank, "
        "not 4"
    )
    assert "leaves nothing for the last of 16" in predict_plan(row(pp=16, dp=1, micro_batch=1)).reason


def test_a_row_whose_numbers_do_not_go_together_says_so() -> None:
    result = predict_plan(row(pp=2) | {"batch": {"global_sequences": 5, "micro_batch": 2}})
    assert not result.legal
    assert not result.breaks_limit
    assert result.reason


def test_what_a_row_leaves_open_is_assumed_aloud() -> None:
    silent = row(tp=2, dp=16)
    silent["hardware"]["interconnect"] = "a fast network"
    result = predict_plan(silent)
    assert result.legal
    assert "network: 8 x efa-100 a node" not in result.assumed
    assert "network: 8 x infiniband-ndr a node, since a fast network is unknown" in result.assumed
    assert "network: 32 x efa-100 a node" in predict_plan(row(tp=2, dp=16)).assumed


def test_a_row_that_breaks_a_limit_says_what_it_leaves_open_all_the_same() -> None:
    assert predict_plan(row(pp=8, micro_batch=64)).assumed


@pytest.mark.parametrize(
    ("section", "fields", "output"),
    [
        ("hardware", {"device": "h1000"}, "there is no device 'h1000'; did you mean h100?"),
        ("hardware", {"gpu": "H1000"}, "ran on an unknown GPU, H1000; did you mean h100?"),
        ("hardware", {"network": "carrier-pigeon"}, "there is no link 'carrier-pigeon'"),
        ("parallelism", {"schedule": "1f2b"}, "a schedule that is unknown here, 1f2b; did you mean 1f1b?"),
        ("", {"framework": "nanotronn"}, "there is no recipe 'nanotronn'; did you mean nanotron?"),
        ("", {"precision": "int4"}, "computes in int4, which is unknown here"),
        ("", {"recompute": "selectiv"}, "recomputes selectiv, which is unknown here; did you mean selective"),
        ("model", {"ffn_type": "tanh"}, "activation function that is unknown here, tanh"),
        ("measured", {"tokens_per_s_per_gpu": -5}, "gives -5 as measured tokens_per_s_per_gpu; give a number above 0"),
        ("measured", {"tokens_per_s_per_gpu": "fast"}, "gives 'fast' as measured tokens_per_s_per_gpu; give a number"),
        ("measured", {"iteration_s": float("nan")}, "gives nan as measured iteration_s; give a number above 0"),
    ],
)
def test_a_name_or_a_speed_that_is_none_is_refused(section: str, fields: dict[str, Any], output: str) -> None:
    wrong = row(pp=2, dp=8)
    (wrong[section] if section else wrong).update(fields)
    with pytest.raises(UserError, match=r"^run playbook-small ") as refused:
        predict_plan(wrong)
    assert output in str(refused.value)


def test_a_run_out_of_memory_is_one_that_has_no_speed() -> None:
    out = predict_plan(row() | {"measured": {"tokens_per_s_per_gpu": "OOM"}})
    assert out.legal
    assert out.measured is None


def test_a_row_that_says_too_little_is_named() -> None:
    with pytest.raises(UserError, match=r"run playbook-small does not say layers; every run that is graded needs it"):
        predict_plan(row() | {"model": {"hidden": 2048, "heads": 32, "seq_len": 4096}})

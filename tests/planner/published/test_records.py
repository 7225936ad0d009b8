"""Fields of a run as numbers, and the ways in which a run may say that it ran out of memory."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardlab.planner.published.predict import predict_outcome
from shardlab.planner.published.records import (
    HardwareRecord,
    Incomplete,
    ParallelismRecord,
    number,
    parse,
    ran_out_of_memory,
)
from tests.planner.published.test_reading import ROWS
from tests.support.thorough import examples


@pytest.mark.parametrize(
    "row",
    [
        {"measured": {"out_of_memory": True}},
        {"measured": {"oom": 1}},
        {"measured": {"oom": "yes"}},
        {"measured": {"iteration_s": "OOM"}},
        {"measured": {"tokens_per_s": "oom"}},
        {"measured": {"peak_memory_GiB": "CUDA out of memory"}},
        {"measured": {"status": "out-of-memory"}},
        {"measured": {"ran_out_of_memory": True}},
        {"measured": "OOM"},
        {"status": "OOM", "measured": {}},
        {"oom": True},
    ],
)
def test_a_run_out_of_memory_is_known_however_it_says_so(row: dict[str, Any]) -> None:
    assert ran_out_of_memory(row)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"measured": None},
        {"measured": {"out_of_memory": False, "oom": None, "iteration_s": 3.0}},
        {"measured": {"oom": "false"}},
        {"status": "no OOM", "measured": {"note": "too close to OOM"}},
        {"status": "room"},
    ],
)
def test_a_run_that_ran_is_not_taken_for_one_that_did_not(row: dict[str, Any]) -> None:
    assert not ran_out_of_memory(row)


@given(st.integers(1, 4096))
def test_a_whole_number_may_be_written_in_three_ways(value: int) -> None:
    for form in (value, float(value), str(value)):
        assert parse(HardwareRecord, {"gpu": "H100", "gpus": form}).gpus == value


@pytest.mark.parametrize("value", [0, -8, 8.5, "many", [8], True, float("nan"), float("inf"), 10**9])
def test_what_is_no_number_of_gpus_is_said(value: Any) -> None:
    with pytest.raises(Incomplete, match=r"says that gpus is .*; give a whole number from 1 to 32,768"):
        parse(HardwareRecord, {"gpu": "H100", "gpus": value})


@pytest.mark.parametrize("value", [-1, 4, 1.5, "two", True])
def test_what_is_no_zero_stage_is_said(value: Any) -> None:
    with pytest.raises(Incomplete, match=r"says that zero_stage is .*; give a whole number from 0 to 3"):
        parse(ParallelismRecord, {"tp": 1, "pp": 1, "zero_stage": value})
    assert parse(ParallelismRecord, {"tp": 1, "pp": 1, "zero_stage": "0"}).zero_stage == 0


def test_a_field_that_is_absent_or_null_is_not_made_up() -> None:
    record = parse(HardwareRecord, {"gpu": "H100", "gpus": 8.0, "gpus_per_node": None, "colour": "red"})
    assert (record.gpus, record.gpus_per_node, record.network) == (8, None, None)
    with pytest.raises(Incomplete, match="does not say gpus"):
        parse(HardwareRecord, {})


@given(st.one_of(st.none(), st.booleans(), st.floats(), st.text(), st.lists(st.integers())))
def test_a_measured_number_is_positive_or_none(value: Any) -> None:
    parsed = number(value)
    assert parsed is None or 0 < parsed < float("inf")


# Rows as they should not be: each has a prediction or a reason in one sentence, and none ends the command.


SMALL = ("korthikanti-t5-22B-full", "titan-t1-8B-8gpu-eager", "zero-7.5B-Nd64-stage2")
"""Runs that are quickly predicted."""

SECTIONS = ("model", "hardware", "parallelism", "batch", "measured")
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.floats(),
    st.sampled_from(["8", "8.0", "OOM", "none", "", "A100", "1f1b", "zb-v", "interleaved", "swiglu", "fp8", "full"]),
    st.just([1]),
    st.just({"a": 1}),
)
PLACES = sorted(
    {(name, key) for run in SMALL for name in SECTIONS for key in ROWS[run].get(name, {})}
    | {("", key) for key in ("source", "framework", "precision", "recompute", "status", *SECTIONS)}
)


@given(
    st.sampled_from(SMALL),
    st.lists(st.tuples(st.sampled_from(PLACES), ODD, st.booleans()), min_size=1, max_size=4),
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_an_odd_row_has_a_prediction_or_a_reason(name: str, changes: list[tuple[tuple[str, str], Any, bool]]) -> None:
    row = deepcopy(ROWS[name])
    for (part, key), value, absent in changes:
        place: Any = row.get(part) if part else row
        if not isinstance(place, dict):
            continue
        place = cast(dict[str, Any], place)
        if absent:
            place.pop(key, None)
        else:
            place[key] = value
    outcome = predict_outcome(row)
    assert (outcome.prediction is None) == bool(outcome.reason)
    assert "\n" not in outcome.reason

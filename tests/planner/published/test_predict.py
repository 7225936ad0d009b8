"""Predictions of published runs: within generous bands."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.planner.published.predict import (
    ErrorSummary,
    Outcome,
    Prediction,
    by_source,
    misjudged,
    model_state_bytes,
    outcome_of,
    predict,
    worst_of,
)
from shardlab.planner.published.reading import read_run
from shardlab.planner.published.records import Measurement
from tests.planner.published.test_reading import ROWS

STATE = "zero-7.5B-Nd64-stage2"
SILENT = "llama3-405B-t4-8192gpu-s8192"


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (STATE, SILENT)])
def test_a_published_run_is_predicted_within_a_fifth(name: str) -> None:
    outcome = outcome_of(ROWS[name])
    assert outcome.prediction is not None
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.2
    assert abs(outcome.error("bytes") or 0.0) < 0.2


def test_a_run_that_says_too_little_is_listed_with_its_reason() -> None:
    outcome = outcome_of(ROWS[SILENT])
    assert outcome.prediction is None
    assert "neither the seconds of a step nor memory" in outcome.reason


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_memory_of_zero_is_the_papers(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs."""
    assert model_state_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_many_microbatches_are_told_by_fewer() -> None:
    row = ROWS["zb-t12-6.2B-p8-m8-1f1b"]
    run = read_run(row | {"batch": row["batch"] | {"global_sequences": 192}})
    assert predict(run).seconds == pytest.approx(run.workload.estimate().step, rel=1e-3)


def test_a_device_too_small_does_not_fit() -> None:
    row = ROWS["mpt-h100_80gb-7b-s32768-8gpu-mbs2-ga2"]
    crowded = row | {"recompute": "none"}
    assert predict(read_run(row)).fits
    assert not predict(read_run(crowded)).fits


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "milliseconds"),
    [
        (False, "none", 19.6),
        (True, "none", 19.0),
        (False, "full", 27.2),
        (False, "selective", 20.9),
        (True, "selective", 20.3),
    ],
)
def test_a_block_takes_what_table_4_of_korthikanti_measured(
    sequence_parallel: bool, recompute: str, milliseconds: float
) -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, table 4: a block of the 22B model, forward and backward."""
    row: dict[str, Any] = deepcopy(ROWS["korthikanti-t5-22B-full"]) | {"recompute": recompute}
    row["parallelism"]["sequence_parallel"] = sequence_parallel
    row["measured"] = {"layer_forward_ms": milliseconds / 3, "layer_backward_ms": milliseconds * 2 / 3}
    outcome = outcome_of(row)
    assert outcome.measured.of_block
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.1


# The arithmetic of the report.


ERRORS = st.lists(st.floats(-1, 5), min_size=1)


def outcome(name: str, source: str, seconds: float, *, fits: bool = True, out: bool = False) -> Outcome:
    return Outcome(name, source, Measurement(1.0, None, "allocated", out), Prediction(seconds, 1.0, fits))


@given(ERRORS)
def test_errors_lie_in_order(each: list[float]) -> None:
    errors = ErrorSummary.of(each)
    assert errors.count == len(each)
    assert abs(errors.bias) <= errors.mean + 1e-12
    assert errors.mean <= errors.worst + 1e-12
    assert errors.median <= errors.worst
    assert errors.worst in map(abs, each)


def test_of_nothing_there_are_no_errors() -> None:
    assert by_source([], "seconds") == {}


def test_sources_are_grouped_and_signs_kept() -> None:
    runs = [outcome("a", "vTrain", 1.1), outcome("b", "vTrain", 0.7), outcome("c", "elsewhere", 1.0)]
    found = by_source(runs, "seconds")
    assert list(found) == ["vTrain", "elsewhere", "all"]
    assert found["all"].count == 3
    assert (round(found["vTrain"].mean, 9), round(found["vTrain"].bias, 9)) == (0.2, -0.1)
    assert [run.id for _, run in worst_of(runs, "seconds", 2)] == ["b", "a"]


def test_a_run_whose_room_was_misjudged_is_named() -> None:
    runs = [
        outcome("ran", "", 1.0),
        outcome("ended", "", 1.0, fits=False, out=True),
        outcome("thought too large", "", 1.0, fits=False),
        outcome("thought to fit", "", 1.0, out=True),
        Outcome("not asked", "", Measurement(1.0, None, "allocated"), None, "says nothing"),
    ]
    assert [run.id for run in misjudged(runs)] == ["thought too large", "thought to fit"]

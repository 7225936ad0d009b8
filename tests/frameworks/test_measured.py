"""What could explain a difference between a measured step and its prediction."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from shardlab.frameworks.changes import Trial, predict, try_changes
from shardlab.frameworks.find import read_config, read_run
from shardlab.frameworks.logs import Measured
from shardlab.frameworks.measured import Comparison, explain_difference
from shardlab.frameworks.run import FrameworkRun
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import Forecast

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


@cache
def inputs() -> tuple[FrameworkRun, Forecast, list[Trial]]:
    step = read_run(read_config(str(EXAMPLES / "train_70b.sh")), find_cluster("h100x64"))
    forecast = predict(step)
    return step, forecast, try_changes(step, forecast, seconds=1000)


def compare(measured: Measured) -> Comparison:
    return explain_difference(measured, *inputs(), error=0.05, memory_error=0.05)


def test_a_run_with_another_key_is_explained_by_that_key() -> None:
    _, _, trials = inputs()
    other = min(trials, key=lambda trial: trial.seconds)
    measured = Measured(other.forecast.seconds, memory=other.forecast.memory.unlimited)
    first = compare(measured).hypotheses[0]
    assert first.what.startswith("the run had")
    assert first.seconds == other.forecast.seconds


def test_weights_are_shares_and_in_order() -> None:
    _, forecast, _ = inputs()
    weights = [hypothesis.weight for hypothesis in compare(Measured(1.3 * forecast.seconds)).hypotheses]
    assert weights == sorted(weights, reverse=True)
    assert abs(sum(weights) - 1) < 1e-9


def test_tokens_of_one_device_given_as_those_of_all_are_seen() -> None:
    step, forecast, _ = inputs()
    speed = step.workload.tokens / forecast.seconds / 64
    assert "one device" in compare(Measured(tokens_per_second=speed)).hypotheses[0].what


def test_a_measurement_that_agrees_needs_no_explanation() -> None:
    _, forecast, _ = inputs()
    result = compare(Measured(forecast.seconds))
    assert result.time_difference == 0
    assert list(result.hypotheses) == []


def test_memory_is_compared_as_it_was_measured() -> None:
    _, forecast, _ = inputs()
    base = Measured(memory=forecast.memory.allocated, kind="allocated")
    assert compare(base).memory_difference == 0
    assert (compare(replace(base, kind="nvidia-smi")).memory_difference or 0) < 0


def test_another_global_batch_is_named_and_scaled() -> None:
    step, forecast, _ = inputs()
    result = compare(Measured(2 * forecast.seconds, sequences=2 * step.sequences))
    assert result.time_difference == 0
    assert "global batch" in result.notes[0]

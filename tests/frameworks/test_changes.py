"""The smallest changes that would help."""

from __future__ import annotations

from pathlib import Path

from shardlab.frameworks.changes import best_changes, predict, try_changes
from shardlab.frameworks.find import read_config, read_run
from shardlab.simulate.hardware import find_cluster

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"


def test_changes_of_a_step_that_does_not_fit_name_those_that_fit_first() -> None:
    step = read_run(read_config(str(EXAMPLES / "llama3_8b.toml")), find_cluster("h100x8"))
    forecast = predict(step)
    assert not forecast.memory.fits
    trials = best_changes(try_changes(step, forecast, seconds=1000), forecast)
    fits = [trial.forecast.memory.fits for trial in trials]
    assert fits[0]
    assert fits == sorted(fits, reverse=True)
    fitting = [(not trial.forecast.memory.safe, trial.seconds) for trial in trials if trial.forecast.memory.fits]
    assert fitting == sorted(fitting)
    assert ("compile.enable", True) in [(setting.key, setting.value) for setting in trials[0].settings]


def test_a_change_that_costs_no_time_is_tried_together_with_others_if_the_step_does_not_fit() -> None:
    step = read_run(read_config(str(EXAMPLES / "llama3_8b.toml")), find_cluster("h100x8"))
    keys = [{setting.key for setting in trial.settings} for trial in try_changes(step, predict(step), seconds=1000)]
    assert {"compile.enable", "training.local_batch_size"} in keys


def test_changes_of_a_step_that_fits_make_it_faster_and_still_fit() -> None:
    step = read_run(read_config(str(EXAMPLES / "train_70b.sh")), find_cluster("h100x64"))
    forecast = predict(step)
    trials = best_changes(try_changes(step, forecast, seconds=1000), forecast)
    assert trials
    assert all(trial.forecast.memory.fits and trial.seconds < 0 for trial in trials)
    keys = [frozenset(setting.key for setting in trial.settings) for trial in trials]
    assert len(set(keys)) == len(keys)


def test_a_trial_is_the_changed_configuration_itself() -> None:
    step = read_run(read_config(str(EXAMPLES / "llama3_8b.toml")), find_cluster("h100x8"))
    for trial in try_changes(step, predict(step), seconds=1000):
        changed = read_run(trial.step.config, step.cluster)
        assert (changed.plan, changed.microbatches) == (trial.step.plan, trial.step.microbatches)

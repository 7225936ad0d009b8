"""The smallest changes of a configuration that would help: each is tried with a forecast.

A change gives a new value to one key of the file, and to the keys that this one needs. The changed configuration is
read in the same way as the file, so the framework's own limits apply.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from shardlab.common.errors import Refused, UserError
from shardlab.frameworks.find import FRAMEWORKS, read_run
from shardlab.frameworks.run import FrameworkRun
from shardlab.frameworks.settings import Config, Setting
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.memory_advice import broken_limit

FREE = 2
"""Largest number of changes that are tried in pairs with others if the step does not fit into memory. Only changes that
cost no time are paired."""

LEAST_GAIN = 0.01
"""Smallest gain of a change that is named, as a share of the step time or of the device's memory."""


@dataclass(frozen=True)
class Trial:
    """Change of a configuration, with its forecast.

    Attributes:
        meanings: the changed meanings with their new values; None stands for a key that is left out.
        settings: the same change as keys of the file.
        step, forecast: the step of the changed configuration, and its forecast.
        seconds: change of the time per token, as a share of the time without the change.
        bytes: change of the memory of the fullest device, in bytes.
    """

    meanings: Mapping[str, Any]
    settings: tuple[Setting, ...]
    step: FrameworkRun
    forecast: Forecast
    seconds: float
    bytes: float


def predict(step: FrameworkRun) -> Forecast:
    """Return the forecast of a step.

    Raises:
        UserError, Refused: if the step cannot be simulated.
    """
    return forecast(step.workload)


def try_changes(step: FrameworkRun, baseline: Forecast, *, seconds: float = 20.0) -> list[Trial]:
    """Try the framework's changes, and pairs of them if the step does not fit. Return all that the framework can run.

    Args:
        step: the step as it is.
        baseline: forecast of that step.
        seconds: time after which no more changes are tried.
    """
    config, end = step.config, time.monotonic() + seconds
    trials: list[Trial] = []
    tried_keys = {_key(step)}
    single = _distinct(config, FRAMEWORKS[config.table.framework].changes(config, step))
    for meanings in single if baseline.memory.fits else _combine(single, trials, baseline):
        if time.monotonic() > end:
            break
        if (trial := _try(step, baseline, meanings, tried_keys)) is not None:
            trials.append(trial)
    return trials


def _try(step: FrameworkRun, baseline: Forecast, meanings: Mapping[str, Any], tried_keys: set[str]) -> Trial | None:
    """Return a change with its forecast.

    The result is None if a change to the same step has been tried, or if the framework, the model or the cluster rules
    the change out.
    """
    config = step.config
    try:
        other = read_run(config.with_meanings(meanings), step.cluster)
        if _key(other) in tried_keys or broken_limit(other.workload):
            return None
        tried_keys.add(_key(other))
        result = predict(other)
    except (UserError, Refused):
        return None
    settings = tuple(config.edit(meaning, value) for meaning, value in meanings.items())
    slower = result.seconds / other.workload.tokens / (baseline.seconds / step.workload.tokens) - 1
    return Trial(meanings, settings, other, result, slower, result.memory.unlimited - baseline.memory.unlimited)


def _combine(single: Iterator[dict[str, Any]], trials: Sequence[Trial], baseline: Forecast) -> Iterator[dict[str, Any]]:
    """Yield single changes, and then pairs of changes that save memory, of which one costs no time."""
    yield from single
    threshold = -LEAST_GAIN * baseline.memory.capacity
    saving = sorted((trial for trial in trials if trial.bytes < threshold), key=lambda trial: trial.seconds)
    for first, second in product(saving[:FREE], saving):
        if first.seconds <= LEAST_GAIN and not first.meanings.keys() & second.meanings.keys():
            yield {**first.meanings, **second.meanings}


def best_changes(trials: Sequence[Trial], baseline: Forecast) -> list[Trial]:
    """Return the trials that help, the best first. Of trials that change the same keys, only the best is returned.

    If the step fits into memory, only changed steps that fit are returned, the fastest first. If it does not fit,
    changed steps that fit come first, and then those that save most memory. Among steps that fit, those that fit even
    with the expected error of memory come first.

    Args:
        trials: all trials.
        baseline: the forecast of the step as it is.
    """
    kinds: dict[frozenset[str], Trial] = {}
    for trial in _helpful(trials, baseline):
        kinds.setdefault(frozenset(re.sub(r"^(recompute|virtual)_.*", r"\1", name) for name in trial.meanings), trial)
    return list(kinds.values())


def _key(step: FrameworkRun) -> str:
    """Return a text that is equal for steps with equal forecasts."""
    recipe = replace(step.recipe, figures={})
    return repr((step.plan, step.model, step.micro_batch_size, step.microbatches, step.precision, recipe))


def _distinct(config: Config, changes: Iterator[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the changes without the meanings that already have their value."""
    for change in changes:
        settings, values = config.by_meaning, config.values
        new_values = {
            meaning: value
            for meaning, value in change.items()
            if (value is None and meaning in settings) or (value is not None and values[meaning] != value)
        }
        if new_values:
            yield new_values


def _order(trial: Trial) -> tuple[bool, float]:
    """Return the key for sorting: steps that fit even with the expected error of memory first, then by time."""
    return not trial.forecast.memory.safe, trial.seconds


def _helpful(trials: Sequence[Trial], baseline: Forecast) -> list[Trial]:
    if baseline.memory.fits:
        helpful = [trial for trial in trials if trial.forecast.memory.fits and trial.seconds < -LEAST_GAIN]
        return sorted(helpful, key=_order)
    fitting = sorted((trial for trial in trials if trial.forecast.memory.fits), key=_order)
    threshold = LEAST_GAIN * baseline.memory.capacity
    others = sorted((trial for trial in trials if not trial.forecast.memory.fits), key=lambda trial: trial.bytes)
    return fitting + [trial for trial in others if trial.bytes < -threshold]

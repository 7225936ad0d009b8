"""Predictions of published runs, and their errors.

`predict` predicts one run, `predict_outcomes` all rows of a file on every core. `ErrorSummary` summarizes the errors.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from statistics import mean, median
from typing import Any, Literal, TypeVar

from shardlab.common.processes import end_with_starter
from shardlab.language import Refused, UserError
from shardlab.language.precision import find_precision
from shardlab.planner.published import records
from shardlab.planner.published.reading import PublishedRun, read_run
from shardlab.planner.published.records import Incomplete, Measurement, Memory, StateRecord, read_figures
from shardlab.planner.workers import interrupts_blocked, killed_at_end
from shardlab.simulate.predict.forecast import forecast, with_microbatches
from shardlab.simulate.predict.memory import DeviceMemory, model_state, zero_plan
from shardlab.simulate.predict.recipe import Recipe


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a run.

    Attributes:
        seconds: seconds of a step, or of one block if the run measured a block (None: not predicted).
        bytes: bytes on the fullest GPU, counted in the same way as the measured bytes (see `records.Memory`).
        fits: whether the step fits into the GPU's memory.
        memory: memory of the fullest GPU, by each way of counting (None: only the model state's memory is predicted).
    """

    seconds: float | None
    bytes: float
    fits: bool
    memory: DeviceMemory | None = None


def predict(run: PublishedRun) -> Prediction:
    """Predict a step of a run, or one block if the run measured a block."""
    if run.measured.of_block:
        block_memory = forecast(with_microbatches(run.workload, 1)).memory
        return Prediction(_block_seconds(run), measured_as(run.measured.memory, block_memory), True, block_memory)
    prediction = forecast(run.workload)
    memory = prediction.memory
    return Prediction(prediction.seconds, measured_as(run.measured.memory, memory), memory.fits, memory)


def measured_as(memory: Memory, predicted: DeviceMemory) -> float:
    """Return the predicted bytes on the fullest GPU, counted as in measurements of this kind (`records.Memory`)."""
    return {"allocated": predicted.logged_allocated, "reserved": predicted.logged}.get(memory, predicted.total)


def _block_seconds(run: PublishedRun) -> float:
    """Return the seconds that one more block adds to a step of one microbatch, without its update."""
    recipe = run.workload.recipe
    recipe = replace(recipe, kernels=replace(recipe.kernels, update_bytes=1e-9))  # its kernels are still launched

    def step(blocks: int) -> float:
        model = replace(run.workload.model, layers=blocks)
        return forecast(with_microbatches(replace(run.workload, model=model, recipe=recipe), 1)).seconds

    return step(3) - step(2)


T = TypeVar("T")

Figure = Literal["seconds", "bytes"]
"""Figures that are compared: the time of a step, and memory."""

LONGEST = 40
"""Largest width of a source's name in a table, if the row has no short name."""


@dataclass(frozen=True)
class Outcome:
    """Run with its measured and predicted figures.

    Attributes:
        id: name of the run in the file.
        source: short name of its publication.
        measured: measured figures.
        prediction: predicted figures (None: there is no prediction).
        reason: reason why there is no prediction.
        assumed: assumptions of the prediction about values that the row does not have.
    """

    id: str
    source: str
    measured: Measurement
    prediction: Prediction | None
    reason: str = ""
    assumed: tuple[str, ...] = ()

    def error(self, figure: Figure) -> float | None:
        """Return the relative error, predicted / measured - 1 (None: one of the two is unknown)."""
        predicted, measured = self.prediction and getattr(self.prediction, figure), getattr(self.measured, figure)
        return predicted / measured - 1 if predicted and measured else None


def predict_outcome(row: dict[str, Any], recipe: Recipe | None = None) -> Outcome:
    """Predict one row of a file with a recipe (None: the recipe of the row's framework)."""
    name, source = str(row["id"]), str(row.get("publication") or _short(str(row.get("source") or "unknown")))
    measured = read_figures(row)
    try:
        if measured.memory == "model state":
            return Outcome(name, source, measured, _state(row))
        run = read_run(row, recipe)
        return Outcome(name, source, measured, predict(run), assumed=run.assumed)
    except (Incomplete, UserError, Refused) as error:
        return Outcome(name, source, measured, None, str(error))


def _short(source: str) -> str:
    """Return a source up to its first comma or parenthesis, shortened for a table."""
    return textwrap.shorten(re.split("[,;(]", source)[0], LONGEST, placeholder=" ...") or source[:LONGEST]


def _state(row: dict[str, Any]) -> Prediction:
    """Predict the memory of the model state for a row that measured only that (see `StateRecord`)."""
    state = records.parse(StateRecord, records.section(row, "model") | records.section(row, "parallelism"))
    bytes = sum(model_state(zero_plan(state.dp, state.zero_stage), state.params, find_precision("fp16")))
    return Prediction(None, bytes, True)


def predict_outcomes(rows: Sequence[dict[str, Any]], recipe: Recipe | None = None) -> Iterator[Outcome]:
    """Predict all rows on every core. Yield outcomes in the order of the rows."""
    return on_every_core(predict_outcome, rows, recipe)


def on_every_core(
    predict: Callable[[dict[str, Any], Recipe | None], T], rows: Sequence[dict[str, Any]], recipe: Recipe | None
) -> Generator[T]:
    """Call a function with each published run and a recipe, on all cores. Yield results in the order of the runs.

    Processes are spawned, because the thread of a progress bar would not survive a fork.
    """
    processes = min(len(rows), os.cpu_count() or 1)
    if processes < 2:
        yield from map(predict, rows, repeat(recipe))
        return
    with killed_at_end(ProcessPoolExecutor(processes, get_context("spawn"), end_with_starter)) as pool:
        with interrupts_blocked():
            results = pool.map(predict, rows, repeat(recipe))
        yield from results


@dataclass(frozen=True)
class ErrorSummary:
    """Summary of relative errors of predictions.

    Attributes:
        count: number of predictions.
        mean, median, worst: mean, median and largest size of the errors.
        bias: mean of the signed errors. If it is positive, predictions are too large.
    """

    count: int
    mean: float
    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorSummary:
        """Return the summary of one or more errors."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), mean(sizes), median(sizes), max(sizes), mean(errors))


def errors_by_source(outcomes: Sequence[Outcome], figure: Figure) -> dict[str, ErrorSummary]:
    """Return the summary of the errors of each source, in the order of the file, and of all sources as "all"."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if (error := outcome.error(figure)) is not None:
            grouped[outcome.source].append(error)
    if grouped:
        grouped["all"] = [error for errors in grouped.values() for error in errors]
    return {title: ErrorSummary.of(errors) for title, errors in grouped.items()}


def worst_errors(outcomes: Sequence[Outcome], figure: Figure, count: int) -> list[tuple[float, Outcome]]:
    """Return the `count` largest errors, each with its run, largest first."""
    errors = [(error, outcome) for outcome in outcomes if (error := outcome.error(figure)) is not None]
    return sorted(errors, key=lambda pair: -abs(pair[0]))[:count]


def wrong_fits(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return runs that ran out of memory although they are predicted to fit, or ran although predicted not to fit."""
    return [
        outcome
        for outcome in outcomes
        if outcome.prediction is not None and outcome.prediction.fits is outcome.measured.out_of_memory
    ]


def group_assumptions(runs: Iterable[tuple[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return, for each assumption, the ids of its runs. `runs` has the id and the assumptions of each run."""
    grouped: dict[str, list[str]] = {}
    for run, assumed in runs:
        for phrase in assumed:
            grouped.setdefault(phrase, []).append(run)
    return grouped

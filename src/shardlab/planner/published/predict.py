"""Predicting a published run: the time of a step of its plan, and its memory as the run measured it."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from multiprocessing import get_context
from statistics import mean, median
from typing import Any, Literal, Protocol, TypeVar

from shardlab.language import Mesh, OpKind, Refused, Sizes, UserError
from shardlab.language.precision import find_precision
from shardlab.planner.published.reading import PublishedRun, read_run
from shardlab.planner.published.records import Incomplete, Measurement, Memory, StateRecord, made, measured_of, section
from shardlab.simulate.predict.folding import fold
from shardlab.simulate.predict.forecast import Forecast, forecast
from shardlab.simulate.predict.memory import DeviceMemory
from shardlab.simulate.predict.recipe import Recipe
from shardlab.simulate.timeline.memory import CATEGORIES, Category, memory_in_bytes
from shardlab.strategies.plan.plan import Plan


@dataclass(frozen=True)
class Prediction:
    """Predicted figures of a run.

    Attributes:
        seconds: of a step (None: there was none).
        bytes: of the fullest GPU's memory, as it was measured: with what the allocator or CUDA adds if that counts.
        fits: whether all that the GPU holds finds room on it.
    """

    seconds: float | None
    bytes: float
    fits: bool


def predict(run: PublishedRun) -> Prediction:
    """Forecast a step of a run."""
    if run.measured.of_block:
        alone = _forecast(run, 1).memory
        return Prediction(_block_seconds(run), measured_as(run.measured.memory, alone), True)
    made = forecast(run.workload)
    return Prediction(made.seconds, measured_as(run.measured.memory, made.memory), made.memory.fits)


def measured_as(memory: Memory, held: DeviceMemory) -> float:
    """Bytes of the fullest GPU, as a run measured them."""
    return {"allocated": held.allocated, "reserved": held.logged}.get(memory, held.total)


def _block_seconds(run: PublishedRun) -> float:
    """What one more block adds to a step of one microbatch, but for its update."""
    recipe = run.workload.recipe
    recipe = replace(recipe, kernels=replace(recipe.kernels, update_bytes=1e-9))  # such a kernel still starts

    def step(blocks: int) -> float:
        model = replace(run.workload.model, layers=blocks)
        return _forecast(replace(run, workload=replace(run.workload, model=model, recipe=recipe)), 1).seconds

    return step(3) - step(2)


def _forecast(run: PublishedRun, each: int) -> Forecast:
    return forecast(replace(run.workload, microbatches=each * run.plan.data_ranks))


# Outcomes of the runs of a file: the prediction of each, or why there is none.


T = TypeVar("T")

Figure = Literal["seconds", "bytes"]
"""Figures in which predictions are compared: the time of a step, and memory."""


LONGEST = 40
"""Characters of a source in a table, where a row does not say how tables call it."""


@dataclass(frozen=True)
class Outcome:
    """A run, measured and predicted.

    Attributes:
        id: as in the file.
        source: where it was published, as the file calls that for tables.
        measured: what the run measured.
        prediction: what the simulator says (None: it was not asked).
        reason: why it was not asked.
        assumed: what the prediction takes for granted because the row does not say it.
    """

    id: str
    source: str
    measured: Measurement
    prediction: Prediction | None
    reason: str = ""
    assumed: tuple[str, ...] = ()

    def error(self, figure: Figure) -> float | None:
        """Relative error: predicted over measured, less 1 (None: one of them is unknown)."""
        predicted, measured = self.prediction and getattr(self.prediction, figure), getattr(self.measured, figure)
        return predicted / measured - 1 if predicted and measured else None


def outcome_of(row: dict[str, Any], recipe: Recipe | None = None) -> Outcome:
    """Predict one row of a file, as this recipe runs it (None: as the row's framework does)."""
    name, source = str(row["id"]), str(row.get("publication") or _short(str(row.get("source") or "unknown")))
    measured = measured_of(row)
    try:
        if measured.memory == "model state":
            return Outcome(name, source, measured, _state(row))
        run = read_run(row, recipe)
        return Outcome(name, source, measured, predict(run), assumed=run.assumed)
    except (Incomplete, UserError, Refused) as error:
        return Outcome(name, source, measured, None, str(error))


def _short(source: str) -> str:
    """A source as a table has room for it: up to its first comma or parenthesis, and no longer than a line bears."""
    return textwrap.shorten(re.split("[,;(]", source)[0], LONGEST, placeholder=" ...") or source[:LONGEST]


def _state(row: dict[str, Any]) -> Prediction:
    """The memory of a row that gives nothing but the state of a model of so many parameters."""
    state = made(StateRecord, section(row, "model") | section(row, "parallelism"))
    return Prediction(None, model_state_bytes(state.params, state.dp, state.zero_stage), True)


def outcomes_of(rows: Sequence[dict[str, Any]], recipe: Recipe | None = None) -> Iterator[Outcome]:
    """Predict all rows; give outcomes in the order of the rows, each as soon as it is known."""
    return on_every_core(outcome_of, rows, recipe)


def on_every_core(
    predict: Callable[[dict[str, Any], Recipe | None], T], rows: Sequence[dict[str, Any]], recipe: Recipe | None
) -> Iterator[T]:
    """Call a function of each row and a recipe, on every core; give results in order, each as soon as it is known.

    Processes are spawned, since a progress bar's thread would not survive a fork; when the user interrupts, they end
    with the command and say nothing of their own.
    """
    processes = min(len(rows), os.cpu_count() or 1)
    if processes < 2:
        yield from map(predict, rows, repeat(recipe))
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _end_when_interrupted) as pool:
        yield from pool.map(predict, rows, repeat(recipe))


def _end_when_interrupted() -> None:
    """Let Ctrl-C end this process without a traceback, unless it is ignored: in the background of a script."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# Bytes of a model's state that ZeRO leaves on each rank: a plan on a model that is nothing but parameters.


LAYERS = 16
SHARD = ("dp_shard",)


def model_state_bytes(parameters: float, ranks: int, stage: int) -> int:
    """Bytes of parameters, gradients and optimizer state on each of some data-parallel ranks, in half precision.

    Gradients count as they stay from one microbatch to the next (Rajbhandari et al. 2020, arXiv 1910.02054, section 5).
    """
    each = round(parameters / LAYERS)
    sizes = Sizes((each,) * LAYERS, (2 * each,) * LAYERS, (0,) * (LAYERS + 1), (0,) * LAYERS)
    shard = SHARD if ranks > 1 else ()
    plan = Plan(
        Mesh(dp_shard=ranks),
        shard_parameters=shard if stage >= 3 else (),
        shard_gradients=shard if stage >= 2 else (),
        shard_optimizer=shard if stage >= 1 else (),
    )
    folded = fold(plan, find_precision("fp16").sizes(sizes), 2 * ranks)
    (memory,) = memory_in_bytes(folded, counters=True)
    kinds = [op.kind for op in folded.program.tapes[0]]
    place = {category: number for number, category in enumerate(CATEGORIES)}
    updated, second = kinds.index(OpKind.UPDATE), kinds.index(OpKind.LOAD_BATCH, kinds.index(OpKind.LOSS))
    kept = memory.counters[updated - 1 if stage >= 2 else second]
    state = memory.counters[updated - 1]
    gradients = kept[place[Category.GRADIENTS]]
    return state[place[Category.PARAMETERS]] + state[place[Category.OPTIMIZER]] + gradients


# How far predictions are from measurements: mean, median, worst and bias, by source.


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some predictions, as shares of what was measured.

    Attributes:
        count: how many.
        mean, median, worst: of their sizes.
        bias: their mean, signs kept: above zero, predictions are too large.
    """

    count: int
    mean: float
    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorSummary:
        """Sum up some errors, one at least."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), mean(sizes), median(sizes), max(sizes), mean(errors))


def by_source(outcomes: Sequence[Outcome], figure: Figure) -> dict[str, ErrorSummary]:
    """The errors of each source that has any, in the order of the file, and then of all together."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if (error := outcome.error(figure)) is not None:
            grouped[outcome.source].append(error)
    if grouped:
        grouped["all"] = [error for errors in grouped.values() for error in errors]
    return {title: ErrorSummary.of(errors) for title, errors in grouped.items()}


def worst_of(outcomes: Sequence[Outcome], figure: Figure, count: int) -> list[tuple[float, Outcome]]:
    """The runs whose predictions are farthest off, with their errors, the worst first."""
    found = [(error, outcome) for outcome in outcomes if (error := outcome.error(figure)) is not None]
    return sorted(found, key=lambda each: -abs(each[0]))[:count]


def misjudged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs that are said to fit and did not, or that ran and are said not to fit."""
    return [
        outcome
        for outcome in outcomes
        if outcome.prediction is not None and outcome.prediction.fits is outcome.measured.out_of_memory
    ]


class Assuming(Protocol):
    """A prediction of a run, with what it takes for granted."""

    @property
    def id(self) -> str: ...

    @property
    def assumed(self) -> tuple[str, ...]: ...


def assumed_by(outcomes: Sequence[Assuming]) -> dict[str, list[str]]:
    """List what predictions take for granted, with the ids of the runs that leave it open."""
    runs: dict[str, list[str]] = {}
    for outcome in outcomes:
        for phrase in outcome.assumed:
            runs.setdefault(phrase, []).append(outcome.id)
    return runs

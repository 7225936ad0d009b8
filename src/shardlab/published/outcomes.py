"""Outcomes of the runs of a file: the prediction of each, or why there is none."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from multiprocessing import get_context
from typing import Any, Literal, TypeVar

from shardlab.predict.recipe import Recipe
from shardlab.program import Refused, UserError
from shardlab.published.model_state import model_state_bytes
from shardlab.published.predict import Prediction, predict
from shardlab.published.reading import read_run
from shardlab.published.records import Incomplete, StateRecord, made, section
from shardlab.published.rows import Measurement, measured_of

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

"""`shardlab validate RUNS.json`: predict published runs, and report the errors of the predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardlab.cli.console import print_json, stdout_console, table_of
from shardlab.cli.options import Flag
from shardlab.cli.plan_options import RecipeName, recipe_called
from shardlab.common.text import seconds_text
from shardlab.planner.published.predict import (
    ErrorSummary,
    Figure,
    Outcome,
    errors_by_source,
    group_assumptions,
    predict_outcomes,
    worst_errors,
    wrong_fits,
)
from shardlab.planner.published.records import GIB, read_rows

WORST = 5
"""Number of runs with the largest errors that are named. --json has all runs."""

FIGURES: dict[Figure, tuple[str, Callable[[float], str]]] = {
    "seconds": ("step time", seconds_text),
    "bytes": ("memory", lambda bytes: f"{bytes / GIB:.1f} GiB"),
}
"""Quantities that are compared: their titles, and functions that format them."""

NOTE = "error: predicted over measured, less 1; mean, median and worst are of its size, bias is the mean with signs"


@dataclass(frozen=True)
class Validate:
    """Predict published runs, and compare time and memory with what they measured.

    Every run with enough details is mapped to a plan, traced and simulated in seconds and bytes, with one set of
    constants for each type of device and one recipe for each framework. Nothing is fitted to a single run.
    """

    runs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS.json", help_behavior_hint="")]
    """JSON list of runs, each with id, source, model, hardware, parallelism, batch, precision, recompute and the
    measurements. docs/validation.md describes the fields."""

    json: Flag = False
    """Print only JSON: the id of every run, its measurements, predictions and assumptions."""

    recipe: RecipeName = None
    """Default: the recipe of each run's own framework."""

    assumed: Flag = False
    """Also list the assumptions about details that runs do not state."""

    def run(self) -> int:
        rows = read_rows(self.runs)
        stderr = Console(stderr=True)
        results = predict_outcomes(rows, None if self.recipe is None else recipe_called(self.recipe))
        quiet = not stderr.is_terminal
        outcomes = list(track(results, "predicting", len(rows), console=stderr, transient=True, disable=quiet))
        if self.json:
            print_json([as_json(outcome) for outcome in outcomes])
        else:
            print_report(outcomes, stdout_console(), assumed=self.assumed)
        return 0


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the measurements and the prediction of one run for --json. Unknown values are None."""
    predicted, measured = outcome.prediction, outcome.measured
    return {
        "id": outcome.id,
        "measured_s": measured.seconds,
        "predicted_s": predicted and predicted.seconds,
        "measured_gib": measured.bytes and measured.bytes / GIB,
        "predicted_gib": predicted and predicted.bytes / GIB,
        "memory": measured.memory,
        "measured_out_of_memory": measured.out_of_memory,
        "predicted_out_of_memory": predicted and not predicted.fits,
        "reason": outcome.reason or None,
        "assumed": list(outcome.assumed),
    }


def print_report(outcomes: Sequence[Outcome], console: Console, *, assumed: bool = False) -> None:
    """Print the errors by source, the runs with the largest errors, and the runs without a prediction.

    Args:
        assumed: whether to list the assumptions about details that runs do not state.
    """
    for figure in FIGURES:
        if found := errors_by_source(outcomes, figure):
            console.print(_table(FIGURES[figure][0], found), "")
    for figure in FIGURES:
        if worst := worst_errors(outcomes, figure, WORST):
            console.print(_worst_table(figure, worst), "")
    console.print(f"{NOTE}\n", style="dim")
    _print_memory_verdicts(outcomes, console)
    _print_assumed(outcomes, console, each=assumed)
    left = [outcome for outcome in outcomes if outcome.prediction is None]
    if left:
        console.print(f"{len(left)} of {len(outcomes)} runs are not predicted:")
        for outcome in left:
            console.print(f"  {outcome.id}: {outcome.reason}", highlight=False, soft_wrap=True)


def _print_memory_verdicts(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print how many runs out of memory were predicted, and the runs with a wrong prediction of whether they fit."""
    ended = [outcome for outcome in outcomes if outcome.measured.out_of_memory and outcome.prediction is not None]
    wrong = wrong_fits(outcomes)
    if ended:
        foreseen = len(ended) - sum(outcome in wrong for outcome in ended)
        console.print(f"{foreseen} of {len(ended)} runs that ran out of memory are predicted not to fit.")
    for verdict, out in (("to fit but ran out of memory", True), ("not to fit but ran", False)):
        such = [outcome for outcome in wrong if outcome.measured.out_of_memory is out]
        if such:
            console.print(f"Said {verdict}:")
        for outcome in such:
            assert outcome.prediction is not None
            console.print(f"  {outcome.id}: {outcome.prediction.bytes / GIB:.1f} GiB", highlight=False)
    if ended or wrong:
        console.print()


def _print_assumed(outcomes: Sequence[Outcome], console: Console, *, each: bool) -> None:
    """Print the number of runs with assumptions or, if `each` is set, the assumptions with their runs."""
    runs = group_assumptions(outcomes)
    if not runs:
        return
    if not each:
        count = sum(bool(outcome.assumed) for outcome in outcomes)
        console.print(f"{count} of {len(outcomes)} runs do not state all details; --assumed lists the assumptions.")
    else:
        console.print("Assumptions about details that runs do not state:")
        print_phrases(runs, console)
    console.print()


def print_phrases(runs: Mapping[str, Sequence[str]], console: Console) -> None:
    """Print each assumption, with the number of its runs and the id of one of them."""
    for phrase, names in runs.items():
        whose = names[0] if len(names) == 1 else f"{len(names)} runs, {names[0]} and others"
        console.print(f"  {phrase} ({whose})", markup=False, highlight=False, soft_wrap=True)


def _worst_table(figure: Figure, worst: Sequence[tuple[float, Outcome]]) -> Table:
    title, text = FIGURES[figure]
    table = table_of(f"farthest off in {title}", "measured", "predicted", "error")
    table.columns[0].no_wrap, table.columns[0].overflow = False, "fold"
    for error, outcome in worst:
        figures = (text(getattr(each, figure)) for each in (outcome.measured, outcome.prediction))
        table.add_row(outcome.id, *figures, f"{error:+.1%}")
    return table


def _table(title: str, errors: dict[str, ErrorSummary]) -> Table:
    table = table_of(title, "runs", "mean", "median", "worst", "bias")
    for source, found in errors.items():
        numbers = (f"{found.mean:.1%}", f"{found.median:.1%}", f"{found.worst:.1%}", f"{found.bias:+.1%}")
        table.add_row(source, str(found.count), *numbers, style="bold" if source == "all" else "")
    return table

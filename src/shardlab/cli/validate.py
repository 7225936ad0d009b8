"""`shardlab validate RUNS.json`: predict published runs, and report the errors of the predictions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.progress import track
from rich.text import Text

from shardlab.cli.console import Report
from shardlab.cli.options import Flag
from shardlab.cli.plan_options import RecipeName, SwitchWords, recipe_called, switches_of
from shardlab.common.errors import UserError
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
from shardlab.simulate.predict.memory import DeviceMemory

WORST = 5
"""Number of runs listed, those with the largest errors. --json has all runs."""

FIGURES: dict[Figure, tuple[str, Callable[[float], str]]] = {
    "seconds": ("step time", seconds_text),
    "bytes": ("memory", lambda bytes: f"{bytes / GIB:.1f} GiB"),
}
"""Compared quantities, each with its title and the function that formats it."""

NOTE = "error: predicted / measured - 1; mean, median and worst of its absolute value, bias: its mean with signs"


@dataclass(frozen=True)
class Validate:
    """Predict published runs, and compare time and memory with their measurements.

    Every run with enough details is mapped to a plan, traced and simulated in seconds and bytes, with one set of
    constants for each type of device and one recipe for each framework. Nothing is fitted to a single run.
    """

    runs: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUNS.json", help_behavior_hint="")]
    """JSON list of runs, each with id, source, model, hardware, parallelism, batch, precision, recompute and the
    measurements. docs/published-runs.md describes the fields."""

    json: Flag = False
    """Print only JSON: the id of every run, its measurements, predictions and assumptions."""

    recipe: Annotated[RecipeName, tyro.conf.arg(help_behavior_hint="(default: that of each run's framework)")] = None

    switch: SwitchWords = ()
    """Options of the framework, with --recipe."""

    assumed: Flag = False
    """Also list the assumptions about details that runs do not state."""

    def run(self) -> int:
        rows = read_rows(self.runs)
        stderr = Console(stderr=True)
        if self.switch and self.recipe is None:
            raise UserError("--switch is for the recipe of --recipe; give --recipe NAME, or switches in the runs' rows")
        recipe = None if self.recipe is None else recipe_called(self.recipe, switches_of(self.switch))
        results = predict_outcomes(rows, recipe)
        quiet = not stderr.is_terminal
        outcomes = list(track(results, "predicting", len(rows), console=stderr, transient=True, disable=quiet))
        report_of(outcomes, assumed=self.assumed).show(json=self.json)
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
        "predicted_gib_by_count": predicted and predicted.memory and _by_count(predicted.memory),
        "measured_out_of_memory": measured.out_of_memory,
        "predicted_out_of_memory": predicted and not predicted.fits,
        "reason": outcome.reason or None,
        "assumed": list(outcome.assumed),
    }


def _by_count(memory: DeviceMemory) -> dict[str, float]:
    """Return a GPU's predicted memory in GiB by the way of measuring it: allocated, reserved, nvidia-smi."""
    bytes = {"allocated": memory.allocated, "reserved": memory.logged, "nvidia-smi": memory.total}
    return {name: size / GIB for name, size in bytes.items()}


def report_of(outcomes: Sequence[Outcome], *, assumed: bool = False) -> Report:
    """Return a report with the errors by publication, the runs with the largest errors, and those without a prediction.

    Args:
        assumed: whether to list the assumptions about details that runs do not state.
    """
    report = Report([as_json(outcome) for outcome in outcomes])
    for figure in FIGURES:
        if errors := errors_by_source(outcomes, figure):
            _add_errors(report, FIGURES[figure][0], errors)
    for figure in FIGURES:
        if worst := worst_errors(outcomes, figure, WORST):
            _add_worst(report, figure, worst)
    report.line(f"{NOTE}\n", "dim")
    _add_memory_verdicts(report, outcomes)
    if runs := group_assumptions((outcome.id, outcome.assumed) for outcome in outcomes):
        count = sum(bool(outcome.assumed) for outcome in outcomes)
        if assumed:
            report.line("Assumptions about details that runs do not state:")
            add_phrases(report, runs)
        else:
            report.line(f"{count} of {len(outcomes)} runs do not state all details; --assumed lists the assumptions.")
        report.line()
    if unpredicted := [outcome for outcome in outcomes if outcome.prediction is None]:
        report.line(f"{len(unpredicted)} of {len(outcomes)} runs are not predicted:")
        for outcome in unpredicted:
            report.line(Text(f"  {outcome.id}: {outcome.reason}"), wrap=False)
    return report


def _add_memory_verdicts(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Add how many out-of-memory runs are predicted not to fit, and the runs for which the prediction is wrong."""
    oom_runs = [outcome for outcome in outcomes if outcome.measured.out_of_memory and outcome.prediction is not None]
    mistakes = wrong_fits(outcomes)
    if oom_runs:
        right_count = len(oom_runs) - sum(outcome in mistakes for outcome in oom_runs)
        report.line(f"{right_count} of {len(oom_runs)} runs that ran out of memory are predicted not to fit.")
    for verdict, out in (("to fit but ran out of memory", True), ("not to fit but ran", False)):
        wrong_runs = [outcome for outcome in mistakes if outcome.measured.out_of_memory is out]
        if wrong_runs:
            report.line(f"Said {verdict}:")
        for outcome in wrong_runs:
            assert outcome.prediction is not None
            report.line(Text(f"  {outcome.id}: {outcome.prediction.bytes / GIB:.1f} GiB"))
    if oom_runs or mistakes:
        report.line()


def add_phrases(report: Report, runs: Mapping[str, Sequence[str]]) -> None:
    """Add each assumption, with the number of runs that need it and the id of one of them."""
    for phrase, names in runs.items():
        runs_text = names[0] if len(names) == 1 else f"{len(names)} runs, {names[0]} and others"
        report.line(Text(f"  {phrase} ({runs_text})"), wrap=False)


def _add_worst(report: Report, figure: Figure, worst: Sequence[tuple[float, Outcome]]) -> None:
    title, text = FIGURES[figure]
    columns: dict[str, Callable[[Any], str]] = {
        f"farthest off in {title}": lambda row: row[1].id,
        "measured": lambda row: text(getattr(row[1].measured, figure)),
        "predicted": lambda row: text(getattr(row[1].prediction, figure)),
        "error": lambda row: f"{row[0]:+.1%}",
    }
    report.table(columns, worst, folded=0)
    report.line()


def _add_errors(report: Report, title: str, errors: dict[str, ErrorSummary]) -> None:
    columns: dict[str, Callable[[Any], str]] = {
        title: lambda row: row[0],
        "runs": lambda row: str(row[1].count),
        "mean": lambda row: f"{row[1].mean:.1%}",
        "median": lambda row: f"{row[1].median:.1%}",
        "worst": lambda row: f"{row[1].worst:.1%}",
        "bias": lambda row: f"{row[1].bias:+.1%}",
    }
    report.table(columns, [*errors.items()], style=lambda row: "bold" if row[0] == "all" else "")
    report.line()

"""`shardlab plan --grade RUNS.json`: compare the choices of predictions with measured runs, by cell and in total.

A cell is a model on a number of devices, for which several configurations were measured. `print_grades` predicts all
configurations, and prints the regret of choosing the fastest prediction. The grades themselves are in
`shardlab.planner.published.grade`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.text import Text

from shardlab.cli.console import Report
from shardlab.cli.validate import add_phrases
from shardlab.language import UserError
from shardlab.planner.published.grade import FIRST, GradedCell, Grades, TriedPlan, group_cells, predict_plan
from shardlab.planner.published.predict import group_assumptions, on_every_core
from shardlab.planner.published.records import GIB, read_rows
from shardlab.simulate.predict.recipe import Recipe

MANY_NODES = 64
"""Smallest number of nodes of a large cell. The figures are also printed without large cells, because in them the noise
of measurements exceeds most differences between plans."""

FIGURES: dict[str, Callable[[Grades], str]] = {
    "mean regret": lambda grades: f"{grades.regret:.1%}",
    f"best of the first {FIRST}": lambda grades: f"{grades.regret_of_first:.1%}",
    "first choice runs": lambda grades: f"{grades.first_runs} of {grades.cells}",
    "step time of good configurations": lambda grades: f"{grades.time:.1%} ({grades.time_bias:+.1%})",
    "their memory": lambda grades: f"{grades.memory:.1%} ({grades.memory_bias:+.1%})",
    "ran, predicted not to fit": lambda grades: f"{grades.refused:.1%}",
    "seconds per configuration": lambda grades: f"{grades.seconds:.3f}",
}
"""Rows of the table of figures: their names, and functions that format them."""

NOTE = (
    "regret: 1 - (measured speed of the first choice that ran / best measured speed); crashed runs can be chosen "
    "first, but have no speed; good: at least half as fast as the best; errors: mean absolute (mean with sign)"
)


def print_grades(runs: Path, recipe: Recipe | None, *, json: bool) -> None:
    """Predict all configurations of a file, and grade the choices that these predictions make.

    Args:
        runs: file of measured runs.
        recipe: recipe for the predictions of all runs (None: each run has its own).
        json: whether to print JSON.

    Raises:
        UserError: if the file contains no runs, or none with a measured step time.
    """
    rows, stderr = read_rows(runs), Console(stderr=True)
    predictions = on_every_core(predict_plan, rows, recipe)
    is_quiet = not stderr.is_terminal
    plans = list(track(predictions, "predicting", len(rows), console=stderr, transient=True, disable=is_quiet))
    cells = group_cells(plans)
    if not cells:
        raise UserError(f"{runs}: none of its {len(rows)} runs has a measured step time, so there is nothing to grade")
    small_cells = [cell for cell in cells if cell.nodes < MANY_NODES]
    groups = {f"below {MANY_NODES} nodes": small_cells} if small_cells and len(small_cells) < len(cells) else {}
    grades = {name: Grades.of(group) for name, group in {**groups, "all": cells}.items()}
    _report(cells, grades, plans).show(json=json)


def _row(plan: TriedPlan) -> dict[str, Any]:
    return {
        "id": plan.id,
        "predicted_tokens_per_s_per_device": plan.predicted,
        "predicted_gib": plan.bytes and plan.bytes / GIB,
        "fits": plan.fits,
        "safe": plan.safe,
        "legal": plan.legal,
        "reason": plan.reason or None,
        "breaks_limit": plan.breaks_limit,
        "assumed": list(plan.assumed),
        "measured_tokens_per_s_per_device": plan.measured,
    }


def _cell(cell: GradedCell) -> dict[str, Any]:
    first = cell.ranking[:1]
    return {
        "model": cell.model,
        "devices": cell.devices,
        "chosen": cell.choice and cell.choice.id,
        "first_choice": first[0].id if first else None,
        "first_choice_runs": cell.first_runs,
        "best": cell.best.id,
        "regret": cell.regret,
        "regret_of_first_three": cell.regret_of_first,
        "rank_correlation": cell.rank_correlation,
    }


def _report(cells: Sequence[GradedCell], grades: dict[str, Grades], plans: Sequence[TriedPlan]) -> Report:
    report = Report()
    report.data["rows"] = [*map(_row, plans)]
    columns: dict[str, Callable[[Any], str]] = {
        "model": lambda cell: cell.model,
        "devices": lambda cell: str(cell.devices),
        "tried": lambda cell: str(len(cell.candidates)),
        "ran": lambda cell: str(sum(plan.measured is not None for plan in cell.candidates)),
        "regret": lambda cell: f"{cell.regret:.1%}",
        f"of {FIRST}": lambda cell: f"{cell.regret_of_first:.1%}",
        "correlation": lambda cell: "" if cell.rank_correlation is None else f"{cell.rank_correlation:.2f}",
        "chosen": _chosen_text,
    }
    report.table(columns, cells, "cells", folded=7, fields=_cell)
    report.line()
    report.data["figures"] = {name: asdict(grade) for name, grade in grades.items()}
    texts = [(name, *map(text, grades.values())) for name, text in FIGURES.items()]
    report.table({name: itemgetter(index) for index, name in enumerate(["", *grades])}, texts)
    report.line()
    report.line(NOTE, "dim")
    illegal_plans = [plan for plan in plans if not plan.legal]
    over_limit, invalid = ([plan for plan in illegal_plans if plan.breaks_limit is limit] for limit in (True, False))
    for verdict, group in (("break a limit of their framework", over_limit), ("are no valid plans", invalid)):
        if group:
            report.line(f"{len(group)} of {len(plans)} runs {verdict}, such as:", "dim")
            report.line(Text(f"  {group[0].id}: {group[0].reason}"), "dim", wrap=False)
    if assumed := group_assumptions((plan.id, plan.assumed) for plan in plans):
        open = sum(bool(plan.assumed) for plan in plans)
        report.line(f"{open} of {len(plans)} runs do not state all details. Assumptions:")
        add_phrases(report, assumed)
    return report


def _chosen_text(cell: GradedCell) -> str:
    return cell.ranking[0].id + ("" if cell.first_runs else " (crashed)") if cell.ranking else "none"

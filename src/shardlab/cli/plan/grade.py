"""`shardlab plan --grade RUNS.json`: compare predicted choices with measured runs, for each cell and in total.

A cell is a model on a number of devices, of which several configurations were run. `print_grades` predicts all of them
and prints the regret of each choice. The grades themselves are in `shardlab.planner.grade`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from shardlab.cli.console import print_json, stdout_console, table_of
from shardlab.cli.validate import print_phrases
from shardlab.language import UserError
from shardlab.planner.grade import FIRST, GradedCell, Grades, TriedPlan, group_cells, predict_plan
from shardlab.planner.published.predict import group_assumptions, on_every_core
from shardlab.planner.published.records import GIB, read_rows
from shardlab.simulate.predict.recipe import Recipe

MANY_NODES = 64
"""Number of nodes from which a cell counts as large. The figures are also printed without large cells, in which the
noise of measurements exceeds most differences between plans."""

FIGURES: dict[str, Callable[[Grades], str]] = {
    "mean regret": lambda grades: f"{grades.regret:.1%}",
    f"best of the first {FIRST}": lambda grades: f"{grades.regret_of_first:.1%}",
    "first choice runs": lambda grades: f"{grades.first_runs} of {grades.cells}",
    "step time of good configurations": lambda grades: f"{grades.time:.1%} ({grades.time_bias:+.1%})",
    "their memory": lambda grades: f"{grades.memory:.1%} ({grades.memory_bias:+.1%})",
    "ran, yet said not to fit": lambda grades: f"{grades.refused:.1%}",
    "seconds a configuration": lambda grades: f"{grades.seconds:.3f}",
}
"""Rows of the table of figures: their names, and functions that format them."""

NOTE = (
    "regret: 1 less the measured speed of the predicted fastest that ran, over the best measured; crashed ones can be "
    "chosen first, but have no speed; good: at least half as fast as the best; errors are means of sizes (with signs)"
)


def print_grades(runs: Path, recipe: Recipe | None, *, json: bool) -> None:
    """Predict all configurations of a file, and print the grades of the resulting choices.

    Args:
        runs: file of measured runs.
        recipe: recipe of all runs (None: that of each run).
        json: whether to print JSON.

    Raises:
        UserError: if the file contains no runs, or none with a measured step time.
    """
    rows, stderr = read_rows(runs), Console(stderr=True)
    predictions = on_every_core(predict_plan, rows, recipe)
    quiet = not stderr.is_terminal
    seen = list(track(predictions, "predicting", len(rows), console=stderr, transient=True, disable=quiet))
    cells = group_cells(seen)
    if not cells:
        raise UserError(f"{runs}: none of its {len(rows)} runs has a measured step time, so there is nothing to grade")
    few = [cell for cell in cells if cell.nodes < MANY_NODES]
    groups = {f"below {MANY_NODES} nodes": few} if few and len(few) < len(cells) else {}
    grades = {name: Grades.of(some) for name, some in {**groups, "all": cells}.items()}
    if json:
        figures = {name: asdict(each) for name, each in grades.items()}
        print_json({"rows": [*map(_row, seen)], "cells": [*map(_cell, cells)], "figures": figures})
    else:
        _print(cells, grades, seen, stdout_console())


def _row(each: TriedPlan) -> dict[str, Any]:
    return {
        "id": each.id,
        "predicted_tokens_per_s_per_device": each.predicted,
        "predicted_gib": each.bytes and each.bytes / GIB,
        "fits": each.fits,
        "safe": each.safe,
        "legal": each.legal,
        "reason": each.reason or None,
        "breaks_limit": each.breaks_limit,
        "assumed": list(each.assumed),
        "measured_tokens_per_s_per_device": each.measured,
    }


def _cell(cell: GradedCell) -> dict[str, Any]:
    first = cell.ranking[:1]
    return {
        "model": cell.model,
        "devices": cell.devices,
        "chosen": cell.chosen and cell.chosen.id,
        "first_choice": first[0].id if first else None,
        "first_choice_runs": cell.first_runs,
        "best": cell.best.id,
        "regret": cell.regret,
        "regret_of_first_three": cell.regret_of_first,
        "rank_correlation": cell.rank_correlation,
    }


def _print(cells: Sequence[GradedCell], grades: dict[str, Grades], seen: Sequence[TriedPlan], console: Console) -> None:
    table = table_of("model", "devices", "tried", "ran", "regret", f"of {FIRST}", "correlation", "chosen")
    table.columns[-1].justify, table.columns[-1].no_wrap, table.columns[-1].overflow = "left", False, "fold"
    for cell in cells:
        ran = sum(each.measured is not None for each in cell.candidates)
        correlation = "" if cell.rank_correlation is None else f"{cell.rank_correlation:.2f}"
        shares = (f"{cell.regret:.1%}", f"{cell.regret_of_first:.1%}", correlation)
        chosen = cell.ranking[0].id + ("" if cell.first_runs else " (crashed)") if cell.ranking else "none"
        table.add_row(cell.model, str(cell.devices), str(len(cell.candidates)), str(ran), *shares, chosen)
    console.print(table, "")
    figures = table_of("", *grades)
    for name, text in FIGURES.items():
        figures.add_row(name, *map(text, grades.values()))
    console.print(figures, "")
    console.print(NOTE, style="dim")
    refused = [each for each in seen if not each.legal]
    limited, wrong = ([each for each in refused if each.breaks_limit is limit] for limit in (True, False))
    for what, some in (("break a limit of their framework", limited), ("have numbers that make no plan", wrong)):
        if some:
            console.print(f"{len(some)} of {len(seen)} runs {what}, such as:", style="dim")
            console.print(f"  {some[0].id}: {some[0].reason}", style="dim", markup=False, soft_wrap=True)
    if assumed := group_assumptions(seen):
        open = sum(bool(each.assumed) for each in seen)
        console.print(f"{open} of {len(seen)} runs do not state all details. Assumptions:")
        print_phrases(assumed, console)

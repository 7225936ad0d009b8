"""Tables of `shardlab verify --all`: the largest error of every strategy, sharding and pipeline schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import table_of
from shardlab.train.verification.cases import ALONE, TOLERANCE
from shardlab.train.verification.verify import CaseResult


def as_json(results: Sequence[CaseResult], seconds: float) -> dict[str, Any]:
    """Return all results for --json."""
    rows = [
        {
            **{name: value for name, value in vars(result.case).items() if name != "strategy"},
            "error": None if math.isinf(result.error) else result.error,
            "refused": result.refused or None,
            "ok": result.ok,
        }
        for result in results
    ]
    ok = all(result.ok for result in results)
    return {"cases": rows, "tolerance": TOLERANCE, "seconds": round(seconds, 1), "ok": ok}


def print_tables(results: Sequence[CaseResult], seconds: float, console: Console) -> None:
    """Print a table of strategies, of sharding options and of pipelines, with the case of the largest error in each."""
    alone = [result for result in results if result.case.column == ALONE]
    pairs = [result for result in results if result.case.column != ALONE]
    for title, shown in (("strategy", alone), ("sharding", pairs), ("pipeline", pairs)):
        if shown:
            console.print(_table(shown, title))
            console.print()
    bad = [result for result in results if not result.ok]
    for result in bad:
        console.print(f"[red]{result.case}[/]: {result.refused or format(result.error, '.1e')}")
    what = "the largest error max|a - b| / max|b| of loss, gradients, weights"
    console.print(f"[dim]{len(results)} cases in {seconds:.0f} s: {what}[/]")
    verdict = f"[red]{len(bad)} more than {TOLERANCE:.0e}[/]" if bad else f"[green]all within {TOLERANCE:.0e}[/]"
    console.print(verdict)


def _table(results: Sequence[CaseResult], title: str) -> Table:
    """Return a table with the number of cases and the largest error of each strategy, sharding option or pipeline."""
    table = table_of(title, "cases", "largest error", gap=3)
    table.columns[0].style = "cyan"
    table.add_column("" if title == "strategy" else "where", style="dim", no_wrap=True)
    cases: dict[str, list[CaseResult]] = defaultdict(list)
    for result in results:
        cases[result.case.column if title == "sharding" else result.case.row].append(result)
    for name, here in cases.items():
        worst = max(here, key=lambda result: result.error)
        text = "refused" if math.isinf(worst.error) else f"{worst.error:.0e}"
        other = {"strategy": "", "sharding": worst.case.row, "pipeline": worst.case.column}[title]
        style = "" if all(result.ok for result in here) else "red"
        table.add_row(name, str(len(here)), Text(text, style), other)
    return table

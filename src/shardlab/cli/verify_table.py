"""What `shardlab verify --all` prints: the worst error of every strategy and of every pair."""

from __future__ import annotations

import json as json_format
import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from shardlab.train.cases import ALONE
from shardlab.train.verify import TOLERANCE
from shardlab.train.verify_all import Result


def print_json(results: Sequence[Result], seconds: float) -> None:
    """JSON alone."""
    rows = [
        {
            "row": result.case.row,
            "column": result.case.column,
            "ranks": result.case.ranks,
            "layers": result.case.layers,
            "microbatches": result.case.microbatches,
            "dropout": result.case.dropout,
            "error": None if math.isinf(result.error) else result.error,
            "refused": result.refused or None,
            "ok": result.ok,
        }
        for result in results
    ]
    ok = all(result.ok for result in results)
    print(json_format.dumps({"cases": rows, "tolerance": TOLERANCE, "seconds": round(seconds, 1), "ok": ok}, indent=2))


def print_tables(results: Sequence[Result], seconds: float, console: Console) -> None:
    """The strategies alone, then the pairs: a row for each pipeline, a column for each way to shard."""
    alone = [result for result in results if result.case.column == ALONE]
    pairs = [result for result in results if result.case.column != ALONE]
    for title, shown in (("strategy", alone), ("pipeline", pairs)):
        if shown:
            console.print(_table(shown, title))
            console.print()
    bad = [result for result in results if not result.ok]
    for result in bad:
        console.print(f"[red]{result.case}[/]: {result.refused or format(result.error, '.1e')}")
    count = (
        f"{len(results)} cases in {seconds:.0f} s: the largest error max|a - b| / max|b| of loss, gradients, weights"
    )
    console.print(f"[dim]{count}[/]")
    verdict = f"[red]{len(bad)} more than {TOLERANCE:.0e}[/]" if bad else f"[green]all within {TOLERANCE:.0e}[/]"
    console.print(verdict)


def _table(results: Sequence[Result], title: str) -> Table:
    """The worst error of the cases in each place."""
    columns = list(dict.fromkeys(result.case.column for result in results))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(title, style="cyan", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    for row in dict.fromkeys(result.case.row for result in results):
        cells: list[str] = []
        for column in columns:
            here = [r for r in results if (r.case.row, r.case.column) == (row, column)]
            worst = max((r.error for r in here), default=None)
            style = "" if all(r.ok for r in here) else "red"
            text = "" if worst is None else "refused" if math.isinf(worst) else f"{worst:.0e}"
            cells.append(f"[{style}]{text}[/]" if style else text)
        table.add_row(row, *cells)
    return table

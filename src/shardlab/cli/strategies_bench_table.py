"""Output of `shardlab bench strategies`: for each size, ratios, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from rich.console import Console

from shardlab.cli.console import print_fact, table_of
from shardlab.measure.side_by_side.report import PairRow

MILLI = 1e-3


def print_rows(console: Console, rows: Sequence[PairRow], ranks: int) -> None:
    """All rows, size by size; what was not compared is said below."""
    for title, of_size in groupby(rows, lambda row: row.size.title(ranks)):
        mine = list(of_size)
        console.print(f"[bold]{title}[/]\n")
        if any(row.compared for row in mine):
            _print_ratios(console, mine)
            _print_parts(console, mine)
            _print_passes(console, mine)
        missing = [row for row in mine if row.compared is None]
        for row in missing:
            print_fact(console, row.pair.name, f"not compared: {row.why_not.splitlines()[-1]}", "yellow")
        if missing:
            console.print()
    console.print(
        "[dim]time, memory: ours over PyTorch's; middle half: of the ratios of neighbours\n"
        "memory: the most bytes of storages in a step, parameters and all\n"
        "floor: a rank's share in plain PyTorch, without communication\n"
        "compute: the floor's; overhead: how much longer a rank's thread has a core;\n"
        "waiting: it has none[/]"
    )


def _print_ratios(console: Console, rows: Sequence[PairRow]) -> None:
    table = table_of("ours", "PyTorch's", "layers", "time", "middle half", "memory", words=2)
    for row in rows:
        if (found := row.compared) is None:
            continue
        ratio = found.ratio
        table.add_row(
            row.pair.name,
            row.pair.theirs,
            str(row.size.model.layers),
            f"[bold]{ratio.median:.2f}[/]",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{found.memory:.2f}",
        )
    console.print(table, "")


def _print_passes(console: Console, rows: Sequence[PairRow]) -> None:
    """Name the passes that have rewritten our programs."""
    rewritten = [row.pair for row in rows if row.compared and row.pair.passes != "none"]
    for pair in rewritten:
        print_fact(console, pair.name, f"after {pair.passes}")
    if rewritten:
        console.print()


def _print_parts(console: Console, rows: Sequence[PairRow]) -> None:
    table = table_of("step of", "", "ms", "compute", "overhead", "waiting", "over floor", words=2)
    for row in rows:
        if (found := row.compared) is None:
            continue
        for name, whose, side in ((row.pair.name, "ours", found.ours), ("", "PyTorch's", found.theirs)):
            cells = (median(side.seconds), *side.parts(found.floor))
            over = side.over(found.floor).median
            table.add_row(name, whose, *(f"{each / MILLI:,.1f}" for each in cells), f"{over:.2f}")
    console.print(table, "")

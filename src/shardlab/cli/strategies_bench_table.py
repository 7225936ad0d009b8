"""Output of `shardlab bench strategies`: for each size, ratios, and where the time of a step goes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from rich.console import Console

from shardlab.cli.console import print_fact, table_of
from shardlab.measure.side_by_side.report import PairRow

MILLI = 1e-3


def title_of(row: PairRow, ranks: int) -> str:
    """The size of a row's model and batch, in words; pipelines may have a few more layers."""
    model = row.size.model
    return f"{row.size.name}: {model.hidden_size} wide, {row.size.tokens:,} tokens a step, {ranks} ranks"


def print_rows(console: Console, rows: Sequence[PairRow], ranks: int) -> None:
    """All rows, size by size; what was not compared is said below."""
    for title, of_size in groupby(rows, lambda row: title_of(row, ranks)):
        mine = list(of_size)
        console.print(f"[bold]{title}[/]\n")
        if any(row.compared for row in mine):
            _print_ratios(console, mine)
            _print_parts(console, mine)
        for row in mine:
            if row.compared is None:
                print_fact(console, row.pair.name, f"not compared: {row.why_not.splitlines()[-1]}", "yellow")
        console.print()
    console.print(
        "[dim]time, memory: ours over PyTorch's; middle half: of the ratios of neighbouring steps\n"
        "memory: the most bytes of tracked storages, parameters and optimizer included\n"
        "floor: a rank's share in plain PyTorch, without communication\n"
        "overhead: for what more than the floor a rank's thread has a core; waiting: it has none[/]"
    )


def _print_ratios(console: Console, rows: Sequence[PairRow]) -> None:
    table = table_of("ours", "PyTorch's", "layers", "time", "middle half", "memory", "over floor", "theirs", words=2)
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
            f"{found.ours.over(found.floor).median:.2f}",
            f"{found.theirs.over(found.floor).median:.2f}",
        )
    console.print(table, "")


def _print_parts(console: Console, rows: Sequence[PairRow]) -> None:
    heads = ("ours ms", "overhead", "waiting", "PyTorch's ms", "overhead", "waiting")
    table = table_of("a step", "compute", *heads)
    for row in rows:
        if (found := row.compared) is None:
            continue
        cells: list[float] = []
        for side in (found.ours, found.theirs):
            parts = side.parts(found.floor)
            cells += [median(side.seconds), parts.overhead, parts.waiting]
        compute = median(found.floor.computing)
        table.add_row(row.pair.name, *(f"{each / MILLI:,.1f}" for each in (compute, *cells)))
    console.print(table, "")

"""Output of `shardlab bench strategies --each-pass`: each pass's gain, as predicted and as measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_fact, table_of
from shardlab.cli.each_pass import PassesRow
from shardlab.hardware.unmeasured import DEVICE
from shardlab.measure.side_by_side.results import Spread
from shardlab.passes import settled
from shardlab.program.pass_names import named_passes

TOGETHER = "together"


def print_passes(console: Console, rows: Sequence[PassesRow], ranks: int) -> None:
    """All rows, size by size."""
    for title, of_size in groupby(rows, lambda row: row.size.title(ranks)):
        mine = list(of_size)
        console.print(f"[bold]{title}[/]\n")
        table = table_of("ours", "pass", "predicted", "measured", "middle half", words=2)
        for row in mine:
            for number, cells in enumerate(_cells(row)):
                table.add_row("" if number else row.pair.name, *cells)
        console.print(table, "")
        for row in mine:
            if row.why_not:
                print_fact(console, row.pair.name, f"not timed: {row.why_not.splitlines()[-1]}", "yellow")
            elif left := _left(row):
                print_fact(console, row.pair.name, left)
        console.print()
    assumed = any(row.device == DEVICE for row in rows)
    prices = "of cores that nobody has measured (shardlab bench does)" if assumed else "that shardlab bench measured"
    console.print(
        "[dim]gains: by how much of the step before it a pass makes it shorter\n"
        f"predicted: by prices {prices}\n"
        "measured: the median of steps beside each other, and what half of them lie between[/]"
    )


def _left(row: PassesRow) -> str:
    """Passes that have changed nothing: of one that was named the reason as well."""
    named = {each.name for each in named_passes(row.pair.passes) if each.by_name}
    left = [f"{each.name} ({each.why_not})" if each.name in named else each.name for each in row.passed if each.why_not]
    return f"nothing to do, or to gain: {', '.join(left)}" if left else ""


def _cells(row: PassesRow) -> Iterator[tuple[str | Text, ...]]:
    if not row.predicted:
        yield Text("none", "dim"), "", "", ""
    measured = row.timed.gains if row.timed else [None] * len(row.predicted)
    for each, predicted, spread in zip(row.helped[1:], row.predicted, measured, strict=True):
        yield settled([each]), *_gains(predicted, spread)
    if len(row.predicted) > 1:
        yield TOGETHER, *_gains(row.together, row.timed and row.timed.gain)


def _gains(predicted: float, measured: Spread | None) -> tuple[str, str, str]:
    if measured is None:
        return f"{predicted:.1%}", "", ""
    return f"{predicted:.1%}", f"[bold]{measured.median:.1%}[/]", f"{measured.low:.1%} to {measured.high:.1%}"

"""The tables of `shardlab compare`, for a terminal of 80 columns or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import stdout_console
from shardlab.simulate.compare import Comparison, KindRow, Pair

SHOWN_RANKS = 8
"""Of more ranks, only those are shown; --json has all."""

NEGLIGIBLE = 1e-3
"""A kind of op that takes less than this share of its rank's time, on both sides, is left out."""


def print_comparison(
    comparison: Comparison, title: str, written: Sequence[Path] = (), console: Console | None = None
) -> None:
    """Print the step, the ranks and their ops; `written` are the files that were made."""
    console = console or stdout_console()
    console.print(Text.assemble((title, "bold cyan")), soft_wrap=True)
    for sentence in comparison.missing:
        console.print(Text(f"incomplete: {sentence}", "yellow"), soft_wrap=True)
    console.print()
    console.print(_step_table(comparison))
    console.print()
    console.print(_op_table(comparison))
    if len(comparison.ranks) > SHOWN_RANKS:
        console.print(Text(f"ranks 0-{SHOWN_RANKS - 1} of {len(comparison.ranks)}; --json has all", "dim"))
    if comparison.step.predicted is None:
        console.print()
        console.print(Text("nothing is predicted: shardlab bench measures this machine, or name a --cluster", "yellow"))
    if written:
        console.print()
    for path in written:
        console.print(Text.assemble(("written to  ", "dim"), (str(path), "bold")), soft_wrap=True)


def _table(*left: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in left:
        table.add_column(heading)
    for heading in ("predicted", "measured", "ratio"):
        table.add_column(heading, justify="right")
    return table


def _step_table(comparison: Comparison) -> Table:
    table = _table("", "rank")
    table.add_row("step", "all", *_milliseconds(comparison.step))
    rows = comparison.ranks[:SHOWN_RANKS]
    for row in rows:
        table.add_row("computes", str(row.rank), *_milliseconds(row.computing))
    for row in rows:
        table.add_row("exposed communication", str(row.rank), *_milliseconds(row.exposed))
    for row in rows:
        table.add_row("idle", str(row.rank), *_milliseconds(row.idle))
    for row in rows:
        table.add_row("peak memory", str(row.rank), *_mebibytes(row.memory))
    return table


def _op_table(comparison: Comparison) -> Table:
    table = _table("rank", "op", "count")
    for rank in range(min(len(comparison.ranks), SHOWN_RANKS)):
        rows = [row for row in comparison.kinds if row.rank == rank]
        whole = [sum(_either(row, side) for row in rows) for side in _SIDES]
        for row in rows:
            shares = [_either(row, side) > NEGLIGIBLE * all_ for side, all_ in zip(_SIDES, whole, strict=True)]
            if any(shares) or row.seen < row.ops:
                count = str(row.ops) if row.seen == row.ops else f"{row.seen} of {row.ops}"
                table.add_row(str(rank), row.kind.value.replace("_", "-"), count, *_milliseconds(row.seconds))
    return table


_SIDES = ("predicted", "measured")


def _either(row: KindRow, side: str) -> float:
    return getattr(row.seconds, side) or 0.0


def _milliseconds(pair: Pair) -> tuple[str, str, str]:
    return _cells(pair, 1000, "ms")


def _mebibytes(pair: Pair) -> tuple[str, str, str]:
    return _cells(pair, 2**-20, "MiB")


def _cells(pair: Pair, times: float, unit: str) -> tuple[str, str, str]:
    def cell(figure: float | None) -> str:
        return "-" if figure is None else f"{figure * times:,.2f} {unit}"

    return cell(pair.predicted), cell(pair.measured), "-" if pair.ratio is None else f"{pair.ratio:.2f}"

"""The tables of `shardlab compare`, for a terminal of 80 columns or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import print_path, stdout_console, table_of
from shardlab.recorded.compare import Comparison, KindRow, Pair

SHOWN_RANKS = 8
"""Ranks that are shown at most; --json has all."""

NOTE = (
    "exposed communication: a rank waits for it; idle: a rank waits for others; an op's time is that of all it counts "
    "in a step"
)

NEGLIGIBLE = 1e-3
"""A kind of op that takes less than this share of its rank's time, on both sides, is left out."""


def print_comparison(
    comparison: Comparison,
    title: str,
    written: Sequence[Path] = (),
    limit: str = "",
    console: Console | None = None,
) -> None:
    """Print the step, the ranks and their ops.

    Args:
        written: files that were made.
        limit: of the recipe's framework, which does not run the plan ("": it does).
    """
    console = console or stdout_console()
    console.print(Text.assemble((title, "bold cyan")), soft_wrap=True)
    for sentence in comparison.missing:
        console.print(Text(f"incomplete: {sentence}", "yellow"), soft_wrap=True)
    if limit:
        console.print(Text(f"note: {limit}", "yellow"), soft_wrap=True)
    if comparison.step.predicted is None:
        _print_how_to_predict(console, max(2, len(comparison.ranks)))
    console.print()
    console.print(_step_table(comparison))
    console.print()
    console.print(_op_table(comparison))
    console.print()
    ratio = "" if comparison.step.predicted is None else "; ratio: predicted over measured"
    console.print(f"{NOTE}{ratio}", style="dim")
    if len(comparison.ranks) > SHOWN_RANKS:
        console.print(Text(f"ranks 0-{SHOWN_RANKS - 1} of {len(comparison.ranks)}; --json has all", "dim"))
    if written:
        console.print()
    for path in written:
        print_path(console, "written to", path)


def _print_how_to_predict(console: Console, ranks: int) -> None:
    console.print(Text("nothing is predicted: this machine is not measured yet; to measure it, run", "yellow"))
    for what in ("collectives", "compute"):
        console.print(Text(f"  shardlab bench {what} --ranks {ranks}", "bold"), soft_wrap=True)
    console.print(Text("or name another one, such as --cluster h100x8", "yellow"))


class _Pairs:
    """A table of pairs; without a prediction it has what was measured alone.

    Args:
        left: headings of the first columns, which are words.
        predicted: whether there is a prediction.
    """

    def __init__(self, *left: str, predicted: bool) -> None:
        self._predicted = predicted
        figures = ("predicted", "measured", "ratio") if predicted else ("measured",)
        self.table = table_of(*left, *figures, words=len(left))

    def add(self, *words: str, pair: Pair, times: float = 1e3, unit: str = "ms") -> None:
        """A row: words, and a pair of seconds, or of what becomes `unit` by `times`."""

        def cell(figure: float | None) -> str:
            return "-" if figure is None else f"{figure * times:,.2f} {unit}"

        ratio = "-" if pair.ratio is None else f"{pair.ratio:.2f}"
        cells = (cell(pair.predicted), cell(pair.measured), ratio) if self._predicted else (cell(pair.measured),)
        self.table.add_row(*words, *cells)


def _step_table(comparison: Comparison) -> Table:
    pairs = _Pairs("", "rank", predicted=comparison.step.predicted is not None)
    pairs.add("step", "all", pair=comparison.step)
    rows = comparison.ranks[:SHOWN_RANKS]
    for words, name in (("computes", "computing"), ("exposed communication", "exposed"), ("idle", "idle")):
        for row in rows:
            pairs.add(words, str(row.rank), pair=getattr(row, name))
    for row in rows:
        pairs.add("peak memory", str(row.rank), pair=row.memory, times=2**-20, unit="MiB")
    return pairs.table


def _op_table(comparison: Comparison) -> Table:
    pairs = _Pairs("rank", "op", "count", predicted=comparison.step.predicted is not None)
    for rank in range(min(len(comparison.ranks), SHOWN_RANKS)):
        rows = [row for row in comparison.kinds if row.rank == rank]
        whole = [sum(_either(row, side) for row in rows) for side in _SIDES]
        for row in rows:
            shares = [_either(row, side) > NEGLIGIBLE * all_ for side, all_ in zip(_SIDES, whole, strict=True)]
            if any(shares) or row.seen < row.ops:
                count = str(row.ops) if row.seen == row.ops else f"{row.seen} of {row.ops}"
                pairs.add(str(rank), row.kind.value.replace("_", "-"), count, pair=row.seconds)
    return pairs.table


_SIDES = ("predicted", "measured")


def _either(row: KindRow, side: str) -> float:
    return getattr(row.seconds, side) or 0.0

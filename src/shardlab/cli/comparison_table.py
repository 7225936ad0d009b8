"""The tables of `shardlab compare`, for a terminal of 80 columns or a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import print_path, print_whole, stdout_console, table_of
from shardlab.recorded.compare import Comparison, KindRow, Pair
from shardlab.train.saved import VALIDATION

SHOWN_RANKS = 8
"""Ranks that are shown at most; --json has all."""

SHOWN_STEPS = 6
"""Steps at which losses of several runs are shown; --json has all."""

NOTE = (
    "exposed communication: a rank waits for communication; idle: a rank waits for other ranks; the "
    "time of an op is its total in a step"
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


def print_runs(
    console: Console, runs: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]], written: Sequence[Path]
) -> None:
    """Print a row for each of several runs, and their losses at some of the steps that all have on record.

    Args:
        runs: figures of each, as `shardlab.cli.compare.of_run` gives them.
        steps: as `shardlab.cli.compare.common_steps` gives them.
        written: files that were made.
    """
    table = table_of("", "run", "strategy", "steps", "loss", "validation", "tokens/s", "ms/step", "MiB", words=3)
    for number, run in enumerate(runs, 1):
        figures = (("loss", 1.0, ".3f"), (VALIDATION, 1.0, ".3f"), ("tps", 1.0, ",.0f"), ("dt", 1e3, ",.1f"))
        cells = (_cell(run.get(name), times, form) for name, times, form in (*figures, ("memory", 2**-20, ",.0f")))
        table.add_row(str(number), Text(run["folder"]), Text(run["strategy"]), str(run["steps"]), *cells)
    print_whole(console, table, folded=1)
    console.print()
    if not steps:
        console.print("no step is recorded in all of the runs")
    else:
        losses = table_of("loss of step", *map(str, range(1, len(runs) + 1)), words=0)
        shown = sorted({round(at * (len(steps) - 1) / (SHOWN_STEPS - 1)) for at in range(SHOWN_STEPS)})
        for row in (steps[at] for at in shown):
            losses.add_row(str(row["step"] + 1), *(_cell(loss, 1.0, ".4f") for loss in row["loss"]))
        print_whole(console, losses, folded=0)
        console.print()
        console.print("tokens/s, ms/step: medians of the recorded steps after the first 3", style="dim")
    for path in written:
        print_path(console, "written to", path)


def _cell(figure: float | None, times: float, form: str) -> str:
    return "-" if figure is None else format(figure * times, form)


def _print_how_to_predict(console: Console, ranks: int) -> None:
    console.print(
        Text("there is no prediction, because this machine is not measured yet; to measure it, run", "yellow")
    )
    for what in ("collectives", "compute"):
        console.print(Text(f"  shardlab bench {what} --ranks {ranks}", "bold"), soft_wrap=True)
    console.print(Text("or give another cluster, such as --cluster h100x8", "yellow"))


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

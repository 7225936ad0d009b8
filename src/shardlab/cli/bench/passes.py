"""`shardlab bench strategies --each-pass`: what each pass gains on each strategy, predicted and measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import print_fact, table_of
from shardlab.cli.train.choose_passes import passed_here
from shardlab.language import Refused, UserError
from shardlab.language.pass_names import named_passes
from shardlab.measure.side_by_side.results import Size, Spread, StrategyPair
from shardlab.measure.side_by_side.sides import PassTurns, time_passes_rank
from shardlab.simulate.hardware.cluster import DEVICE
from shardlab.simulate.passes import GAIN, Passed, settled
from shardlab.strategies.load import load
from shardlab.train.launch.processes import RankFailed
from shardlab.train.launch.ranks import run_ranks

TOGETHER = "together"


def passes_row(pair: StrategyPair, size: Size, ranks: int, turns: int) -> PassesRow:
    """Choose a pair's passes, and time its program as it is written and after each of them."""
    row = PassesRow(pair, size, why_not=pair.why_not(size, ranks))
    if row.why_not:
        return row
    try:
        its = load(pair.name), pair.job(size, ranks), pair.passes
        passed, cluster = passed_here(*its, least=GAIN, lenient=True)
        row = replace(row, passed=passed, device=cluster.device.name)
        variants = [settled(row.helped[: count + 1]) for count in range(len(row.helped))]
        if len(variants) == 1:
            return row
        timed = run_ranks(ranks, time_passes_rank, pair, size, variants, turns)
    except (RankFailed, Refused, UserError) as error:
        return replace(row, why_not=str(error), failed=True)
    if not timed.agrees:
        differ = f"losses differ by {timed.loss_error:.1e} of them, so no time counts"
        return replace(row, why_not=differ, failed=True)
    return replace(row, timed=timed)


def settled_pair(pair: StrategyPair, size: Size, ranks: int) -> StrategyPair:
    """A pair whose passes have the settings that help by this machine's prices; others are left out."""
    if pair.passes == "none":
        return pair
    found, _ = passed_here(load(pair.name), pair.job(size, ranks), pair.passes, lenient=True)
    return replace(pair, passes=settled(found))


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


@dataclass(frozen=True)
class PassesRow:
    """Our program of a pair with one size.

    Attributes:
        pair, size: which.
        passed: the program as it is written, and as each pass leaves it.
        device: whose prices have chosen and predicted.
        timed: what was measured of those that a pass has changed; None if nothing was.
        why_not: in that case the reason.
        failed: whether something went wrong.
    """

    pair: StrategyPair
    size: Size
    passed: Sequence[Passed] = ()
    device: str = ""
    timed: PassTurns | None = None
    why_not: str = ""
    failed: bool = False

    @property
    def helped(self) -> list[Passed]:
        """The program as it is written, and as each pass leaves it that makes it better."""
        return [each for each in self.passed if each.setting or not each.name]

    @property
    def predicted(self) -> list[float]:
        """By what share of the step before it each of these passes makes it shorter."""
        return [1 - after.end / before.end for before, after in pairwise(self.helped)]

    @property
    def together(self) -> float:
        """By what share all of them do."""
        return 1 - self.helped[-1].end / self.helped[0].end

    def as_dict(self) -> dict[str, Any]:
        """All that is known of it; gains are shares of the step before the pass."""
        measured = self.timed.gains if self.timed else [None] * len(self.predicted)
        return {
            "strategy": self.pair.name,
            "size": self.size.name,
            "prices": self.device,
            "why_not": self.why_not or None,
            "passes": [
                {
                    "pass": settled([each]),
                    "predicted_gain": predicted,
                    "measured_gain": spread and spread._asdict(),
                }
                for each, predicted, spread in zip(self.helped[1:], self.predicted, measured, strict=True)
            ],
            "nothing": {each.name: each.why_not for each in self.passed if each.why_not},
            **({"loss_error": self.timed.loss_error} if self.timed else {}),
            **({"turns": [side.seconds for side in self.timed.sides]} if self.timed else {}),
        }


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

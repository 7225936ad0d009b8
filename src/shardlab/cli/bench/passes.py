"""`shardlab bench strategies --each-pass`: predict and measure the gain of each pass on each strategy.

`passes_row` chooses the passes of a strategy by this machine's prices, and times the program after each of them.
`add_passes` adds the gains to a report.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from rich.text import Text

from shardlab.cli.console import Report, table_of
from shardlab.cli.train.choose_passes import run_passes_here
from shardlab.language import Refused, UserError
from shardlab.language.pass_names import named_passes
from shardlab.measure.side_by_side.results import Size, Spread, StrategyPair
from shardlab.measure.side_by_side.sides import PassTurns, time_passes_rank
from shardlab.simulate.hardware.cluster import DEVICE
from shardlab.simulate.passes import GAIN, PassResult, helpful_names
from shardlab.strategies.load import load
from shardlab.train.faults import RankFailed
from shardlab.train.launch.ranks import run_ranks

TOGETHER = "together"


def passes_row(pair: StrategyPair, size: Size, ranks: int, turns: int) -> PassesRow:
    """Choose the passes of a pair, and time its program as written and after each of them."""
    row = PassesRow(pair, size, why_not=pair.why_not(size, ranks))
    if row.why_not:
        return row
    try:
        results, cluster = run_passes_here(
            load(pair.name), pair.job(size, ranks), pair.passes, least_gain=GAIN, lenient=True
        )
        row = replace(row, pass_results=results, device=cluster.device.name)
        variants = [helpful_names(row.useful_results[: count + 1]) for count in range(len(row.useful_results))]
        if len(variants) == 1:
            return row
        timing = run_ranks(ranks, time_passes_rank, pair, size, variants, turns)
    except (RankFailed, Refused, UserError) as error:
        return replace(row, why_not=str(error), failed=True)
    if not timing.agrees:
        reason = f"losses differ by {timing.loss_error:.1e} (relative), so times do not count"
        return replace(row, why_not=reason, failed=True)
    return replace(row, timing=timing)


def settle_pair(pair: StrategyPair, size: Size, ranks: int) -> StrategyPair:
    """Return a pair with the passes that help by this machine's prices, and with their settings fixed."""
    if pair.passes == "none":
        return pair
    results, _ = run_passes_here(load(pair.name), pair.job(size, ranks), pair.passes, lenient=True)
    return replace(pair, passes=helpful_names(results))


def add_passes(report: Report, rows: Sequence[PassesRow], ranks: int) -> None:
    """Add a table of gains for each size of the model."""
    for title, of_size in groupby(rows, lambda row: row.size.title(ranks)):
        size_rows = list(of_size)
        report.line(f"[bold]{title}[/]\n")
        table = table_of("ours", "pass", "predicted", "measured", "middle half", words=2)
        for row in size_rows:
            for number, cells in enumerate(_cells(row)):
                table.add_row("" if number else row.pair.name, *cells)
        report.line(table)
        report.line()
        for row in size_rows:
            if row.why_not:
                report.fact(row.pair.name, f"not timed: {row.why_not.splitlines()[-1]}", style="yellow")
            elif idle_passes := _idle_passes_text(row):
                report.fact(row.pair.name, idle_passes)
        report.line()
    assumed = any(row.device == DEVICE for row in rows)
    prices = "of unmeasured cores (shardlab bench measures them)" if assumed else "that shardlab bench measured"
    report.line(
        "[dim]gain of a pass: relative decrease of the step time\n"
        f"predicted: with prices {prices}\n"
        "measured: median over pairs of alternating steps, and the range of their middle half[/]"
    )


@dataclass(frozen=True)
class PassesRow:
    """Passes of one strategy at one size of the model, with their predicted and measured gains.

    Attributes:
        pair, size: pair of strategies, and size of the model. Only Shardlab's strategy of the pair is timed.
        pass_results: the program as written, and after each pass.
        device: device whose prices chose the passes and predicted their gains.
        timing: measurements of the program as written and after each useful pass (None: nothing was measured).
        why_not: reason if nothing was measured.
        failed: whether the measurement failed.
    """

    pair: StrategyPair
    size: Size
    pass_results: Sequence[PassResult] = ()
    device: str = ""
    timing: PassTurns | None = None
    why_not: str = ""
    failed: bool = False

    @property
    def useful_results(self) -> list[PassResult]:
        """Program as written, and after each pass that improved it."""
        return [result for result in self.pass_results if result.setting or not result.name]

    @property
    def predicted(self) -> list[float]:
        """Predicted gain of each useful pass, as a share of the step before it."""
        return [1 - result.end / previous.end for previous, result in pairwise(self.useful_results)]

    @property
    def together(self) -> float:
        """Predicted gain of all passes together, as a share of the step as written."""
        return 1 - self.useful_results[-1].end / self.useful_results[0].end

    def as_dict(self) -> dict[str, Any]:
        """Return the row for --json. Gains are shares of the step before the pass."""
        measured = self.timing.gains if self.timing else [None] * len(self.predicted)
        return {
            "strategy": self.pair.name,
            "size": self.size.name,
            "prices": self.device,
            "why_not": self.why_not or None,
            "passes": [
                {
                    "pass": helpful_names([result]),
                    "predicted_gain": predicted,
                    "measured_gain": spread and spread._asdict(),
                }
                for result, predicted, spread in zip(self.useful_results[1:], self.predicted, measured, strict=True)
            ],
            "nothing": {result.name: result.why_not for result in self.pass_results if result.why_not},
            **({"loss_error": self.timing.loss_error} if self.timing else {}),
            **({"turns": [side.seconds for side in self.timing.sides]} if self.timing else {}),
        }


def _idle_passes_text(row: PassesRow) -> str:
    """Return the passes that changed nothing. If the user named a pass, the reason is added."""
    requested = {request.name for request in named_passes(row.pair.passes) if request.by_name}
    texts = [
        f"{result.name} ({result.why_not})" if result.name in requested else result.name
        for result in row.pass_results
        if result.why_not
    ]
    return f"nothing to do, or to gain: {', '.join(texts)}" if texts else ""


def _cells(row: PassesRow) -> Iterator[tuple[str | Text, ...]]:
    if not row.predicted:
        yield Text("none", "dim"), "", "", ""
    measured = row.timing.gains if row.timing else [None] * len(row.predicted)
    for result, predicted, spread in zip(row.useful_results[1:], row.predicted, measured, strict=True):
        yield helpful_names([result]), *_gains(predicted, spread)
    if len(row.predicted) > 1:
        yield TOGETHER, *_gains(row.together, row.timing and row.timing.gain)


def _gains(predicted: float, measured: Spread | None) -> tuple[str, str, str]:
    if measured is None:
        return f"{predicted:.1%}", "", ""
    return f"{predicted:.1%}", f"[bold]{measured.median:.1%}[/]", f"{measured.low:.1%} to {measured.high:.1%}"

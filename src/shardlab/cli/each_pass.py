"""`shardlab bench strategies --each-pass`: what each pass gains on each strategy, predicted and measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from shardlab.cli.settling import passed_here
from shardlab.measure.side_by_side.each_pass import PassTurns, time_passes_rank
from shardlab.measure.side_by_side.pairs import Size, StrategyPair
from shardlab.passes import GAIN, Passed, settled
from shardlab.program import Refused, UserError
from shardlab.strategies.load import load
from shardlab.train.launch import run_ranks
from shardlab.train.processes import RankFailed


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

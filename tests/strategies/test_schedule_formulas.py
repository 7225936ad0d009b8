"""docs/schedules.md: every formula in its table is what a clock finds."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from shardlab.strategies.schedules import SCHEDULES
from tests.strategies.action_clock import PassTimes, cost, peak_live

TABLE = Path(__file__).parents[2] / "docs" / "schedules.md"

ROWS = [
    [cell.strip().strip("`") for cell in line.strip("| ").split(" | ")]
    for line in TABLE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith(("| schedule", "| ---"))
]


def test_the_table_has_every_schedule() -> None:
    names = [name.removesuffix(", in pairs") for name, *_ in ROWS]
    assert list(dict.fromkeys(names)) == list(SCHEDULES)


@pytest.mark.parametrize(("name", "stages", "bubble", "peak", "holds", "_source"), ROWS, ids=[row[0] for row in ROWS])
def test_its_formulas_hold(name: str, stages: str, bubble: str, peak: str, holds: str, _source: str) -> None:
    pairs = name.endswith(", in pairs")  # a forward and a backward pass that overlap are one pass with two results
    schedule = SCHEDULES[name.removesuffix(", in pairs")]
    tried = 0
    for p, m, v in product((1, 2, 3, 4), (1, 3, 4, 8, 9, 12), (1, 2, 3) if stages == "any" else (int(stages),)):
        for forward, backward, weight in ((1, 1, 1), (2, 2, 1), (3, 4, 3), (4, 3, 2), (5, 6, 2), (1, 1, 2)):
            known = {"p": p, "m": m, "v": v, "F": forward, "B": backward, "W": weight, "min": min, "all": True}
            if not eval(holds, known):
                continue
            times = PassTimes(forward / v, backward / v, weight / v)
            work = m * (forward + backward + weight)
            assert cost(schedule, p, m, v, times, pairs=pairs) - work == pytest.approx(eval(bubble, known)), known
            assert peak_live(schedule, p, m, v) == pytest.approx(eval(peak, known)), known
            tried += p > 1
    assert tried >= 5


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5, 8, 13])
def test_a_schedule_that_is_said_to_hold_no_more_than_1f1b_never_does(microbatches: int) -> None:
    for ranks in (1, 2, 3, 4):
        most = peak_live(SCHEDULES["1f1b"], ranks, microbatches, 1)
        assert peak_live(SCHEDULES["zb-h1"], ranks, microbatches, 1) == most
        assert peak_live(SCHEDULES["zb-v"], ranks, microbatches, 2) == most

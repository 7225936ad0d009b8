"""Bubbles that were published: the Zero Bubble paper's Table 5 follows from the times in its Table 9."""

from __future__ import annotations

import pytest

from shardlab.strategies.schedules import SCHEDULES
from tests.strategies.action_clock import PassTimes, cost
from tests.strategies.zero_bubble_table import TABLE, Row


def bubble(name: str, row: Row, stages_per_rank: int = 1) -> float:
    """The paper's bubble rate, where each of a rank's stages takes its part of the times."""
    forward, backward_input, backward_weight = (time / stages_per_rank for time in row.times.passes)
    part = PassTimes(forward, backward_input, backward_weight, row.times.latency)
    total = cost(SCHEDULES[name], row.ranks, row.microbatches, stages_per_rank, part)
    return 1 - row.microbatches * sum(row.times.passes) / total


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("row", TABLE)
def test_the_zero_bubble_papers_rates_follow_from_its_times(name: str, row: Row) -> None:
    assert round(bubble(name, row), 4) == row.rates[name]


@pytest.mark.parametrize("row", TABLE)
def test_interleaved_comes_near_with_equal_stages(row: Row) -> None:
    """Section 5.1: each layer is a stage, but the first and the last rank have one fewer than is reckoned with here."""
    assert bubble("interleaved-1f1b", row, row.layers_per_rank) == pytest.approx(
        row.rates["interleaved-1f1b"], abs=0.004
    )

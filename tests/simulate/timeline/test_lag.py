"""Ranks that wait for each other come apart where communication needs their cores."""

from __future__ import annotations

import pytest

from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.simulate.timeline.run import Idle, waited_until
from tests.simulate.predict.test_estimate import of_program
from tests.simulate.timeline.fakes import FakePrices

STOOD = [Idle(0, 1.0, 2.0)]
"""A rank that has computed since 2."""


@pytest.mark.parametrize(("most", "until"), [(9.0, 7.5), (1.0, 7.0)])
def test_a_rank_that_waits_loses_a_share_of_what_it_computed_and_no_more_than_the_most(
    most: float, until: float
) -> None:
    assert waited_until(STOOD, 5.0, 4.0, 6.0, 0.0, Lag(0.5, most)) == until


def test_what_was_over_before_costs_the_part_that_is_not_hidden() -> None:
    assert waited_until(STOOD, 5.0, 3.0, 4.0, 0.0, Lag(0.5, 9.0)) == 5.0
    assert waited_until(STOOD, 5.0, 3.0, 4.0, 0.0, Lag(0.5, 9.0, hidden=0.5)) == 5.75
    assert waited_until([], 5.0, 5.0, 5.0, 0.0, Lag(0.5, 9.0, hidden=0.5)) == 5.0


def test_what_is_computed_beside_communication_takes_longer() -> None:
    assert waited_until(STOOD, 5.0, 1.5, 6.0, 0.5) == 6.0 + 0.5 * 3.0


@pytest.mark.parametrize("strategy", ["fsdp", "gpipe"])
def test_a_step_lags_where_it_waits_for_collectives_or_for_messages(strategy: str) -> None:
    steps = [of_program(strategy, 2, 4, 2, FakePrices(lag=lag)).step for lag in (NO_LAG, Lag(0.5, 0.1))]
    assert steps[0] < steps[1]

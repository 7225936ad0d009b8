"""Passes are counted as they are followed."""

from __future__ import annotations

import numpy as np
import pytest

from shardlab.planner.bounds.pipelines import UNSPLIT, pass_counts
from shardlab.planner.bounds.schedule_order import LaidOrder
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.find import find_schedule
from shardlab.strategies.schedules.steps import Steps, resolve_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_counts_are_those_of_the_order_that_is_followed(name: str) -> None:
    schedule = find_schedule(name)
    assert not isinstance(schedule, Steps)
    steps = resolve_schedule(schedule, 4, 8, schedule.stages_per_rank or 2)
    counts, order = pass_counts(steps), LaidOrder(steps)
    every, visits = np.zeros_like(counts.all), np.zeros_like(counts.all)
    np.add.at(every, (order.kind, order.stage), 1)
    np.add.at(visits, (order.kind, order.stage), order.visits)
    assert (counts.all == every).all()
    assert (counts.visits == visits).all()
    assert sorted(counts.begins) == sorted(order.stage[order.begins])
    assert (name in UNSPLIT) == (not every[2].any())

"""Dealing discards only what does not fit, or is slower than what is wanted."""

from __future__ import annotations

from functools import cache

import pytest

from shardlab.planner.dealing import Dealt, deal
from shardlab.planner.floors import Floors
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Limits, Problem
from shardlab.planner.shape_pipelines import follows, pipelined
from shardlab.planner.space import dealt, shapes
from shardlab.planner.workers import Asked, answer
from shardlab.predict.recipe import OWN
from shardlab.strategies.plan import Plan
from tests.planner.problems import GIB, passes_of, problem

LITTLE = problem(
    devices=8,
    memory=0.2 * GIB + OWN.memory.context_bytes,
    limits=Limits(fixed={"tp": 2, "pp": 2, "recompute": "none"}, micro_batch_size=1),
    hidden_size=1024,
)


def dealt_by(floors: Floors, shape: PlanShape, plan: Plan, least: float, *, whole: bool = True) -> Dealt:
    return deal(floors, shape, plan, passes_of(floors, shape, plan), least=least, whole=whole)


def pipelines(asked: Problem) -> list[tuple[PlanShape, Plan]]:
    return [(shape, plan) for shape in shapes(asked) for plan in pipelined(asked, shape) if follows(asked, shape, plan)]


@cache
def forecasts_of_what_fits() -> dict[str, float]:
    """Forecast step times in seconds of all candidates that fit."""
    forecasts: dict[str, float] = {}
    for shape, plan in pipelines(LITTLE):
        for candidate in dealt(LITTLE, shape, plan):
            found = answer(LITTLE, Asked(candidate))
            if found is not None and found.forecast.memory.fits and found.forecast.memory.safe:
                forecasts[repr(candidate)] = found.forecast.seconds
    return forecasts


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_what_fits_and_is_fast_enough_is_dealt(share: float) -> None:
    floors, forecasts, every = Floors(LITTLE), forecasts_of_what_fits(), pipelines(LITTLE)
    assert len(every) > 5
    least = sorted(forecasts.values())[int(share * len(forecasts))]
    wanted = {name for name, seconds in forecasts.items() if seconds <= least}
    for whole in (False, True):
        found = [each for shape, plan in every for each in dealt_by(floors, shape, plan, least, whole=whole).candidates]
        assert wanted <= {repr(each.candidate) for each in found}
        assert all(each.seconds <= least for each in found)
        assert len(found) < sum(1 for shape, plan in every for _ in dealt(LITTLE, shape, plan))

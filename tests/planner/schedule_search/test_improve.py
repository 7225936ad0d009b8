"""Local search: weight halves fill gaps, and no proposal breaks the limits."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings

from shardlab.planner.schedule_search.greedy import greedy_orders, policies
from shardlab.planner.schedule_search.improve import fill, improve, skeleton_of, with_less_memory
from shardlab.planner.schedule_search.problem import ScheduleProblem, StageCosts, equal_stages
from shardlab.planner.schedule_search.search import search_schedule
from shardlab.planner.schedule_search.timing import Passes, timing_of
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.steps import resolve_schedule
from tests.planner.schedule_search.problems import problems
from tests.support.thorough import examples


@settings(max_examples=examples(40), deadline=None)
@given(problems())
def test_improved_schedules_fit_and_take_the_time_that_is_said(problem: ScheduleProblem) -> None:
    passes = Passes(problem)
    start = skeleton_of(passes, greedy_orders(passes, next(policies(passes))), 0.01)
    filled = fill(passes, start)
    assert filled is not None
    remaining = iter(range(60))
    improved = improve(passes, [start], Random(1), lambda best: next(remaining, None) is None)
    assert improved.time <= filled.time + 1e-9
    assert passes.fits(improved.orders)
    assert sorted(pass_number for order in improved.orders for pass_number in order) == list(range(passes.count))
    recomputed = timing_of(passes, improved.orders)
    assert recomputed is not None
    assert recomputed.time == pytest.approx(improved.time)


def test_the_weight_halves_of_zb_h1_are_found_again() -> None:
    problem = ScheduleProblem(4, 8, equal_stages(4, 1, 1, 1), limit=4)
    passes = Passes(problem)
    orders, _ = passes.orders_of(resolve_schedule(SCHEDULES["1f1b"], 4, 8, 1))
    filled, published = fill(passes, skeleton_of(passes, orders, 1.0)), None
    published = timing_of(passes, passes.orders_of(resolve_schedule(SCHEDULES["zb-h1"], 4, 8, 1))[0])
    assert filled is not None
    assert published is not None
    assert filled.time == published.time


def test_an_interrupted_search_returns_the_best_so_far() -> None:
    passes = Passes(ScheduleProblem(4, 8, equal_stages(4, 1, 1, 1, 2), limit=3, placement="vee"))
    start = skeleton_of(passes, greedy_orders(passes, next(policies(passes))), 1.0)
    best_times: list[float] = []

    def interrupt(best: float) -> bool:
        best_times.append(best)
        if len(best_times) == 200:
            raise KeyboardInterrupt
        return False

    result = improve(passes, [start], Random(0), interrupt)
    assert result.time == min(best_times)


def test_equally_fast_schedules_with_less_memory_are_preferred() -> None:
    """If the last stage takes most of the time, the others are never late, however little they hold."""
    free = ScheduleProblem(4, 12, (*equal_stages(4, 1, 1, 1)[:3], StageCosts(9, 9, 9, 1)))
    result = search_schedule(free, evaluations=0)
    assert result.is_optimal
    assert max(result.timing.peaks) < 12


@settings(max_examples=examples(40), deadline=None)
@given(problems())
def test_less_memory_costs_no_time(problem: ScheduleProblem) -> None:
    passes = Passes(problem)
    filled = fill(passes, skeleton_of(passes, greedy_orders(passes, next(policies(passes))), 0.01))
    assert filled is not None
    leaner = with_less_memory(filled)
    assert leaner.time <= filled.time * (1 + 1e-9)
    assert max(leaner.peaks) <= max(filled.peaks)
    assert passes.fits(leaner.orders)

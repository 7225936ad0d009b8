"""Times of orders: those of an independent clock, for every built-in schedule and for unequal stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.planner.schedule_search.problem import ScheduleProblem, equal_stages
from shardlab.planner.schedule_search.search import published_steps
from shardlab.planner.schedule_search.timing import Passes, timing_of
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.steps import Message, resolve_schedule
from tests.strategies.action_clock import PassTimes, cost, peak_live
from tests.support.thorough import examples

NAMES = [name for name in SCHEDULES if name != "interleaved-1f1b"]


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from(NAMES), st.integers(2, 5), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4))
def test_times_and_memory_are_those_of_an_independent_clock(
    name: str, ranks: int, microbatches: int, input: int, weight: int
) -> None:
    schedule = SCHEDULES[name]
    stages_per_rank = schedule.stages_per_rank or 1
    stages = equal_stages(ranks, stages_per_rank, stages_per_rank * input, stages_per_rank * weight, stages_per_rank)
    placement = "vee" if stages_per_rank == 2 else "loop"
    problem = ScheduleProblem(ranks, microbatches, stages, 0.5, placement=placement, objective="span")
    passes = Passes(problem)
    orders, whole = passes.orders_of(resolve_schedule(schedule, ranks, microbatches, stages_per_rank))
    timing = timing_of(passes, orders, whole)
    assert timing is not None
    clock = PassTimes(1, input, weight, 0.5)
    starts = [timing.end[order[0]] - passes.duration[order[0]] for order in orders]
    spans = [timing.end[order[-1]] - start for order, start in zip(orders, starts, strict=True)]
    assert max(spans) == pytest.approx(cost(schedule, ranks, microbatches, stages_per_rank, clock))
    assert timing.time <= max(spans) + 1e-9, "a rank may start later"
    assert max(timing.peaks) == pytest.approx(peak_live(schedule, ranks, microbatches, stages_per_rank))
    assert timing.time >= problem.lower_bound - 1e-9


def test_orders_that_wait_for_each_other_have_no_times() -> None:
    passes = Passes(ScheduleProblem(2, 1, equal_stages(2, 1, 1, 1)))
    orders, _ = passes.orders_of(resolve_schedule(SCHEDULES["zb-h1"], 2, 1, 1))
    assert timing_of(passes, orders) is not None
    assert timing_of(passes, [order[::-1] for order in orders]) is None


def test_the_causes_of_idle_time_add_up() -> None:
    problem = ScheduleProblem(4, 6, equal_stages(4, 1, 1, 1), message=0.25)
    passes = Passes(problem)
    orders, whole = passes.orders_of(resolve_schedule(SCHEDULES["1f1b"], 4, 6, 1))
    timing = timing_of(passes, orders, whole)
    assert timing is not None
    idle = timing.idle_by_cause()
    busy = sum(passes.duration) / (4 * max(timing.end))
    assert sum(idle.values()) + busy == pytest.approx(1)
    assert all(share > 0 for share in idle.values())


@pytest.mark.parametrize("name", published_steps(ScheduleProblem(4, 6, equal_stages(4, 1, 1, 1, 2), placement="vee")))
def test_every_message_stands_once_on_both_sides(name: str) -> None:
    problem = ScheduleProblem(4, 6, equal_stages(4, 1, 1, 1, 2), placement="vee")
    passes = Passes(problem)
    timing = timing_of(passes, passes.orders_of(resolve_schedule(SCHEDULES[name], 4, 6, 2))[0])
    assert timing is not None
    steps = timing.steps()
    messages = [step for row in steps.of_ranks for step in row if isinstance(step, Message)]
    assert len(messages) == 2 * 2 * 6 * 6, "there and back over six of seven borders, at both ends"
    assert passes.orders_of(steps)[0] == timing.orders

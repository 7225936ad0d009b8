"""Greedy schedules: complete, within their limits, and never stuck."""

from __future__ import annotations

from itertools import islice

from hypothesis import given, settings

from shardlab.planner.schedule_search.greedy import Policy, greedy_orders, policies
from shardlab.planner.schedule_search.problem import ScheduleProblem, equal_stages
from shardlab.planner.schedule_search.timing import Passes, timing_of
from tests.planner.schedule_search.problems import problems
from tests.support.thorough import examples


@settings(max_examples=examples(60), deadline=None)
@given(problems())
def test_every_policy_makes_a_complete_schedule_that_fits(problem: ScheduleProblem) -> None:
    passes = Passes(problem)
    for policy in islice(policies(passes), 0, None, 37):
        orders = greedy_orders(passes, policy)
        assert sorted(pass_number for order in orders for pass_number in order) == list(range(passes.count))
        assert passes.fits(orders)
        assert timing_of(passes, orders) is not None


def test_room_for_one_microbatch_is_enough() -> None:
    problem = ScheduleProblem(4, 3, equal_stages(4, 1, 1, 1, 2), limit=1, placement="vee")
    passes = Passes(problem)
    orders = greedy_orders(passes, Policy(problem.limits))
    assert passes.fits(orders)


def test_with_room_for_more_forward_passes_the_zero_bubble_heuristic_comes_out() -> None:
    """The heuristic of zero-bubble (Primus' simulator at fd1eeabb, zb-heuristic-mem10) takes 103 for these costs."""
    passes = Passes(ScheduleProblem(8, 32, equal_stages(8, 1, 1, 1), limit=10))
    timing = timing_of(passes, greedy_orders(passes, next(policies(passes))))
    assert timing is not None
    assert timing.time == 103

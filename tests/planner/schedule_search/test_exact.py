"""The exact search: its bounds are true, and it proves small schedules optimal."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from shardlab.language import UserError
from shardlab.planner.schedule_search import exact
from shardlab.planner.schedule_search.exact import prove
from shardlab.planner.schedule_search.greedy import Policy, greedy_orders, policies
from shardlab.planner.schedule_search.problem import ScheduleProblem, StageCosts, equal_stages
from shardlab.planner.schedule_search.search import search_schedule
from shardlab.planner.schedule_search.timing import Passes, timing_of
from tests.planner.schedule_search.problems import problems
from tests.support.thorough import examples


def test_small_v_shaped_schedules_are_proved_optimal() -> None:
    result = search_schedule(ScheduleProblem(2, 4, equal_stages(2, 1, 1.2, 0.8, 2), 0.1, 2, "vee"), evaluations=300)
    assert not result.is_optimal, "the simple bounds do not prove it"
    proof = prove(result.timing, 30)
    assert proof.is_complete
    assert proof.timing is None
    assert proof.lower_bound == pytest.approx(result.timing.time, rel=1e-3)


@settings(max_examples=examples(10), deadline=None)
@given(problems(most_ranks=2, most_microbatches=3))
def test_the_solver_finds_nothing_faster_than_its_own_bound(problem: ScheduleProblem) -> None:
    passes = Passes(problem)
    start = timing_of(passes, greedy_orders(passes, next(policies(passes))))
    assert start is not None
    proof = prove(start, 20)
    best = proof.timing or start
    assert passes.fits(best.orders)
    assert best.time <= start.time
    assert problem.lower_bound <= best.time * (1 + 1e-9)
    assert proof.lower_bound <= best.time * (1 + 1e-9)
    if proof.is_complete:
        assert best.time <= proof.lower_bound * 1.001
        assert search_schedule(problem, evaluations=100).timing.time >= proof.lower_bound * (1 - 1e-9)


def test_schedules_of_whole_backward_passes_are_found() -> None:
    """A weight half that takes no time frees memory before the next forward pass, which starts at the same time."""
    problem = ScheduleProblem(2, 4, (StageCosts(1, 2, 0, 1),) * 2, limit=2)
    passes = Passes(problem)
    one_by_one = greedy_orders(passes, Policy(limits=(1.0, 1.0)))
    start = timing_of(passes, one_by_one)
    assert start is not None
    proof = prove(start, 20)
    assert proof.is_complete
    assert proof.timing is not None
    assert proof.timing.time < start.time


def test_a_large_problem_and_a_missing_solver_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = search_schedule(ScheduleProblem(8, 32, equal_stages(8, 1, 1, 1)), evaluations=1)
    with pytest.raises(UserError, match="has 768 passes, and the exact search takes at most 600"):
        prove(large.timing, 1)
    small = search_schedule(ScheduleProblem(2, 2, equal_stages(2, 1, 1, 1)), evaluations=1)
    monkeypatch.setattr(exact, "has_solver", lambda: False)
    with pytest.raises(UserError, match=r'install it with pip install "shardlab\[search\]"'):
        prove(small.timing, 1)

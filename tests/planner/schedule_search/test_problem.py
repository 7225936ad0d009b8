"""Problems of schedules: what is refused, and what no schedule can beat."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardlab.language import UserError
from shardlab.planner.schedule_search.problem import ScheduleProblem, StageCosts, equal_stages

ONE = equal_stages(4, 1, 1, 1)


def test_the_work_of_a_rank_and_the_way_to_it_bound_the_step() -> None:
    problem = ScheduleProblem(4, 8, ONE)
    assert problem.lower_bound == 3 + 8 * 3, "the last rank waits for three forward passes"
    assert replace(problem, objective="span").lower_bound == 8 * 3
    assert replace(problem, message=0.5).lower_bound == 3 * 1.5 + 8 * 3


def test_one_microbatch_passes_all_stages_forth_and_back() -> None:
    assert ScheduleProblem(4, 1, ONE).lower_bound == 4 + 4 + 1


def test_memory_bounds_how_many_microbatches_are_on_their_way() -> None:
    """A microbatch is on rank 0 for 9 units, so that with room for one they pass one after the other."""
    assert ScheduleProblem(4, 8, ONE, limit=1).lower_bound == 8 * 9
    assert ScheduleProblem(4, 8, ONE, limit=2).lower_bound == 8 * 9 / 2 + 0.5, (
        "the second microbatch starts a unit later"
    )


def test_a_v_has_its_last_stage_on_the_first_rank() -> None:
    problem = ScheduleProblem(2, 1, equal_stages(2, 1, 1, 1, 2), message=1, placement="vee")
    assert problem.ranks_of_stages == (0, 1, 1, 0)
    assert problem.lower_bound == 4 * 0.5 + 4 * 0.5 + 0.5 + 4 * 1, "within a rank there is no message"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stages": ONE[:3]}, "costs of 3 stages are given for 4 ranks; give a multiple of 4"),
        ({"placement": "vee"}, "costs of 4 stages are given for 4 ranks; give 8, two a rank"),
        ({"stages": (*ONE[:3], StageCosts(-1, 1, 1, 1))}, "forward of stage 3 is -1; give a number above 0"),
        ({"stages": (*ONE[:3], StageCosts(1, 1, math.nan, 1))}, "weight of stage 3 is nan; give a number of 0 or more"),
        ({"stages": (*ONE[:3], StageCosts(1, 1, 1, 1, -1))}, "kept_memory of stage 3 is -1; give a number of 0"),
        ({"stages": (*ONE[:3], StageCosts(1, 1, 1, 1, 2)), "limit": 1.5}, "a memory limit of 1.5 is below 2"),
        ({"message": math.inf}, "the time of a message is inf; give a number of 0 or more"),
        ({"limit": 0.5}, "a memory limit of 0.5 is below 1, which one microbatch takes on rank 0"),
        ({"limit": (1.0, 1.0, 0.5, 1.0)}, "a memory limit of 0.5 is below 1, which one microbatch takes on rank 2"),
        ({"limit": math.nan}, "a memory limit of nan is below 1"),
        ({"limit": (1.0,)}, "1 memory limits are given for 4 ranks"),
    ],
)
def test_a_problem_without_a_schedule_is_refused(changes: dict[str, object], words: str) -> None:
    fields: dict[str, object] = {"ranks": 4, "microbatches": 8, "stages": ONE}
    with pytest.raises(UserError, match=words):
        ScheduleProblem(**(fields | changes))  # pyright: ignore[reportArgumentType]

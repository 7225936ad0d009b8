"""V-Half and V-Min: the memory of their papers for any sizes and times, and the bubble if all passes take as long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.strategies.schedules import SCHEDULES, Schedule
from shardlab.strategies.schedules.actions import BackwardInput, BackwardWeight, Forward
from tests.strategies.action_clock import PassTimes, actions_of, cost, peak_live

V_HALF, V_MIN = SCHEDULES["v-half"], SCHEDULES["v-min"]
SCHEDULE = st.sampled_from([V_HALF, V_MIN])
RANKS, MICROBATCHES = st.integers(1, 16), st.integers(1, 40)


def limit(schedule: Schedule, ranks: int) -> int:
    return (ranks + 2) // 2 if schedule is V_HALF else (ranks + 4) // 3


def bubble(schedule: Schedule, ranks: int, microbatches: int, times: PassTimes) -> float:
    return cost(schedule, ranks, microbatches, 2, times) - 2 * microbatches * sum(times.passes)


@given(SCHEDULE, RANKS, MICROBATCHES)
def test_the_memory_limit_is_kept_and_used(schedule: Schedule, ranks: int, microbatches: int) -> None:
    peak = peak_live(schedule, ranks, microbatches, 2)
    assert peak <= limit(schedule, ranks)
    if microbatches >= ranks:
        assert peak == limit(schedule, ranks)


@given(SCHEDULE, RANKS, MICROBATCHES)
def test_every_pass_of_a_stage_takes_the_microbatches_in_order(schedule: Schedule, ranks: int, count: int) -> None:
    for rank, actions in enumerate(actions_of(schedule, ranks, count, 2)):
        for stage in (rank, 2 * ranks - 1 - rank):
            for kind in (Forward, BackwardInput, BackwardWeight):
                order = [action.microbatch for action in actions if action.stage == stage and type(action) is kind]
                assert order == list(range(count))


@given(SCHEDULE, st.integers(2, 16), st.integers(1, 30))
def test_the_bubble_is_at_most_what_the_authors_state(schedule: Schedule, ranks: int, extra: int) -> None:
    stated = ranks / 2 if schedule is V_HALF else 2 * ranks / 3
    assert bubble(schedule, ranks, ranks + extra, PassTimes()) <= stated * 2 * 3


@given(st.integers(2, 12), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_no_bubble_is_added_in_the_steady_phase_of_v_half_under_the_authors_condition(
    ranks: int, forward: int, backward: int, weight: int
) -> None:
    grows = bubble(V_HALF, ranks, 6 * ranks, PassTimes(forward, backward, weight)) > bubble(
        V_HALF, ranks, 4 * ranks, PassTimes(forward, backward, weight)
    )
    condition = weight + 2 * backward >= 2 * forward and weight + 2 * forward >= 2 * backward
    assert not (grows and condition)


@pytest.mark.parametrize(("times", "grows"), [((2, 2, 2), False), ((2, 3, 4), False), ((2, 3, 2), True)])
def test_the_bubble_of_v_min_grows_if_the_weight_half_is_short(times: tuple[int, int, int], grows: bool) -> None:
    of_32, of_64 = (bubble(V_MIN, 8, microbatches, PassTimes(*times)) for microbatches in (32, 64))
    assert (of_64 > of_32) == grows


@given(RANKS, MICROBATCHES)
def test_v_min_holds_no_more_than_v_half_and_v_half_no_more_than_zb_v(ranks: int, microbatches: int) -> None:
    peaks = [peak_live(SCHEDULES[name], ranks, microbatches, 2) for name in ("v-min", "v-half", "zb-v")]
    assert peaks == sorted(peaks)

"""Causes: from every op they lead back to the start of the step, and gaps are what compute leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.api import check
from shardlab.check import Checked
from shardlab.check import check as prove
from shardlab.language import OpKind
from shardlab.language.ops import COMMUNICATION
from shardlab.simulate.timeline import PUZZLE_COSTS, TEACHING_COSTS, Costs, Timeline, simulate
from shardlab.simulate.timeline.causes import Activity, Reason, activity_of, find_arrivals, find_causes, find_gaps
from shardlab.simulate.timeline.critical_path import critical_path
from shardlab.simulate.timeline.prices import Prices
from shardlab.simulate.timeline.run import Clocks
from shardlab.simulate.timeline.timeline import covered
from tests.support.random_plans import random_plan
from tests.support.thorough import examples

LINKS = replace(PUZZLE_COSTS, link_latency=True)
COSTS: dict[str, Prices] = {"teaching": TEACHING_COSTS, "puzzle": PUZZLE_COSTS, "links": LINKS}
NAMES = ["ddp", "fsdp", "gpipe", "1f1b", "zb-v", "pipeline", "tensor-parallel", "hsdp"]


def lead_back(activity: Activity) -> None:
    """From each op, the causes lead back in time to an op without a cause, and without a circle."""
    causes = find_causes(activity)
    tolerance = 1e-9 * activity.end
    for row, ops in enumerate(activity.rows):
        for at in range(len(ops)):
            place, visited = (row, at), set[tuple[int, int]]()
            while (cause := causes[place[0]][place[1]]).place is not None:
                assert place not in visited
                visited.add(place)
                later, earlier = activity.rows[place[0]][place[1]], activity.rows[cause.place[0]][cause.place[1]]
                assert earlier.start <= later.start + tolerance
                if cause.reason in (Reason.BUSY, Reason.SENT, Reason.STREAM):
                    assert earlier.end <= later.start + tolerance
                place = cause.place
            assert causes[place[0]][place[1]].reason in (Reason.FIRST, Reason.UNKNOWN)


def simulated(name: str, costs: Prices) -> tuple[Checked, Timeline]:
    checked = check(name)
    return checked, simulate(checked, costs)


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", NAMES)
def test_causes_lead_back_to_the_start(name: str, costs: str) -> None:
    _, timeline = simulated(name, COSTS[costs])
    lead_back(activity_of(timeline))


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10**6), costs=st.sampled_from(list(COSTS.values())))
def test_causes_of_any_plan_lead_back_to_the_start(seed: int, costs: Prices) -> None:
    timeline = simulate(prove(random_plan(seed).program), costs)
    lead_back(activity_of(timeline))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_simulated_is_unexplained(name: str) -> None:
    """Each gap ends with a communication that the rank awaits, or the rank has done everything."""
    _, timeline = simulated(name, TEACHING_COSTS)
    activity = activity_of(timeline)
    assert all(cause.reason is not Reason.UNKNOWN for causes in find_causes(activity) for cause in causes)
    for gap in find_gaps(activity):
        assert gap.awaited is not None or gap.next_compute is None


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("name", NAMES)
def test_gaps_and_compute_make_up_the_step(name: str, costs: str) -> None:
    _, timeline = simulated(name, COSTS[costs])
    activity = activity_of(timeline)
    for row, ops in enumerate(activity.rows):
        work = covered((op.start, op.end) for op in ops if op.computes)
        gaps = [gap for gap in find_gaps(activity) if gap.row == row]
        assert work + sum(gap.end - gap.start for gap in gaps) == pytest.approx(timeline.end)


@pytest.mark.parametrize("costs", ["teaching", "puzzle"])
@pytest.mark.parametrize("name", NAMES)
def test_the_causes_of_the_last_op_take_as_long_as_the_critical_path(name: str, costs: str) -> None:
    checked, timeline = simulated(name, COSTS[costs])
    activity, place = activity_of(timeline), (0, 0)
    causes = find_causes(activity)
    for row, ops in enumerate(activity.rows):
        for at, op in enumerate(ops):
            if op.end > activity.rows[place[0]][place[1]].end:
                place = row, at
    computed = {(link.row, link.op) for link in critical_path(checked, Clocks(checked, COSTS[costs]).run())}
    followed = set[tuple[int, int]]()
    while True:
        op, cause = activity.rows[place[0]][place[1]], causes[place[0]][place[1]]
        followed.add((place[0], op.op))
        if cause.place is None:
            break
        place = cause.place

    def compute_time(ops: set[tuple[int, int]]) -> float:
        tapes = checked.program.tapes
        length = {(row, e.op): e.end - e.start for row, events in enumerate(timeline.events) for e in events}
        return sum(length[key] for key in ops if tapes[key[0]][key[1]].kind not in COMMUNICATION)

    assert compute_time(followed) == pytest.approx(compute_time(computed))


def test_a_message_of_the_puzzles_is_sent_before_it_is_received() -> None:
    _, timeline = simulated("gpipe", PUZZLE_COSTS)
    activity = activity_of(timeline)
    causes = find_causes(activity)
    ((row, at),) = [(1, at) for at, op in enumerate(activity.rows[1]) if op.kind is OpKind.RECV][:1]
    cause = causes[row][at]
    assert cause.reason is Reason.SENT
    assert cause.place is not None
    sender = activity.rows[cause.place[0]][cause.place[1]]
    assert (cause.place[0], sender.kind) == (0, OpKind.SEND)


def test_collectives_of_one_stream_wait_for_each_other() -> None:
    _, timeline = simulated("zero-2", replace(PUZZLE_COSTS, collective=5.0))
    activity = activity_of(timeline)
    reasons = [cause.reason for causes in find_causes(activity) for cause in causes]
    assert Reason.STREAM in reasons


def test_a_rank_comes_to_an_op_no_later_than_it_starts() -> None:
    for costs in COSTS.values():
        _, timeline = simulated("zb-v", costs)
        activity = activity_of(timeline)
        for ops, arrivals in zip(activity.rows, find_arrivals(activity), strict=True):
            assert all(arrival <= op.start for op, arrival in zip(ops, arrivals, strict=True))
            assert arrivals == sorted(arrivals)


def test_ops_that_were_not_measured_are_left_out() -> None:
    _, timeline = simulated("gpipe", Costs())
    cut = Timeline(timeline.program, [events[: len(events) // 2] for events in timeline.events])
    activity = activity_of(cut)
    assert sum(map(len, activity.rows)) == sum(map(len, cut.events))
    lead_back(activity)

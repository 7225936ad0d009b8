"""The bubble of a pipeline: of a schedule with free communication, and of a timeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import Mesh, OpKind, Program, trace
from shardlab.simulate.timeline import (
    PUZZLE_COSTS,
    TEACHING_COSTS,
    Costs,
    Event,
    Timeline,
    bubble,
    live_memory,
    schedule_bubble,
    simulate,
)
from shardlab.simulate.timeline.prices import Messages
from shardlab.simulate.timeline.run import Clocks, timeline_of
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.plan.program import program_from_plan
from shardlab.strategies.schedules import SCHEDULES
from tests.simulate.timeline.runs import run
from tests.strategies.action_clock import PassTimes, cost


def timeline(*ranks: list[tuple[OpKind, float, float]]) -> Timeline:
    program: Program = trace(STRATEGIES["single"].program, 1, 1, 1)
    events = [
        [Event(rank, at, kind, 0, 1, start, end, 0) for at, (kind, start, end) in enumerate(row)]
        for rank, row in enumerate(ranks)
    ]
    return Timeline(program, events)


F, B, U, S = OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE, OpKind.SEND


def test_it_is_the_time_that_the_busiest_rank_does_not_compute_in_the_longest_span() -> None:
    assert bubble(timeline([(F, 0, 2), (B, 6, 8)], [(F, 2, 4), (B, 4, 6)])) == 0.5
    assert bubble(timeline([(F, 0, 3), (B, 5, 8)], [(F, 3, 4), (B, 4, 5)])) == 0.25


def test_it_counts_from_the_first_pass_to_the_last() -> None:
    assert bubble(timeline([(S, 0, 5), (F, 5, 6), (B, 6, 8), (U, 8, 10), (S, 10, 11)])) == 0
    assert bubble(timeline([(F, 0, 1)], [(F, 10, 11)])) == 0


def test_without_passes_there_is_none() -> None:
    assert bubble(timeline([(U, 0, 1)], [])) == 0


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name in STRATEGIES])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (4, 8)])
@pytest.mark.parametrize("times", [PassTimes(), PassTimes(18.5, 18.1, 9.3, 0.6), PassTimes(2, 3, 1, 5)])
def test_the_bubble_of_a_schedules_program_is_that_of_its_actions(
    name: str, ranks: int, microbatches: int, times: PassTimes
) -> None:
    schedule, entry = SCHEDULES[name], STRATEGIES[name]
    stages_per_rank = schedule.stages_per_rank or 2
    costs = Costs(
        forward=times.forward,
        backward_input=times.backward_input,
        backward_weight=times.backward_weight,
        send=times.latency,
        recv=0,
        update=0,
        link_latency=True,
    )
    program_bubble = bubble(run(entry.program, entry.mesh(ranks), ranks * stages_per_rank, microbatches, costs))
    work = microbatches * stages_per_rank * sum(times.passes)
    assert program_bubble == pytest.approx(1 - work / cost(schedule, ranks, microbatches, stages_per_rank, times))


# The textbook case: equal stages. Communication takes time, and does not count.

RANKS = st.integers(2, 4)


def bubble_of(schedule: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> float:
    plan = Plan(Mesh(pp=ranks), schedule, stages_per_rank)
    layers = plan.natural_layers()
    return schedule_bubble(check(trace(program_from_plan(plan), plan.mesh, layers, microbatches)), TEACHING_COSTS)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@given(ranks=RANKS, microbatches=st.integers(1, 10))
def test_of_one_stage_a_rank_it_is_the_textbooks(schedule: str, ranks: int, microbatches: int) -> None:
    p, m = ranks, microbatches
    assert bubble_of(schedule, p, m) == pytest.approx((p - 1) / (m + p - 1))


@given(ranks=RANKS, rounds=st.integers(2, 3), stages_per_rank=st.integers(2, 3))
def test_interleaving_divides_it(ranks: int, rounds: int, stages_per_rank: int) -> None:
    p, m, n = ranks, rounds * ranks, stages_per_rank
    assert bubble_of("interleaved-1f1b", p, m, n) == pytest.approx((p - 1) / (m * n + p - 1))


@given(ranks=RANKS, extra=st.integers(0, 4))
def test_zb_v_has_none(ranks: int, extra: int) -> None:
    assert bubble_of("zb-v", ranks, 2 * ranks + extra) == 0


def test_free_communication_does_not_change_it_and_communication_adds_to_it() -> None:
    program = check(trace(STRATEGIES["1f1b"].program, STRATEGIES["1f1b"].mesh(4), 4, 8))
    free = Costs(forward=1, backward_input=1, backward_weight=1, send=0, recv=0, collective=0)
    assert schedule_bubble(program, free) == bubble(simulate(program, free)) == pytest.approx(3 / 11)
    for prices in (TEACHING_COSTS, PUZZLE_COSTS):
        assert schedule_bubble(program, prices) == pytest.approx(3 / 11)
        assert bubble(simulate(program, prices)) > 0.28
    assert bubble(timeline_of(program, Clocks(program, Rendezvous()).run(), live_memory(program))) > 0.28
    assert schedule_bubble(program, Rendezvous()) == pytest.approx(3 / 11)


class Rendezvous(Costs):
    """Costs with messages that wait for their receives."""

    @property
    def messages(self) -> Messages:
        return "rendezvous"

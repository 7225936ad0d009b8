"""The bubble of a timeline."""

from __future__ import annotations

import pytest

from shardlab.program import OpKind, Program, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.schedules import SCHEDULES
from shardlab.timeline import Costs, Event, Timeline, bubble
from tests.recorded.runs import run
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
    found = bubble(run(entry.program, entry.mesh(ranks), ranks * stages_per_rank, microbatches, costs))
    work = microbatches * stages_per_rank * sum(times.passes)
    assert found == pytest.approx(1 - work / cost(schedule, ranks, microbatches, stages_per_rank, times))

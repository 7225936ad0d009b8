"""Pipeline schedules: what each rank does in which order, and that no number of microbatches can make them hang."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.program import UserError, trace
from shardlab.simulate import Costs, simulate
from shardlab.strategies import STRATEGIES
from shardlab.strategies.scheduled import scheduled
from shardlab.strategies.schedules import (
    Action,
    Backward,
    Forward,
    Schedule,
    breadth_first,
    interleaved,
    one_f_one_b,
)
from shardlab.strategies.schedules.messages import Recv, Send, Step, with_messages

LOOPED = [interleaved, breadth_first]
NAMES = ["1f1b", "interleaved-1f1b", "breadth-first"]


def held(actions: Iterator[Action]) -> int:
    """The most (stage, microbatch) pairs whose activations wait for their backward at once."""
    most = now = 0
    for action in actions:
        now += 1 if isinstance(action, Forward) else -1
        most = max(most, now)
    return most


@given(st.sampled_from([one_f_one_b, *LOOPED]), st.integers(1, 6), st.integers(1, 14), st.integers(1, 4))
def test_every_rank_does_each_stages_work_on_each_microbatch_once(
    schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    if schedule is one_f_one_b:
        stages_per_rank = 1
    for rank in range(ranks):
        done = Counter(schedule(rank, ranks, microbatches, stages_per_rank))
        stages = range(rank, ranks * stages_per_rank, ranks)
        wanted = [kind(stage, m) for kind in (Forward, Backward) for stage in stages for m in range(microbatches)]
        assert done == Counter(wanted)


@given(st.sampled_from([one_f_one_b, *LOOPED]), st.integers(1, 5), st.integers(1, 12), st.integers(1, 3))
def test_messages_of_two_ranks_stand_in_one_order_on_both(
    schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int
) -> None:
    steps = with_messages(schedule, ranks, microbatches, 1 if schedule is one_f_one_b else stages_per_rank)
    for a in range(ranks):
        for b in range(a):
            assert between(steps[a], b) == between(steps[b], a)


def between(steps: list[Step], peer: int) -> list[Action]:
    """What travels between a rank and a peer, in the order of the rank's steps."""
    sent = ((step, step.to) for step in steps if isinstance(step, Send))
    received = ((step, step.source) for step in steps if isinstance(step, Recv))
    ends = {id(step): other for step, other in (*sent, *received)}
    return [step.made_by for step in steps if isinstance(step, Send | Recv) and ends[id(step)] == peer]


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_at_most_as_many_microbatches_as_there_are_ranks_from_here_on(rank: int) -> None:
    assert held(one_f_one_b(rank, 4, 16, 1)) == 4 - rank


def test_interleaved_holds_what_its_warm_up_does_and_one_more() -> None:
    # arXiv 2104.04473: (ranks - rank - 1) * 2 + (stages per rank - 1) * ranks forward passes before the first backward
    for rank in range(4):
        assert held(interleaved(rank, 4, 8, 3)) == (4 - rank - 1) * 2 + 2 * 4 + 1


def test_breadth_first_holds_every_microbatch_of_every_stage() -> None:
    assert held(breadth_first(0, 4, 8, 2)) == 16


@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(0, 5), st.integers(1, 9))
def test_any_number_of_microbatches_and_layers_passes_all_channel_models(
    name: str, ranks: int, more_layers: int, microbatches: int
) -> None:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(ranks), ranks + more_layers, microbatches))
    assert checked.backends() == ["gloo", "nccl"]


def bubble(name: str, ranks: int, layers: int, microbatches: int) -> float:
    """Time beyond the work of one rank, relative to that work; messages take no time here."""
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(ranks), layers, microbatches))
    timeline = simulate(checked, Costs(update=0, send=0, recv=0))
    work = 2 * microbatches * layers / ranks
    return (timeline.end - work) / work


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 12)])
def test_the_bubble_is_what_the_papers_say(ranks: int, microbatches: int) -> None:
    # arXiv 2104.04473, section 2.2: (p - 1) / m for GPipe and 1F1B, divided by the stages per rank when interleaved.
    assert bubble("gpipe", ranks, ranks, microbatches) == pytest.approx((ranks - 1) / microbatches)
    assert bubble("1f1b", ranks, ranks, microbatches) == pytest.approx((ranks - 1) / microbatches)
    for name in ("interleaved-1f1b", "breadth-first"):
        assert bubble(name, ranks, 3 * ranks, microbatches) == pytest.approx((ranks - 1) / microbatches / 3)


def test_too_few_layers_are_one_sentence() -> None:
    with pytest.raises(UserError, match="3 layers do not reach 4 pipeline ranks"):
        trace(STRATEGIES["1f1b"].program, 4, 3, 4)


def backwards(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    yield Backward(rank, 0)
    yield Forward(rank, 0)


def test_a_schedule_that_waits_for_itself_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"cannot go on: each rank's next action waits for a later one \(Backward"):
        trace(scheduled(backwards), 2, 2, 1)

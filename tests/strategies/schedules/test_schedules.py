"""Pipeline schedules: what each rank does in which order, and that no number of microbatches can make them hang."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.strategies.schedules import (
    SCHEDULES,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Schedule,
    loop,
    vee,
)
from shardlab.strategies.schedules.steps import Recv, Send, Step, insert_messages
from tests.strategies.action_clock import actions_of, most_held

Case = tuple[Schedule, int, int, int]
"""A schedule, ranks, microbatches and stages per rank."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = SCHEDULES[draw(st.sampled_from(list(SCHEDULES)))]
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 20))
    return schedule, ranks, microbatches, schedule.stages_per_rank or draw(st.integers(1, 4))


def steps_of(case: Case) -> list[list[Step]]:
    schedule, ranks, _, stages_per_rank = case
    return insert_messages(actions_of(*case), ranks * stages_per_rank, lambda stage: schedule.placement(stage, ranks))


@given(cases())
def test_every_rank_does_each_of_its_stages_work_on_each_microbatch_once(case: Case) -> None:
    schedule, ranks, microbatches, stages_per_rank = case
    for rank, actions in enumerate(actions_of(*case)):
        assert len(set(actions)) == len(actions)
        stages = [s for s in range(ranks * stages_per_rank) if schedule.placement(s, ranks) == rank]
        assert len(stages) == stages_per_rank
        work = Counter((type(a), a.stage, a.microbatch) for a in actions)
        for stage in stages:
            for m in range(microbatches):
                whole = work.pop((Backward, stage, m), 0)
                assert work.pop((Forward, stage, m)) == 1
                assert work.pop((BackwardInput, stage, m), 0) == work.pop((BackwardWeight, stage, m), 0) == 1 - whole
        assert not work


@given(cases())
def test_each_pass_of_a_stage_takes_the_microbatches_in_order_and_forward_input_weight_follow(case: Case) -> None:
    for actions in actions_of(*case):
        place = {action: at for at, action in enumerate(actions)}
        for action in actions:
            stage, m = action.stage, action.microbatch
            if isinstance(action, Forward):
                assert m == 0 or place[Forward(stage, m - 1)] < place[action]
            elif isinstance(action, BackwardWeight):
                assert place[BackwardInput(stage, m)] < place[action]
            else:
                assert place[Forward(stage, m)] < place[action]


@given(cases())
def test_every_message_is_sent_right_after_it_is_made_and_received_before_it_is_read(case: Case) -> None:
    schedule, ranks, microbatches, stages_per_rank = case
    crossings = sum(
        schedule.placement(s, ranks) != schedule.placement(s + 1, ranks) for s in range(ranks * stages_per_rank - 1)
    )
    steps = steps_of(case)
    messages = Counter(type(step) for rank in steps for step in rank)
    assert messages[Send] == messages[Recv] == 2 * crossings * microbatches
    for rank in steps:
        unread: set[tuple[bool, int, int]] = set()
        for previous, step in zip([None, *rank], rank, strict=False):
            if isinstance(step, Send):
                assert isinstance(previous, Action)
                assert (previous.stage, previous.microbatch) == (step.stage, step.microbatch)
                assert isinstance(previous, Forward) == step.forward
            elif isinstance(step, Recv):
                unread.add((step.forward, step.stage, step.microbatch))
            elif not isinstance(step, BackwardWeight):
                unread.discard((isinstance(step, Forward), step.stage, step.microbatch))
        assert not unread


@given(cases())
def test_messages_of_two_ranks_stand_in_one_order_on_both(case: Case) -> None:
    steps = steps_of(case)
    for a in range(len(steps)):
        for b in range(a):
            assert messages_between(steps[a], b) == messages_between(steps[b], a)


def messages_between(steps: list[Step], peer: int) -> list[tuple[bool, int, int]]:
    """Return the values between a rank and a peer, in the order of the rank's steps, named by the stage that
    made them.
    """
    return [
        (step.forward, step.stage + (0 if isinstance(step, Send) else -1 if step.forward else 1), step.microbatch)
        for step in steps
        if isinstance(step, Send | Recv) and step.peer == peer
    ]


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_at_most_as_many_microbatches_as_there_are_ranks_from_here_on(rank: int) -> None:
    assert most_held(SCHEDULES["1f1b"].actions(rank, 4, 16, 1)) == 4 - rank


def test_zb_h1_holds_on_every_rank_what_1f1b_holds_on_the_first() -> None:
    # arXiv 2401.10241, section 2.1: the weight halves wait until all ranks have as many microbatches in flight
    assert [most_held(SCHEDULES["zb-h1"].actions(rank, 4, 16, 1)) for rank in range(4)] == [4] * 4


def test_interleaved_holds_what_its_warm_up_does_and_one_more() -> None:
    # arXiv 2104.04473: (ranks - rank - 1) * 2 + (stages per rank - 1) * ranks forward passes before the first backward
    for rank in range(4):
        assert most_held(SCHEDULES["interleaved-1f1b"].actions(rank, 4, 8, 3)) == (4 - rank - 1) * 2 + 2 * 4 + 1


def test_gpipe_is_breadth_first_with_one_stage_a_rank() -> None:
    assert actions_of(SCHEDULES["gpipe"], 4, 6, 1) == actions_of(SCHEDULES["breadth-first"], 4, 6, 1)


@given(st.integers(1, 6), st.integers(1, 20))
def test_interleaved_is_1f1b_with_one_stage_a_rank(ranks: int, microbatches: int) -> None:
    interleaved, plain = SCHEDULES["interleaved-1f1b"], SCHEDULES["1f1b"]
    assert actions_of(interleaved, ranks, microbatches, 1) == actions_of(plain, ranks, microbatches, 1)


def test_a_loop_goes_round_and_a_vee_down_and_up() -> None:
    assert [loop(stage, 3) for stage in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [vee(stage, 3) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


def test_dualpipe_v_with_few_microbatches_is_what_is_left_of_its_order_for_one_a_stage() -> None:
    for of_5, of_8 in zip(*(actions_of(SCHEDULES["dualpipe-v"], 4, m, 2) for m in (5, 8)), strict=True):
        assert of_5 == [action for action in of_8 if action.microbatch < 5]


def test_dualpipe_v_computes_backward_in_halves_only_at_its_ends() -> None:
    for rank in range(4):
        kinds = [type(action) for action in SCHEDULES["dualpipe-v"].actions(rank, 4, 40, 2)]
        whole = [at for at, kind in enumerate(kinds) if kind is Backward]
        assert set(kinds[whole[0] : whole[-1]]) == {Forward, Backward}
        assert len(whole) == 2 * 40 - 2 * (4 - rank - 1) - (rank + 1)


def test_a_schedule_that_waits_for_itself_is_one_sentence() -> None:
    todo = [[Backward(rank, 0), Forward(rank, 0)] for rank in range(2)]
    with pytest.raises(UserError, match=r"mine cannot go on: rank 0 at Backward.*, rank 1 at .*that comes later"):
        insert_messages(todo, 2, lambda stage: stage, "mine")

"""Schedules go to PyTorch's CSV and come back the same, and what torch writes is understood."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.strategies.schedules import SCHEDULES, Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.strategies.schedules.pytorch_csv import Form, import_csv, write_csv
from shardlab.strategies.schedules.steps import (
    Recv,
    ReduceGrad,
    Reshard,
    Send,
    ShardedStep,
    Step,
    Steps,
    Unshard,
    with_messages,
    with_sharding,
)
from tests.strategies.csv_files import csv_of, read_csv

FORMS: list[Form] = ["compute_only", "compute_comms"]


@st.composite
def random_schedules(draw: st.DrawFn) -> list[list[ShardedStep]]:
    """Every rank's steps in a valid schedule like no other: stages anywhere, in any order that can be followed."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    places = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))]))
    whole = draw(st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=9))
    waiting: list[Action] = [Forward(0, m) for m in range(microbatches)]
    todo: list[list[Action]] = [[] for _ in range(ranks)]
    while waiting:
        action = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        s, m = action.stage, action.microbatch
        todo[places[s]].append(action)
        if isinstance(action, Forward) and s + 1 < len(places):
            waiting.append(Forward(s + 1, m))
        elif not isinstance(action, BackwardWeight):
            below = s if isinstance(action, Forward) else s - 1
            if below >= 0:
                waiting.append((Backward if (below, m) in whole else BackwardInput)(below, m))
        if isinstance(action, BackwardInput):
            waiting.append(BackwardWeight(s, m))
    steps: list[list[ShardedStep]] = [list(row) for row in todo]
    if draw(st.booleans()):
        messages = with_messages(todo, len(places), places.__getitem__)
        steps = [with_sharding(row, draw(st.integers(1, 4))) for row in messages]
    return steps


@st.composite
def built_in(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """A schedule and sizes that it can have."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    ranks = draw(st.integers(1, 5))
    stages_per_rank = schedule.stages_per_rank or draw(st.integers(1, 3))
    return schedule, ranks, draw(st.integers(1, 15)), stages_per_rank


@given(built_in(), st.sampled_from(FORMS))
def test_a_built_in_schedule_comes_back_as_it_was_written(sized: tuple[Schedule, int, int, int], form: Form) -> None:
    schedule, ranks, microbatches, stages_per_rank = sized
    text = csv_of(schedule, ranks, microbatches, stages_per_rank, form=form)
    steps = read_csv(text)
    assert write_csv(steps) == text
    assert [[step for step in row if isinstance(step, Action)] for row in steps] == [
        list(schedule.actions(rank, ranks, microbatches, stages_per_rank)) for rank in range(ranks)
    ]


@given(built_in())
def test_messages_follow_from_the_actions_as_they_are_exported(sized: tuple[Schedule, int, int, int]) -> None:
    schedule, ranks, *sizes = sized
    actions = import_csv(csv_of(schedule, ranks, *sizes, form="compute_only"))
    everything = import_csv(csv_of(schedule, ranks, *sizes, form="compute_comms"))
    assert [with_sharding(without_sharding(row)) for row in actions.of_ranks] == [
        list(row) for row in everything.of_ranks
    ]


def without_sharding(steps: Sequence[ShardedStep]) -> list[Step]:
    return [step for step in steps if not isinstance(step, Unshard | Reshard | ReduceGrad)]


@given(random_schedules())
def test_any_valid_schedule_comes_back_as_it_was_written(steps: list[list[ShardedStep]]) -> None:
    assert read_csv(write_csv(steps)) == steps


@given(random_schedules(), st.data())
def test_idle_slots_change_nothing(steps: list[list[ShardedStep]], data: st.DataObject) -> None:
    rows = [line.split(",") for line in write_csv(steps).splitlines()]
    for row in rows:
        for _ in range(data.draw(st.integers(0, 3))):
            row.insert(data.draw(st.integers(0, len(row))), "")
    assert read_csv("\n".join(",".join(row) for row in rows)) == steps


@given(random_schedules(), st.data())
def test_no_action_may_be_dropped_or_done_twice(steps: list[list[ShardedStep]], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(steps))
    i = data.draw(st.integers(0, len(row) - 1))
    if data.draw(st.booleans()):
        row.insert(i, row[i])
    else:
        dropped = row.pop(i)
        if isinstance(dropped, ReduceGrad) and not any(isinstance(step, ReduceGrad) for row in steps for step in row):
            return  # a file that never reduces leaves that to whoever runs it
    with pytest.raises(UserError, match=r"^row \d+ \(rank \d+\), column \d+"):
        read_csv(write_csv(steps))


@given(random_schedules(), st.data())
def test_messages_to_one_peer_cannot_be_swapped(steps: list[list[ShardedStep]], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(steps))
    ends = defaultdict[tuple[type, int], list[int]](list)
    for i, step in enumerate(row):
        if isinstance(step, Send | Recv):
            ends[type(step), step.peer].append(i)
    several = [places for places in ends.values() if len(places) > 1]
    if several:
        a, b = data.draw(st.permutations(data.draw(st.sampled_from(several))))[:2]
        row[a], row[b] = row[b], row[a]
        with pytest.raises(UserError, match=r"^row \d+ \(rank \d+\), column \d+"):
            read_csv(write_csv(steps))


@given(random_schedules(), st.data())
def test_whatever_passes_can_be_followed_to_its_end(steps: list[list[ShardedStep]], data: st.DataObject) -> None:
    row = data.draw(st.sampled_from(steps))
    for _ in range(data.draw(st.integers(1, 3))):
        row.insert(data.draw(st.integers(0, len(row) - 1)), row.pop(data.draw(st.integers(0, len(row) - 1))))
    try:
        imported = import_csv(write_csv(steps))
    except UserError:
        return
    follow(imported)


def follow(imported: Steps) -> None:
    """Do what the steps say with values that say what they are; fail on a wrong one, and when nobody can go on."""
    last = imported.stages - 1
    channels = defaultdict[tuple[int, int], deque[tuple[bool, int, int]]](deque)
    asked = defaultdict[tuple[int, int], deque[tuple[bool, int, int]]](deque)
    held: list[set[tuple[bool, int, int]]] = [set() for _ in imported.of_ranks]
    waiting = [deque(row) for row in imported.of_ranks]

    def arrive(rank: int) -> None:
        """Messages of one peer arrive in the order in which they were sent, and must be those asked for."""
        for peer in range(len(imported.of_ranks)):
            while channels[peer, rank] and asked[peer, rank]:
                value = channels[peer, rank].popleft()
                assert value == asked[peer, rank].popleft()
                held[rank].add(value)

    def step_of(rank: int, step: ShardedStep) -> bool:
        """Whether the step could be done. A value is (forward?, the stage that reads it, microbatch)."""
        if isinstance(step, Unshard | Reshard | ReduceGrad | BackwardWeight):
            return True
        s, m = step.stage, step.microbatch
        if isinstance(step, Recv):
            asked[step.peer, rank].append((step.forward, s, m))
        elif isinstance(step, Send):
            value = (step.forward, s + 1 if step.forward else s - 1, m)
            held[rank].remove(value)
            channels[rank, step.peer].append(value)
        else:
            forward = isinstance(step, Forward)
            reads = (forward, s, m)
            if s != (0 if forward else last):
                if reads not in held[rank]:
                    return False
                held[rank].remove(reads)
            if s != (last if forward else 0):
                held[rank].add((forward, s + 1 if forward else s - 1, m))
        return True

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(waiting):
            arrive(rank)
            while row and step_of(rank, row[0]):
                row.popleft()
                arrive(rank)
                moved = True
    assert not any(waiting)
    assert not any(held)


def test_an_imported_schedule_knows_its_sizes_and_places() -> None:
    imported = import_csv("0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    assert (imported.stages, imported.microbatches, imported.ranks_of_stages) == (4, 2, (0, 1, 1, 0))
    assert imported.stages == 4
    assert imported.of_ranks[0][:3] == (Forward(0, 0), Send(0, 0, True, 1), Forward(0, 1))
    follow(imported)


def test_weights_are_whole_from_before_their_stage_is_visited_until_others_are_wanted() -> None:
    actions = [Forward(0, 0), Forward(2, 0), Forward(4, 0), Backward(4, 0), Backward(2, 0), Backward(0, 0)]
    assert write_csv([with_sharding(actions, whole=2)]) == (
        "0UNSHARD,2UNSHARD,0F0,0RESHARD,4UNSHARD,2F0,4F0,4B0,"
        "4REDUCE_GRAD,4RESHARD,0UNSHARD,2B0,2REDUCE_GRAD,2RESHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    )


def test_reducing_without_messages_is_understood() -> None:
    # so torch 2.13 prints Schedule1F1B, here on 1 rank
    assert import_csv("0F0,0B0,0REDUCE_GRAD").of_ranks == ((Forward(0, 0), Backward(0, 0), ReduceGrad(0)),)
    assert import_csv("0F0,,0B0,0REDUCE_GRAD\n1F0,1B0,,1REDUCE_GRAD").of_ranks[1] == (
        *(Recv(1, 0, True, 0), Forward(1, 0), Backward(1, 0), Send(1, 0, False, 0)),
        ReduceGrad(1),
    )


def test_a_file_is_read_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\r\n")
    assert read_csv(path) == [[Forward(0, 0), Backward(0, 0)]]
    with pytest.raises(UserError, match=r"none\.csv cannot be read as a pipeline CSV"):
        read_csv(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(UserError, match=r"schedule\.csv cannot be read as a pipeline CSV"):
        read_csv(path)


# What torch 2.13 writes with `_dump_csv(file, format)` for 2 ranks of 2 stages each: actions, then everything.
TORCH = {
    "ScheduleInterleaved1F1B, 2 microbatches": (
        "0F0,0F1,2F0,2F1,,,,2B0,,2B1,,0B0,,0B1\n,1F0,1F1,,3F0,3B0,3F1,3B1,,1B0,,1B1\n",
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2B0,"
        "2SEND_B0,2RECV_B1,2B1,2SEND_B1,2REDUCE_GRAD,2RESHARD,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3B0,3SEND_B0,1RECV_B0,"
        "3F1,3B1,3SEND_B1,1RECV_B1,3REDUCE_GRAD,3RESHARD,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n",
    ),
    "ScheduleInterleavedZeroBubble, 2 microbatches": (
        "0F0,0F1,2F0,,2F1,2I0,2W0,2I1,2W1,0I0,0W0,0I1,0W1\n,1F0,1F1,3F0,3I0,3F1,3I1,3W0,1I0,3W1,1I1,1W0,1W1\n",
        "0UNSHARD,2UNSHARD,0F0,0SEND_F0,2RECV_F0,0F1,0SEND_F1,2RECV_F1,2F0,2SEND_F0,2F1,2SEND_F1,2RECV_B0,2I0,"
        "2SEND_B0,2W0,2RECV_B1,2I1,2SEND_B1,2W1,0RECV_B0,2REDUCE_GRAD,2RESHARD,0I0,0W0,0RECV_B1,0I1,0W1,"
        "0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,3UNSHARD,1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3I0,3SEND_B0,1RECV_B0,"
        "3F1,3I1,3SEND_B1,1RECV_B1,3W0,1I0,1SEND_B0,3W1,3REDUCE_GRAD,3RESHARD,1I1,1SEND_B1,1W0,1W1,1REDUCE_GRAD,"
        "1RESHARD\n",
    ),
    "ScheduleZBVZeroBubble, 2 microbatches": (
        "0F0,0F1,,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,,,,0I1,0W1,,\n"
        ",1F0,2F0,1F1,2F1,2I0,2W0,,1I0,1W0,,2I1,2W1,1I1,,,1W1,,\n",
        "0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3I0,3SEND_B0,3RECV_F1,3W0,3F1,3I1,3SEND_B1,"
        "0RECV_B0,3W1,3REDUCE_GRAD,3RESHARD,0I0,0W0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1F1,2RECV_B0,2F1,2SEND_F1,2I0,2W0,2RECV_B1,1I0,"
        "1SEND_B0,1W0,2I1,2W1,2REDUCE_GRAD,2RESHARD,1I1,1SEND_B1,1W1,1REDUCE_GRAD,1RESHARD\n",
    ),
    "ScheduleDualPipeV, 4 microbatches": (
        "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,"
        "0I3,0W3\n"
        "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,"
        "1W3\n",
        "0UNSHARD,3UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,0F2,0SEND_F2,3F0,3RECV_F1,3I0,3SEND_B0,3W0,3F1,"
        "3RECV_F2,0RECV_B0,(0F3;3B1)OVERLAP_F_B,0SEND_F3,3SEND_B1,(3F2;0B0)OVERLAP_F_B,3RECV_F3,0RECV_B1,3B2,"
        "3SEND_B2,(3F3;0B1)OVERLAP_F_B,0RECV_B2,3B3,3SEND_B3,3REDUCE_GRAD,0RECV_B3,3RESHARD,0I2,0W2,0I3,0W3,"
        "0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,2UNSHARD,1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1RECV_F2,1F1,2F1,2SEND_F1,2RECV_B0,1F2,2B0,"
        "(2F2;1B0)OVERLAP_F_B,2SEND_F2,1SEND_B0,1RECV_F3,2RECV_B1,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,"
        "2SEND_F3,1SEND_B1,2RECV_B2,2B2,1B2,1SEND_B2,2RECV_B3,2I3,1I3,1SEND_B3,2W3,2REDUCE_GRAD,2RESHARD,1W3,"
        "1REDUCE_GRAD,1RESHARD\n",
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_what_torch_writes_is_understood(name: str) -> None:
    actions, everything = (import_csv(text) for text in TORCH[name])
    for imported in (actions, everything):
        assert imported.ranks_of_stages == ((0, 1, 0, 1) if "Interleaved" in name else (0, 1, 1, 0))
        follow(imported)
    assert imported.microbatches == int(name.split()[1])
    assert [compute(row) for row in actions.of_ranks] == [compute(row) for row in everything.of_ranks]


def compute(row: Sequence[ShardedStep]) -> list[Action]:
    return [step for step in row if isinstance(step, Action)]


@pytest.mark.parametrize("name", [name for name in TORCH if "DualPipe" not in name])
def test_what_torch_writes_is_written_again_word_for_word(name: str) -> None:
    """But for the idle slots, and for overlapped pairs, which become two words."""
    actions, everything = TORCH[name]
    assert write_csv(read_csv(everything)) == everything
    idle = [",".join(word for word in line.split(",") if word) for line in actions.splitlines()]
    assert write_csv(read_csv(actions)).splitlines() == idle

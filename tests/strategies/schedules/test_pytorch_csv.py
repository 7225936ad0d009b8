"""A pipeline CSV that is no whole schedule is refused, with the row, the column and the reason."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import UserError
from shardlab.strategies.schedules import SCHEDULES, Action, Backward, BackwardInput, BackwardWeight, Forward, Schedule
from shardlab.strategies.schedules.pytorch_csv import CsvFormat, import_csv, parse_cells, write_csv
from shardlab.strategies.schedules.steps import (
    Recv,
    ReduceGrad,
    Reshard,
    Send,
    ShardedStep,
    Step,
    Steps,
    Unshard,
    insert_messages,
    insert_sharding_steps,
)
from tests.strategies.csv_files import csv_of, read_csv

ACTIONS = """\
0F0,0F1,,,0B0,0B1
,1F0,1B0,1F1,1B1,
"""

HALVES = """\
0F0,0F1,,,0I0,0W0,0I1,0W1
,1F0,1I0,1F1,1I1,1W0,1W1,
"""

# torch 2.13, ScheduleInterleaved1F1B on 2 ranks, 1 stage each, 2 microbatches
MESSAGES = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""

VEE = "0F0,0SEND_F0,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0\n1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0\n"


def edited(text: str, edit: str) -> str:
    """A text with words replaced: "a>b" puts b for a, "a<>b" swaps the two; several edits are split by a blank."""
    for part in edit.split():
        old, new = re.split("<?>", part)
        swapped = {old: new, new: old} if "<>" in part else {old: new}
        text = re.sub(r"\w+", lambda word, to=swapped: to.get(word[0], word[0]), text)
    return text


@pytest.mark.parametrize("text", [ACTIONS, HALVES, MESSAGES, VEE])
def test_whole_schedules_pass(text: str) -> None:
    assert read_csv(text)


@pytest.mark.parametrize(
    ("text", "edit", "location", "reason"),
    [
        # work done twice
        (ACTIONS, "0F1>0F0", (1, 2, "0F0"), "done twice, first as 0F0 in column 1"),
        (ACTIONS, "1B1>1B0", (2, 5, "1B0"), "done twice, first as 1B0 in column 3"),
        (HALVES, "0W0>0B0", (1, 6, "0B0"), "done twice, first as 0I0 in column 5"),
        (HALVES, "1I0>1B0", (2, 6, "1W0"), "done twice, first as 1B0 in column 3"),
        (MESSAGES, "0SEND_F1>0SEND_F0", (1, 5, "0SEND_F0"), "done twice, first as 0SEND_F0 in column 3"),
        # something missing
        (ACTIONS, "0F0>", (1, 5, "0B0"), "it needs 0F0, which row 1 does not have"),
        (ACTIONS, "0B1>", (1, 2, "0F1"), "its backward pass 0B1, or 0I1 and 0W1, is missing"),
        (ACTIONS, "1F1> 1B1>", (2, 4, ""), "the row ends without 1F1, although there is a microbatch 1 (0F1 in row 1"),
        (ACTIONS, "0F0>0F2 0B0>0B2", (1, 7, ""), "the row ends without 0F0, although there is a microbatch 2"),
        (HALVES, "1W0>", (2, 3, "1I0"), "the other half of the backward pass, 1W0, is missing"),
        (HALVES, "1I0>", (2, 6, "1W0"), "it needs 1I0, which row 2 does not have"),
        (ACTIONS, "1F0>2F0 1F1>2F1 1B0>2B0 1B1>2B1", (2, 2, "2F0"), "no row has stage 1"),
        (MESSAGES, "1RECV_F0>", (2, 3, "1F0"), "it needs 1RECV_F0, which row 2 does not have"),
        (MESSAGES, "0SEND_F1>", (2, 4, "1RECV_F1"), "its other end 0SEND_F1 is missing in row 1 (rank 0)"),
        (MESSAGES, "1SEND_B1>", (1, 8, "0RECV_B1"), "its other end 1SEND_B1 is missing in row 2 (rank 1)"),
        (MESSAGES, "0SEND_F0> 1RECV_F0>", (2, 3, "1F0"), "it needs 1RECV_F0, which row 2 does not have"),
        # the wrong place
        (ACTIONS, "0B0<>1B0", (1, 5, "1B0"), "stage 1 is on rank 1, and all its words must stand in row 2"),
        (ACTIONS, "1F0>0F2", (2, 2, "0F2"), "stage 0 is on rank 0, and all its words must stand in row 1"),
        (
            MESSAGES,
            "0SEND_F0<>1RECV_F0",
            (1, 3, "1RECV_F0"),
            "stage 1 is on rank 1, and all its words must stand in row 2",
        ),
        (MESSAGES, "0REDUCE_GRAD>5REDUCE_GRAD", (1, 10, "5REDUCE_GRAD"), "no row computes on stage 5"),
        (ACTIONS, "0F0>0UNSHARD 0F1> 0B0> 0B1> 1F0>1UNSHARD 1F1> 1B0> 1B1>", (1, 1, "0UNSHARD"), "no row computes on"),
        (ACTIONS, "1F0>0UNSHARD 1F1> 1B0> 1B1>", (2, 2, "0UNSHARD"), "stage 0 is on rank 0"),
        # too early
        (ACTIONS, "0F0<>0B0", (1, 1, "0B0"), "it needs 0F0, which comes only in column 5"),
        (HALVES, "1I0<>1W0", (2, 3, "1W0"), "it needs 1I0, which comes only in column 6"),
        (MESSAGES, "1RECV_F0<>1F0", (2, 2, "1F0"), "it needs 1RECV_F0, which comes only in column 3"),
        (MESSAGES, "0RECV_B0<>0B0", (1, 6, "0B0"), "it needs 0RECV_B0, which comes only in column 7"),
        (MESSAGES, "0F1<>0SEND_F1", (1, 4, "0SEND_F1"), "it needs 0F1, which comes only in column 5"),
        (MESSAGES, "1B0<>1SEND_B0", (2, 5, "1SEND_B0"), "it needs 1B0, which comes only in column 6"),
        (VEE, "1F0<>2F0", (2, 2, "2F0"), "it needs 1F0, which comes only in column 3"),
        # messages that nobody sends or wants
        (
            MESSAGES,
            "0SEND_F0>1SEND_F0",
            (1, 3, "1SEND_F0"),
            "stage 1 is on rank 1, and all its words must stand in row 2",
        ),
        (MESSAGES, "1SEND_B1>1SEND_F1", (2, 9, "1SEND_F1"), "there is no stage above stage 1"),
        (MESSAGES, "0RECV_B1>0RECV_F1", (1, 8, "0RECV_F1"), "there is no stage below stage 0"),
        (VEE, "1SEND_B0>1SEND_F0", (2, 8, "1SEND_F0"), "stages 1 and 2 are both on rank 1"),
        # swapped messages
        (MESSAGES, "0SEND_F0<>0SEND_F1", (1, 3, "0SEND_F1"), "it needs 0F1, which comes only in column 4"),
        (
            MESSAGES,
            "1RECV_F1<>1RECV_F0 1F0<>1F1 1B0<>1B1 1SEND_B0<>1SEND_B1",
            (1, 3, "0SEND_F0"),
            "in row 2, where 1RECV_F1 (column 2)",
        ),
        (MESSAGES, "0RECV_B0<>0RECV_B1 0B0<>0B1", (1, 6, "0RECV_B1"), "in row 2, where 1SEND_B0 (column 6)"),
        (MESSAGES, "0SEND_F1<>0RECV_B0", (1, 5, "0RECV_B0"), "in row 2, where 1RECV_F1 (column 4)"),
        # a circle: each rank's next step needs a later one of the other
        (
            ACTIONS,
            "1F1<>1B0 0F1<>0B0",
            (1, 2, "0B0"),
            "cannot go on: this and 1F1 (row 2, column 3) wait for each other",
        ),
        # sharded weights and gradients
        (MESSAGES, "1UNSHARD>", (2, 3, "1F0"), "stage 1 is sharded here; put 1UNSHARD before it"),
        (MESSAGES, "1REDUCE_GRAD>1UNSHARD", (2, 10, "1UNSHARD"), "stage 1 is whole since column 1"),
        (MESSAGES, "0RESHARD>", (1, 1, "0UNSHARD"), "stage 0 is still whole when the row ends"),
        (MESSAGES, "0RESHARD<>0B1", (1, 11, "0B1"), "stage 0 is sharded here; put 0UNSHARD before it"),
        (MESSAGES, "0UNSHARD>0RESHARD", (1, 1, "0RESHARD"), "stage 0 is sharded here; put 0UNSHARD before it"),
        (MESSAGES, "1REDUCE_GRAD>", (2, 8, "1B1"), "nothing reduces the gradients of stage 1"),
        (MESSAGES, "0REDUCE_GRAD<>0B1", (1, 9, "0REDUCE_GRAD"), "0B1 (column 10) still adds to these gradients"),
    ],
)
def test_a_mistake_is_refused_with_row_column_and_reason(
    text: str, edit: str, location: tuple[int, int, str], reason: str
) -> None:
    with pytest.raises(UserError) as refused:
        read_csv(edited(text, edit))
    row, column, word = location
    assert str(refused.value).startswith(f"row {row} (rank {row - 1}), column {column}{word and f', {word}'}: ")
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [ACTIONS, MESSAGES])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_that_stands_there_twice_is_refused_by_the_numbers_of_both(text: str, place: int) -> None:
    rows = text.splitlines()
    rows.insert(place, rows[1])
    with pytest.raises(UserError, match=r"^row (\d) .*: row (\d) does as much of stage 1") as refused:
        read_csv("\n".join(rows))
    assert {int(row) - 1 for row in re.findall(r"row (\d)", str(refused.value))} == {place, 1 if place == 2 else 2}


@pytest.mark.parametrize(("text", "row"), [(ACTIONS, "0F0"), (ACTIONS, "2F0"), (MESSAGES, "2F0"), (ACTIONS, ",,")])
def test_an_extra_row_is_blamed_itself(text: str, row: str) -> None:
    with pytest.raises(UserError, match=r"^row 3 \(rank 2\), column 1"):
        read_csv(f"{text}{row}\n")


def test_gradients_reduced_twice_are_refused() -> None:
    with pytest.raises(UserError, match=r"^row 1 \(rank 0\), column 4, 0REDUCE_GRAD: .* already reduced in column 3"):
        read_csv("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD")


def test_a_circle_names_the_first_stuck_step_of_every_rank() -> None:
    # each rank wants the gradient of its first microbatch before it goes on to the one that the next rank waits for
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n2F1,2B1,2F0,2B0\n"
    with pytest.raises(UserError, match=r"^row 1 .*column 2, 0B0: .*this and 1F1 \(row 2, .*, 2F1 \(row 3, column 1\)"):
        read_csv(text)


# The words of a pipeline CSV: what they mean, how they are written, and what is said of a word that is none.


WORDS: list[tuple[str, ShardedStep]] = [
    ("2F0", Forward(2, 0)),
    ("0B2", Backward(0, 2)),
    ("1I3", BackwardInput(1, 3)),
    ("3W1", BackwardWeight(3, 1)),
    ("10F12", Forward(10, 12)),
    ("3SEND_F1", Send(3, 1, True, peer=14)),
    ("4RECV_F1", Recv(4, 1, True, peer=13)),
    ("3SEND_B0", Send(3, 0, False, peer=12)),
    ("2RECV_B0", Recv(2, 0, False, peer=13)),
    ("0UNSHARD", Unshard(0)),
    ("0RESHARD", Reshard(0)),
    ("1REDUCE_GRAD", ReduceGrad(1)),
]


@pytest.mark.parametrize(("word", "step"), WORDS)
def test_a_word_means_a_step_and_the_step_is_written_as_that_word(word: str, step: ShardedStep) -> None:
    [[cell]] = parse_cells(word)
    assert cell.step(ranks_of_stages=range(10, 30)) == step
    assert write_csv([[step]]) == f"{word}\n"


def test_a_word_knows_its_row_and_column_with_the_idle_slots_counted() -> None:
    places = [(cell.row, cell.column, cell.word) for row in parse_cells(",0F0,,0B0\n1F0,,1B0,,\n") for cell in row]
    assert places == [(1, 2, "0F0"), (1, 4, "0B0"), (2, 1, "1F0"), (2, 3, "1B0")]


def test_an_overlapped_pair_is_two_steps_at_one_place() -> None:
    [[forward, backward]] = parse_cells("(0F1;3B0)OVERLAP_F_B")
    assert (forward.word, backward.word) == ("0F1", "3B0")
    assert (forward.column, backward.column) == (1, 1)


@pytest.mark.parametrize("text", ["0F0,0B0", "0F0,0B0\r\n\r\n", "\ufeff0F0,0B0\n", '"0F0", 0B0 \n', "00F0,0B00"])
def test_changes_by_editors_and_spreadsheets_do_not_matter(text: str) -> None:
    assert [cell.word for cell in parse_cells(text)[0]] == ["0F0", "0B0"]


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("2f0", "did you mean 2F0?"),
        ("3SENDF1", "did you mean 3SEND_F1?"),
        ("3send_f_1", "did you mean 3SEND_F1?"),
        ("0UNSHARD3", "did you mean 0UNSHARD?"),
        ("0REDUCE", "did you mean 0REDUCE_GRAD?"),
        ("0bw0", r"did you mean 0B0\?"),
        ("0Bw0", r"did you mean 0W0\?"),
        ("0Bx0", r"did you mean 0I0\?"),
        ("0FULL_BACKWARD0", r"did you mean 0B0\?"),
        ("0backward_input1", r"did you mean 0I1\?"),
        ("0BACKWARD_WEIGHT1", r"did you mean 0W1\?"),
        ("1SEND_F_RECV_B0", "write each of the two messages in a cell of its own"),
        ("2F", "write <stage><kind><microbatch>"),
        ("F2", "write <stage><kind><microbatch>"),
        ("2F0x", "write <stage><kind><microbatch>"),
        ("2X0", "write <stage><kind><microbatch>"),
        ("0F0;0F1", "write <stage><kind><microbatch>"),
        ("²F0", "write <stage><kind><microbatch>"),
        ("9999999999F0", "write <stage><kind><microbatch>"),
        ("(0F1)OVERLAP_F_B", r"or \(0F1;3B0\)OVERLAP_F_B"),
        ("(0F1;0UNSHARD)OVERLAP_F_B", r"or \(0F1;3B0\)OVERLAP_F_B"),
        ("(0F1;3B0)OVERLAP", r"or \(0F1;3B0\)OVERLAP_F_B"),
    ],
)
def test_a_word_that_is_no_action_is_refused_with_what_was_meant(word: str, remedy: str) -> None:
    with pytest.raises(UserError, match=f"^row 2 \\(rank 1\\), column 3: .* is no action; .*{remedy}"):
        parse_cells(f"0F0\n1F0,,{word}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the pipeline CSV is empty; give one row per rank"),
        (" \n\n", "the pipeline CSV is empty; give one row per rank"),
        ("0F0\n\n1F0", r"^row 2 \(rank 1\), column 1: the rank does nothing"),
        ("0F0\n,,\n", r"^row 2 \(rank 1\), column 1: the rank does nothing"),
        ("0F0," + "0" * 200_000, "this is no pipeline CSV"),
    ],
)
def test_a_rank_without_a_stage_and_a_file_without_ranks_are_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        parse_cells(text)


@pytest.mark.parametrize(
    ("old", "today"),
    [
        ("0F0,0BW0", "0F0,0B0"),
        ("0F0,0F1,0BW0,0B1,0W1", "0F0,0F1,0B0,0I1,0W1"),
        ("0F0,0B0,0W0", "0F0,0I0,0W0"),
        ("0F0,(0F1;0BW0)OVERLAP_F_B,0BW1", "0F0,0F1,0B0,0B1"),
        ("0F0,0F1,0B0,0I1,0W1", "0F0,0F1,0B0,0I1,0W1"),
        ("0F0,0B0,0I0,0W0", "0F0,0B0,0I0,0W0"),  # work that is done twice, whatever the spelling
    ],
)
def test_files_of_torch_2_5_are_read_with_their_meaning(old: str, today: str) -> None:
    assert [cell.word for cell in parse_cells(old)[0]] == today.split(",")


def test_a_word_of_torch_2_5_is_named_as_it_stands_in_the_file() -> None:
    whole, half = parse_cells("0BW0,0B1")[0]
    assert str(whole.refuse("no")) == "row 1 (rank 0), column 1, 0BW0 (today 0B0): no"
    assert str(half.refuse("no")) == "row 1 (rank 0), column 2, 0B1 (today 0I1): no"


# Schedules go to PyTorch's CSV and come back the same, and what torch writes is understood.


FORMS: list[CsvFormat] = ["compute_only", "compute_comms"]


@st.composite
def random_schedules(draw: st.DrawFn) -> list[list[ShardedStep]]:
    """Every rank's steps in a valid schedule like no other: stages anywhere, in any order that can be followed."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    places = draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))]))
    whole = draw(st.frozensets(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=9))
    ready: list[Action] = [Forward(0, m) for m in range(microbatches)]
    todo: list[list[Action]] = [[] for _ in range(ranks)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        s, m = action.stage, action.microbatch
        todo[places[s]].append(action)
        if isinstance(action, Forward) and s + 1 < len(places):
            ready.append(Forward(s + 1, m))
        elif not isinstance(action, BackwardWeight):
            stage = s if isinstance(action, Forward) else s - 1
            if stage >= 0:
                ready.append((Backward if (stage, m) in whole else BackwardInput)(stage, m))
        if isinstance(action, BackwardInput):
            ready.append(BackwardWeight(s, m))
    steps: list[list[ShardedStep]] = [list(row) for row in todo]
    if draw(st.booleans()):
        messages = insert_messages(todo, len(places), places.__getitem__)
        steps = [insert_sharding_steps(row, draw(st.integers(1, 4))) for row in messages]
    return steps


@st.composite
def built_in(draw: st.DrawFn) -> tuple[Schedule, int, int, int]:
    """A schedule and sizes that it can have."""
    schedule = SCHEDULES[draw(st.sampled_from(sorted(SCHEDULES)))]
    ranks = draw(st.integers(1, 5))
    stages_per_rank = schedule.stages_per_rank or draw(st.integers(1, 3))
    return schedule, ranks, draw(st.integers(1, 15)), stages_per_rank


@given(built_in(), st.sampled_from(FORMS))
def test_a_built_in_schedule_comes_back_as_it_was_written(
    sized: tuple[Schedule, int, int, int], form: CsvFormat
) -> None:
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
    assert [insert_sharding_steps(without_sharding(row)) for row in actions.of_ranks] == [
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
def test_accepted_schedules_can_be_followed_to_their_end(steps: list[list[ShardedStep]], data: st.DataObject) -> None:
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
    requests = defaultdict[tuple[int, int], deque[tuple[bool, int, int]]](deque)
    values: list[set[tuple[bool, int, int]]] = [set() for _ in imported.of_ranks]
    rest = [deque(row) for row in imported.of_ranks]

    def arrive(rank: int) -> None:
        """Messages of one peer arrive in the order in which they were sent, and must be those asked for."""
        for peer in range(len(imported.of_ranks)):
            while channels[peer, rank] and requests[peer, rank]:
                value = channels[peer, rank].popleft()
                assert value == requests[peer, rank].popleft()
                values[rank].add(value)

    def step_of(rank: int, step: ShardedStep) -> bool:
        """Whether the step could be done. A value is (forward?, the stage that reads it, microbatch)."""
        if isinstance(step, Unshard | Reshard | ReduceGrad | BackwardWeight):
            return True
        s, m = step.stage, step.microbatch
        if isinstance(step, Recv):
            requests[step.peer, rank].append((step.forward, s, m))
        elif isinstance(step, Send):
            value = (step.forward, s + 1 if step.forward else s - 1, m)
            values[rank].remove(value)
            channels[rank, step.peer].append(value)
        else:
            forward = isinstance(step, Forward)
            reads = (forward, s, m)
            if s != (0 if forward else last):
                if reads not in values[rank]:
                    return False
                values[rank].remove(reads)
            if s != (last if forward else 0):
                values[rank].add((forward, s + 1 if forward else s - 1, m))
        return True

    has_moved = True
    while has_moved:
        has_moved = False
        for rank, row in enumerate(rest):
            arrive(rank)
            while row and step_of(rank, row[0]):
                row.popleft()
                arrive(rank)
                has_moved = True
    assert not any(rest)
    assert not any(values)


def test_an_imported_schedule_knows_its_sizes_and_places() -> None:
    imported = import_csv("0F0,0F1,3F0,3F1,3B0,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    assert (imported.stages, imported.microbatches, imported.ranks_of_stages) == (4, 2, (0, 1, 1, 0))
    assert imported.stages == 4
    assert imported.of_ranks[0][:3] == (Forward(0, 0), Send(0, 0, True, 1), Forward(0, 1))
    follow(imported)


def test_weights_are_whole_from_before_their_stage_is_visited_until_others_are_wanted() -> None:
    actions = [Forward(0, 0), Forward(2, 0), Forward(4, 0), Backward(4, 0), Backward(2, 0), Backward(0, 0)]
    assert write_csv([insert_sharding_steps(actions, whole=2)]) == (
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
def test_files_that_torch_writes_are_accepted(name: str) -> None:
    actions, everything = (import_csv(text) for text in TORCH[name])
    for imported in (actions, everything):
        assert imported.ranks_of_stages == ((0, 1, 0, 1) if "Interleaved" in name else (0, 1, 1, 0))
        follow(imported)
    assert imported.microbatches == int(name.split()[1])
    assert [compute(row) for row in actions.of_ranks] == [compute(row) for row in everything.of_ranks]


def compute(row: Sequence[ShardedStep]) -> list[Action]:
    return [step for step in row if isinstance(step, Action)]


@pytest.mark.parametrize("name", [name for name in TORCH if "DualPipe" not in name])
def test_files_that_torch_writes_are_written_again_word_for_word(name: str) -> None:
    """Exceptions are idle slots, and overlapped pairs, which become two cells."""
    actions, everything = TORCH[name]
    assert write_csv(read_csv(everything)) == everything
    idle = [",".join(word for word in line.split(",") if word) for line in actions.splitlines()]
    assert write_csv(read_csv(actions)).splitlines() == idle

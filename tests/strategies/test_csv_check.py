"""A pipeline CSV that is no whole schedule is refused, with the row, the column and the reason."""

from __future__ import annotations

import re

import pytest

from shardlab.language import UserError
from tests.strategies.csv_files import read_csv

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
    ("text", "edit", "where", "reason"),
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
    text: str, edit: str, where: tuple[int, int, str], reason: str
) -> None:
    with pytest.raises(UserError) as refused:
        read_csv(edited(text, edit))
    row, column, word = where
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

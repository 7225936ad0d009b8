"""The words of a pipeline CSV: what they mean, how they are written, and what is said of a word that is none."""

from __future__ import annotations

import pytest

from shardlab.language import UserError
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.pytorch_csv import cells, write_csv
from shardlab.strategies.schedules.steps import Recv, ReduceGrad, Reshard, Send, ShardedStep, Unshard

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
    [[cell]] = cells(word)
    assert cell.step(ranks_of_stages=range(10, 30)) == step
    assert write_csv([[step]]) == f"{word}\n"


def test_a_word_knows_its_row_and_column_with_the_idle_slots_counted() -> None:
    places = [(cell.row, cell.column, cell.word) for row in cells(",0F0,,0B0\n1F0,,1B0,,\n") for cell in row]
    assert places == [(1, 2, "0F0"), (1, 4, "0B0"), (2, 1, "1F0"), (2, 3, "1B0")]


def test_an_overlapped_pair_is_two_steps_at_one_place() -> None:
    [[forward, backward]] = cells("(0F1;3B0)OVERLAP_F_B")
    assert (forward.word, backward.word) == ("0F1", "3B0")
    assert (forward.column, backward.column) == (1, 1)


@pytest.mark.parametrize("text", ["0F0,0B0", "0F0,0B0\r\n\r\n", "\ufeff0F0,0B0\n", '"0F0", 0B0 \n', "00F0,0B00"])
def test_what_editors_and_spreadsheets_do_to_a_file_is_no_matter(text: str) -> None:
    assert [cell.word for cell in cells(text)[0]] == ["0F0", "0B0"]


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
        cells(f"0F0\n1F0,,{word}\n")


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
        cells(text)


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
def test_what_torch_2_5_wrote_is_read_as_it_was_meant(old: str, today: str) -> None:
    assert [cell.word for cell in cells(old)[0]] == today.split(",")


def test_a_word_of_torch_2_5_is_named_as_it_stands_in_the_file() -> None:
    whole, half = cells("0BW0,0B1")[0]
    assert str(whole.refuse("no")) == "row 1 (rank 0), column 1, 0BW0 (today 0B0): no"
    assert str(half.refuse("no")) == "row 1 (rank 0), column 2, 0B1 (today 0I1): no"

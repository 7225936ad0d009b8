"""`shardlab collectives show`: one ordered table for each collective, JSON, and what is wrong with a request."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from shardlab.cli import main
from shardlab.cli.collectives import NAMES, PAIRS, diagram, is_same, print_same, print_shown, shorten
from shardlab.execute.transport.trial import CALLS, SEND, Numbers, TensorStates

Captured = pytest.CaptureFixture[str]

WHOLE: list[Numbers] = [[0.0, 1.0], [10.0, 11.0]]
REDUCED = TensorStates(("all_reduce",), [WHOLE, [[10.0, 12.0], [10.0, 12.0]]])


def test_every_collective_that_is_run_is_described() -> None:
    assert set(NAMES) == {*CALLS, SEND}
    assert {step for steps in PAIRS.values() for step in steps} <= set(CALLS)


@pytest.mark.starts_ranks
def test_what_real_processes_did_is_printed_in_the_order_of_ranks(capsys: Captured) -> None:
    assert main(["collectives", "show", "all_reduce", "--ranks", "2"]) == 0
    printed, _ = capsys.readouterr()
    assert [line.rstrip() for line in printed.splitlines()] == [
        "10 and 11 are elements 0 and 1 of rank 1's tensor; - is no tensor",
        "",
        "all_reduce  the sum of the ranks' tensors, on every rank",
        "rank  before                 after",
        "   0  00 01   ──┬─ sum ─┬─▶  10 12",
        "   1  10 11   ──┘       └─▶  10 12",
        "",
        "all_reduce = reduce_scatter + all_gather",
        "rank  before  reduce_scatter  all_gather",
        "   0  00 01   10              10 12",
        "   1  10 11   12              10 12",
        "the same on every rank: yes",
        "",
    ]


@pytest.mark.starts_ranks
def test_all_of_them_as_json(capsys: Captured) -> None:
    assert main(["collectives", "show", "all", "--ranks", "2", "--root", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in report["collectives"]] == list(NAMES)
    assert {row["name"]: row["same"] for row in report["same"]} == dict.fromkeys(PAIRS, True)
    broadcast = report["collectives"][0]
    assert (broadcast["before"], broadcast["after"]) == ([None, [10, 11]], [[10, 11], [10, 11]])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["all_redcue"], "there is no collective 'all_redcue'; did you mean all_reduce?"),
        (["all-to-al"], "did you mean all_to_all?"),
        (["fish"], "there is no collective 'fish'; there are broadcast, scatter, gather"),
        (["gather", "--ranks", "1"], "--ranks 1: collectives are shown on 2 to 99 ranks"),
        (["gather", "--root", "4"], "--root 4: there are ranks 0-3; give one of them"),
        (
            ["all_gather", "--reduction", "mean"],
            "--reduction mean: all_gather has no reduction; give it to reduce, all_reduce or all",
        ),
        (["reduce-scatter", "--reduction", "max"], "--reduction max: reduce_scatter has no reduction"),
        (["gather", "--root", "-1"], "--root -1: there are ranks 0-3"),
    ],
)
def test_a_wrong_request_is_a_sentence(capsys: Captured, words: list[str], sentence: str) -> None:
    assert main(["collectives", "show", *words]) == 2
    printed, said = capsys.readouterr()
    assert not printed
    assert sentence in said


@pytest.mark.parametrize(
    ("gives", "takes", "lines"),
    [
        ([0], [0, 1, 2], ["──── x ─┬─▶", "        ├─▶", "        └─▶"]),
        ([1], [0, 1, 2], ["        ┌─▶", "──── x ─┼─▶", "        └─▶"]),
        ([0, 1, 2], [2], ["──┐        ", "──┤        ", "──┴─ x ───▶"]),
        ([0, 1, 2], [0, 1, 2], ["──┐     ┌─▶", "──┼─ x ─┼─▶", "──┘     └─▶"]),
        ([2], [0], ["        ┌─▶", "        │  ", "──── x ─┘  "]),
        ([0], [1], ["──── x ─┐  ", "        └─▶", "           "]),
    ],
)
def test_lines_go_from_who_gives_to_who_receives(gives: list[int], takes: list[int], lines: list[str]) -> None:
    assert diagram(3, gives, takes, "x") == lines


def test_numbers_that_are_no_more_than_the_room_are_all_there() -> None:
    assert shorten([0, 1, 12], 80) == "00 01 12"
    assert shorten([2.5, 0.125], 80) == "2.5 0.125"
    assert shorten(None, 80) == "-"
    assert shorten([17.3], 80, times=True) == "17 ms"


@pytest.mark.parametrize("room", range(8, 40))
def test_in_little_room_the_middle_gives_way(room: int) -> None:
    text = shorten([float(n) for n in range(20)], room)
    assert text.startswith("00")
    assert text.endswith("19")
    assert len(text) <= max(room, len("00 .. 19"))


def printed(width: int, encoding: str = "utf-8", count: int = 16) -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, write_through=True)
    console = Console(file=stream, width=width, highlight=False)
    tensors: list[Numbers] = [[100.0 * rank + place for place in range(count)] for rank in range(count)]
    print_shown(console, TensorStates(("all_reduce",), [tensors, tensors]), "what it does", 0, "sum")
    print_same(console, "all_reduce", TensorStates(("reduce_scatter", "all_gather"), [tensors] * 3), matches=True)
    stream.seek(0)
    return stream.read().splitlines()


@pytest.mark.parametrize("width", [80, 160])
def test_tables_fit_into_the_terminal_a_row_for_each_rank(width: int) -> None:
    lines = printed(width)
    assert max(len(line.rstrip()) for line in lines) <= width
    assert [line.split()[0] for line in lines[2:18]] == [str(rank) for rank in range(16)]


def test_a_pipe_without_unicode_gets_plain_signs() -> None:
    assert all(line.isascii() for line in printed(80, "ascii"))
    assert any("--+- sum -+->" in line for line in printed(80, "ascii"))


def test_what_differs_is_said_and_fails() -> None:
    wrong = TensorStates(PAIRS["all_reduce"], [WHOLE, WHOLE, WHOLE])
    assert is_same({("all_reduce",): REDUCED, PAIRS["all_reduce"]: wrong}, "all_reduce") is False
    assert is_same({("all_reduce",): REDUCED}, "all_reduce") is None
    console = Console(file=io.StringIO(), width=80, record=True)
    print_same(console, "all_reduce", wrong, matches=False)
    assert "the same on every rank: no" in console.export_text()

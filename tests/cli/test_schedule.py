"""`shardlab schedule`: schedules go out as CSV, and come back with --schedule."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.csv_schedule import Form
from tests.strategies.csv_files import csv_of

Captured = pytest.CaptureFixture[str]
FORMS: list[Form] = ["compute_only", "compute_comms"]


def printed(capsys: Captured, *words: str) -> str:
    assert main(list(words)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_csv_alone_is_printed(name: str, form: Form, capsys: Captured) -> None:
    stages = SCHEDULES[name].stages_per_rank or 2
    expected = csv_of(SCHEDULES[name], 2, 5, stages, form=form)
    assert printed(capsys, "schedule", name, "--pp", "2", "--microbatches", "5", "--form", form) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_what_was_exported_is_checked_timed_and_exported_again_as_it_was(
    name: str, form: Form, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "schedule.csv"
    said = printed(capsys, "schedule", name, "--pp", "2", "--form", form, "--csv", str(file))
    assert said.startswith(f"{file}: {name} for 2 ranks, ")
    assert printed(capsys, "schedule", str(file), "--form", form) == file.read_text()
    imported = json.loads(printed(capsys, "simulate", "--pp", "2", "--schedule", str(file), "--json"))
    own = json.loads(printed(capsys, "simulate", name, "--pp", "2", "--json"))
    assert imported["backends"] == ["gloo", "nccl"]
    for fact in ("layers", "end", "bubble", "peak_memory"):
        assert imported[fact] == own[fact]


def test_a_file_can_be_turned_into_the_other_form(tmp_path: Path, capsys: Captured) -> None:
    texts = [printed(capsys, "schedule", "zb-v", "--pp", "2", "--form", form) for form in FORMS]
    for text, other, form in zip(texts, reversed(texts), reversed(FORMS), strict=True):
        file = tmp_path / "schedule.csv"
        file.write_text(text)
        assert printed(capsys, "schedule", str(file), "--form", form) == other


def test_json_has_the_rows(capsys: Captured) -> None:
    facts = json.loads(printed(capsys, "schedule", "gpipe", "--pp", "2", "--form", "compute_only", "--json"))
    assert (facts["ranks"], facts["stages"], facts["microbatches"]) == (2, 2, 4)
    assert facts["rows"] == [[f"{s}{kind}{m}" for kind in "FB" for m in range(4)] for s in range(2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2 (rank 1), column 2: '1X0' is no action"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "row 1 (rank 0), column 2, 0F0: this work is done twice"),
        ("0F0,0B0\n1F0\n", "row 2 (rank 1), column 1, 1F0: its backward pass 1B0, or 1I0 and 1W0, is missing"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_row_column_and_reason(
    text: str, sentence: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    for words in (["schedule", str(file)], ["simulate", "--pp", "2", "--schedule", str(file)]):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"shardlab: {file}: ")
        assert sentence in captured.err

"""`shardlab validate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main

RUNS = Path(__file__).parent.parent / "validate" / "published_runs.json"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    rows = [row for row in json.loads(RUNS.read_text()) if row["id"].startswith(("titan", "zero", "llama3"))]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


def test_json_has_every_run_with_what_was_measured_and_predicted(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(few), "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 4
    titan = rows["titan-t1-8B-8gpu-eager"]
    assert titan["measured_gib"] == pytest.approx(82.4)
    assert {"measured_s", "predicted_s", "predicted_gib"} <= titan.keys()
    assert rows["llama3-405B-t4-8192gpu-s8192"]["predicted_s"] is None
    assert rows["zero-7.5B-Nd64-stage2"]["memory"] == "model state"


def test_the_tables_tell_errors_by_source_and_what_was_left_out(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(few)]) == 0
    said = capsys.readouterr().out
    assert "torchtitan" in said
    assert "Rajbhandari" in said
    assert "1 of 4 runs are not predicted" in said


def test_a_file_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "none.json"]) == 2
    assert capsys.readouterr().err == "shardlab: none.json cannot be read: No such file or directory\n"

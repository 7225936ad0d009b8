"""`shardlab validate`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shardlab.cli import main

Captured = pytest.CaptureFixture[str]
RUNS = Path(__file__).parents[1] / "planner" / "published" / "published_runs.json"


@pytest.fixture
def few(tmp_path: Path) -> Path:
    rows = [row for row in json.loads(RUNS.read_text()) if row["id"].startswith(("titan", "zero", "llama3"))]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predict the runs in this process: the first test lets as many processes do so as there are cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)


def test_json_has_every_run_with_what_was_measured_and_predicted(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(few), "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 4
    titan = rows["titan-t1-8B-8gpu-eager"]
    assert titan["measured_gib"] == pytest.approx(82.4)
    assert {"measured_s", "predicted_s", "predicted_gib"} <= titan.keys()
    assert rows["llama3-405B-t4-8192gpu-s8192"]["predicted_s"] is None
    assert rows["zero-7.5B-Nd64-stage2"]["memory"] == "model state"


@pytest.mark.usefixtures("one_process")
def test_the_tables_tell_errors_by_source_and_what_was_left_out(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(few)]) == 0
    said = capsys.readouterr().out
    assert "torchtitan" in said
    assert "Rajbhandari" in said
    assert "1 of 4 runs are not predicted" in said


@pytest.mark.usefixtures("one_process")
def test_the_runs_that_are_farthest_off_are_named_with_both_figures(few: Path, capsys: Captured) -> None:
    (titan,) = (row for row in json.loads(few.read_text()) if row["id"] == "titan-t1-8B-8gpu-eager")
    slow = titan | {"id": "twice as slow", "measured": {"iteration_s": 6.0, "peak_mem_gib": 200.0}}
    few.write_text(json.dumps([titan, slow]))
    assert main(["validate", str(few)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.startswith("farthest off in step time")]
    assert lines[place].split()[5:] == ["measured", "predicted", "error"]
    assert lines[place + 1].startswith("twice as slow")
    assert lines[place + 1].split()[3:5] == ["6.00", "s"]
    assert lines[place + 2].startswith("titan")
    assert max(map(len, lines)) <= 80


def test_a_file_that_is_not_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "none.json"]) == 2
    assert capsys.readouterr().err == "shardlab: none.json cannot be read: No such file or directory\n"


@pytest.mark.usefixtures("one_process")
def test_what_was_assumed_is_reported_on_demand_and_in_json(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = (row for row in json.loads(few.read_text()) if row["id"] == "titan-t1-8B-8gpu-eager")
    row["model"]["kv_heads"] = row["parallelism"]["cp"] = None
    few.write_text(json.dumps([row]))
    assert main(["validate", str(few)]) == 0
    assert "1 of 1 runs do not state all details" in capsys.readouterr().out
    assert main(["validate", str(few), "--assumed"]) == 0
    said = capsys.readouterr().out
    assert f"key and value heads: as many as heads ({row['id']})" in said
    assert main(["validate", str(few), "--json"]) == 0
    (output,) = json.loads(capsys.readouterr().out)
    assert "context parallelism: none" in output["assumed"]


@pytest.mark.usefixtures("one_process")
def test_runs_whose_memory_was_mispredicted_are_named(few: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (titan,) = (row for row in json.loads(few.read_text()) if row["id"] == "titan-t1-8B-8gpu-eager")
    ended = titan | {"id": "said to have ended", "measured": {"iteration_s": "OOM"}}
    crowded = titan | {"id": "said to have run", "recompute": "none"}
    output = ended | {"id": "ended", "recompute": "none"}
    few.write_text(json.dumps([ended, crowded, output]))
    assert main(["validate", str(few)]) == 0
    said = capsys.readouterr().out
    assert "1 of 2 runs that ran out of memory are predicted not to fit." in said
    assert "Said to fit but ran out of memory:\n  said to have ended" in said
    assert "Said not to fit but ran:\n  said to have run" in said


@pytest.mark.usefixtures("one_process")
def test_a_long_source_leaves_room_for_the_figures(few: Path, capsys: Captured) -> None:
    (titan,) = (row for row in json.loads(few.read_text()) if row["id"] == "titan-t1-8B-8gpu-eager")
    few.write_text(json.dumps([titan | {"publication": None, "source": "a repository of many words, its README " * 4}]))
    assert main(["validate", str(few)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("a repository of many words ") and line.count("%") == 4 for line in lines)

"""`shardlab plan --grade`: a table and JSON of a small file of runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from tests.planner.nanotron_rows import row


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs on 8 devices: the second is predicted fastest, the third crashed, and the fourth breaks a limit."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    monkeypatch.setenv("COLUMNS", "120")
    rows = [
        row(dp=4, tp=2, micro_batch=8, speed=20000.0) | {"id": "tensor-parallel"},
        row(dp=8, micro_batch=2, speed=10000.0) | {"id": "data-parallel"},
        row(dp=8, micro_batch=4, speed=None) | {"id": "crashed"},
        row(pp=8, micro_batch=64, speed=None) | {"id": "pipeline"},
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


def graded(runs: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["plan", "--grade", str(runs), "--recipe", "nanotron", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_say_what_is_predicted_and_cells_what_is_chosen(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = graded(runs, capsys)
    tensor, data, crashed, pipeline = found["rows"]
    assert tensor["measured_tokens_per_s_per_device"] == 20000.0
    assert data["predicted_tokens_per_s_per_device"] > tensor["predicted_tokens_per_s_per_device"]
    assert crashed["measured_tokens_per_s_per_device"] is None
    assert pipeline["legal"] is False
    assert pipeline["predicted_gib"] is None
    assert "at least pp - 1 microbatches" in pipeline["reason"]
    (cell,) = found["cells"]
    assert (cell["model"], cell["devices"]) == ("small", 8)
    assert (cell["chosen"], cell["best"], cell["regret"]) == ("data-parallel", "tensor-parallel", 0.5)
    assert cell["rank_correlation"] == -1.0
    assert found["figures"]["all"]["regret"] == 0.5


def test_the_table_has_a_line_for_each_cell_and_each_figure(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--grade", str(runs), "--recipe", "nanotron"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["small", "8", "4", "2", "50.0%", "0.0%", "-1.00", "data-parallel"] in lines
    assert ["mean", "regret", "50.0%"] in lines
    assert ["first", "choice", "runs", "1", "of", "1"] in lines
    assert ["1", "of", "4", "runs", "break", "a", "limit,", "such", "as:"] in lines


def test_a_file_in_which_nothing_ran_cannot_be_graded(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write_text(json.dumps([row(speed=None)]))
    assert main(["plan", "--grade", str(runs)]) == 2
    assert "none of its 1 runs measured a step's time; there is nothing to grade" in capsys.readouterr().err

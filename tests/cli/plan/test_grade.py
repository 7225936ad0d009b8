"""`shardlab plan --grade`: what was assumed of runs is told, and a mistake is told apart from a framework's limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from tests.planner.nanotron_rows import row

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    good, open, limited, wrong = row(dp=16), row(tp=2, dp=8), row(pp=8, micro_batch=64), row(dp=16)
    open["hardware"]["interconnect"] = "a fast network [of our own]"
    wrong["hardware"]["gpus"] = 8
    rows: list[dict[str, Any]] = [
        run | {"id": name} for name, run in {"good": good, "open": open, "limited": limited, "wrong": wrong}.items()
    ]
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(rows))
    return path


def test_what_was_assumed_is_reported_with_how_many_runs_and_one_of_them(runs: Path, capsys: Captured) -> None:
    assert main(["plan", "--grade", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = "  network: 8 x infiniband-ndr a node, since a fast network [of our own] is unknown (open)"
    assert said in lines
    assert "  key and value heads: as many as heads (3 runs, good and others)" in lines
    assert "3 of 4 runs do not state all details. Assumptions:" in lines


def test_a_frameworks_limit_and_a_mistake_are_distinguished(runs: Path, capsys: Captured) -> None:
    assert main(["plan", "--grade", str(runs)]) == 0
    lines = capsys.readouterr().out.splitlines()
    limit = lines.index("1 of 4 runs break a limit of their framework, such as:")
    assert lines[limit + 1].startswith("  limited: nanotron's 1f1b needs")
    mistake = lines.index("1 of 4 runs are no valid plans, such as:")
    assert lines[mistake + 1] == "  wrong: has a mesh of 16 ranks on 8 GPUs"


def test_json_tells_of_each_run_what_was_assumed_and_whether_a_limit_is_broken(runs: Path, capsys: Captured) -> None:
    assert main(["plan", "--grade", str(runs), "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert {name: (row["legal"], row["breaks_limit"]) for name, row in rows.items()} == {
        "good": (True, False),
        "open": (True, False),
        "limited": (False, True),
        "wrong": (False, False),
    }
    assert any(phrase.startswith("network: 8 x infiniband-ndr") for phrase in rows["open"]["assumed"])


def test_a_name_that_is_unknown_is_one_sentence(runs: Path, capsys: Captured) -> None:
    rows = json.loads(runs.read_text())
    rows[1]["hardware"]["network"] = "carrier-pigeon"
    runs.write_text(json.dumps(rows))
    assert main(["plan", "--grade", str(runs)]) == 2
    output = capsys.readouterr().err
    assert output.startswith("shardlab: run open has an unknown name: there is no link 'carrier-pigeon'; there are")
    assert len(output.splitlines()) == 1

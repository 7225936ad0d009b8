"""`shardlab plan --write`: the chosen plan as files of the recipe's framework."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main

ASKED = [
    *("plan", "--model", "llama3-8b", "--layers", "4", "--cluster", "h100x8", "--global-batch", "16"),
    *("--sequence", "2048", "--pp", "1", "--cp", "1", "--recompute", "none", "--forecasts", "6"),
]

Captured = pytest.CaptureFixture[str]


def test_the_chosen_plan_is_written_for_its_framework_and_explained(tmp_path: Path, capsys: Captured) -> None:
    folder = tmp_path / "run"
    assert main([*ASKED, "--recipe", "megatron-core", "--write", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["written"] == {"files": [str(folder / "train.sh")], "unsaid": shown["written"]["unsaid"]}
    assert main(["explain", str(folder / "train.sh"), "--cluster", "h100x8", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["step_seconds"] == pytest.approx(shown["chosen"]["step_seconds"], rel=0.2)
    assert main([*ASKED, "--recipe", "megatron-core", "--write", str(folder)]) == 0  # its own files are replaced
    assert "written to" in capsys.readouterr().out


def test_a_users_file_is_not_replaced(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "train.toml").write_text("mine = 1\n")
    assert main([*ASKED, "--recipe", "torchtitan", "--write", str(tmp_path)]) == 2
    assert "this file exists and is not one of Shardlab's; give another name, or --force" in capsys.readouterr().err
    assert main([*ASKED, "--recipe", "torchtitan", "--write", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "train.toml").read_text().startswith("# written by shardlab plan: llama3-8b on 1 x 8 h100")


def test_what_no_framework_runs_is_refused_before_the_search(tmp_path: Path, capsys: Captured) -> None:
    assert main([*ASKED, "--write", str(tmp_path)]) == 2
    assert "no framework's files are written for recipe shardlab" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for path, words in ((tmp_path / "file", "this is a file"), (tmp_path / "no" / "where", "does not exist")):
        assert main([*ASKED, "--recipe", "torchtitan", "--write", str(path)]) == 2
        assert words in capsys.readouterr().err

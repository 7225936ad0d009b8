"""`shardlab schedule search`: its report, the file that it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main

Captured = pytest.CaptureFixture[str]


def searched(capsys: Captured, *words: str) -> dict[str, Any]:
    """Fields of the report of a search."""
    assert main(["schedule", "search", "--proposals", "50", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_report_compares_with_published_schedules(capsys: Captured) -> None:
    assert main(["schedule", "search", "--pp", "4", "--limit", "3", "--proposals", "20"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "pipeline 4 ranks, 2 stages each in a V, 16 microbatches" in said
    assert "memory limit 3 of activations on a rank" in said
    assert "v-half, the fastest published schedule that fits" in said
    assert "above the lower bound" in said
    assert "memory by rank 3 3 3 3" in said


def test_json_has_every_figure(capsys: Captured) -> None:
    fields = searched(capsys, "--pp", "4", "--placement", "loop", "--microbatches", "8", "--limit", "4")
    assert fields["schedules"][0] == {"schedule": "found", "time": 27.0, "memory": 4.0, "fits": True}
    assert fields["gap"] == 0
    assert fields["lower_bound"] == 27.0
    assert fields["best"] == "zb-h1"
    assert set(fields["idle"]) >= {"waiting for messages", "waiting for passes"}
    assert len(fields["memory_by_rank"]) == 4


def test_the_exact_solver_proves_the_bound(capsys: Captured) -> None:
    words = ("--pp", "2", "--microbatches", "4", "--costs", "input=1.2,weight=0.8,message=0.1", "--limit", "2")
    before = searched(capsys, *words)
    assert before["gap"] > 0
    assert searched(capsys, *words, "--exact", "30")["gap"] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("name", ["schedule.csv", "schedule.py"])
def test_a_written_schedule_is_simulated_like_any_other(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    report = searched(capsys, "--pp", "2", "--microbatches", "4", "--csv", name)
    schedule = name if name.endswith(".csv") else f"{name}:edited"
    words = ["--pp", "2", "--schedule", schedule, "--microbatches", "4", "--layers", "4", "--json"]
    assert main(["simulate", *words, "--costs", "forward=0.5,backward_input=0.5,backward_weight=0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["end"] == pytest.approx(report["schedules"][0]["time"])


def test_costs_of_a_model_on_a_cluster_are_predicted(capsys: Captured) -> None:
    words = ("--model", "gpt2", "--cluster", "a100x2", "--pp", "2", "--global-batch", "8")
    fields = searched(capsys, *words)
    assert 0 < fields["schedules"][0]["time"] < fields["step"]
    assert fields["tensors"] < 40 * 2**30
    assert main(["schedule", "search", "--proposals", "5", *words]) == 0
    assert "whole step" in capsys.readouterr().out


REFUSED = {
    "--limit 0.5": "a memory limit of 0.5 is below 1, which one microbatch takes on rank 0",
    "--pp 1": "a schedule is for a pipeline; give --pp 2 or more",
    "--tp 2": "--tp needs a model and a cluster",
    "--memory 3GiB": "--memory needs a model and a cluster",
    "--other-machine": "--other-machine needs a model and a cluster",
    "--switch attention=flash2": "--switch needs a model and a cluster",
    "--force": "--force replaces the file of --csv; give it, or leave --force out",
    "--model gpt2": "give both --model and --cluster",
    "--model gpt2 --cluster a100x2 --pp 2 --limit 3": "--limit is for costs that are given",
    "--model gpt2 --cluster a100x2 --pp 2 --memory 0.1GiB": "GiB for one microbatch, and has 0 KiB for tensors",
    "--model gpt2 --cluster a100x2": "a schedule is for a pipeline; give --pp 2 or more",
    "--seconds 0": "--seconds is 0; give a number above 0",
    "--exact -1": "--exact is -1; give a number of seconds above 0",
    "--exact 1 --pp 8": "the exact search takes at most 600",
    "--stages-per-rank 3": "costs of 12 stages are given for 4 ranks; give 8, two a rank",
    "--csv nowhere/s.csv": "the folder nowhere does not exist",
    "--costs forward=-1": "forward of stage 0 is -0.5; give a number above 0",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_request_gets_one_sentence(line: str, capsys: Captured) -> None:
    assert main(["schedule", "search", "--proposals", "1", *line.split()]) == 2
    said = capsys.readouterr().err
    assert REFUSED[line] in said
    assert said.count("\n") == 1

"""The folder of a run, also where there is no room for it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from shardlab.draw import save_timeline
from shardlab.language import UserError
from shardlab.models import MLP
from shardlab.train.data.tokenizers import ByteTokenizer
from shardlab.train.job import Job
from shardlab.train.output import OutputFolder
from tests.support.processes import files_of_at_most

Captured = pytest.CaptureFixture[str]
MODEL = MLP(layers=2, hidden_size=16, seq_len=8)


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> OutputFolder:
    return OutputFolder(tmp_path / "run")


def test_a_loss_that_is_not_finite_is_null(folder: OutputFolder) -> None:
    folder.write_metrics({"step": 0, "loss": float("nan")})
    folder.write_metrics({"step": 1, "loss": float("inf")})
    folder.close()
    assert (folder.path / "metrics.jsonl").read_text() == '{"step": 0, "loss": null}\n{"step": 1, "loss": null}\n'


def test_metrics_that_found_no_room_are_written_when_there_is_some(folder: OutputFolder, capsys: Captured) -> None:
    with files_of_at_most(60):  # within the third line
        for step in range(4):
            folder.write_metrics({"step": step, "loss": 1.0})
    assert folder.unwritten == {"metrics.jsonl"}
    assert len(capsys.readouterr().err.splitlines()) == 1, "it is said once"
    folder.write_metrics({"step": 4, "loss": 1.0})
    assert not folder.unwritten
    folder.close()
    assert [line["step"] for line in lines(folder.path)] == [0, 1, 2, 3, 4]


def test_metrics_that_never_find_room_end_with_a_whole_line(folder: OutputFolder, capsys: Captured) -> None:
    with files_of_at_most(60):
        for step in range(4):
            folder.write_metrics({"step": step, "loss": 1.0})
        folder.close()
    assert [line["step"] for line in lines(folder.path)] == [0, 1]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_weights_for_which_the_disk_has_no_room_are_refused_before_training(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(UserError, match=r"the weights will have [\d,]+ bytes, but the disk of .* bytes free"):
        OutputFolder(tmp_path / "new" / "run", needed=2 * free + 10**9)
    assert not (tmp_path / "new" / "run").exists()


def test_a_full_disk_before_the_first_step_is_one_sentence(
    folder: OutputFolder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("shardlab.train.output.save_timeline", save_timeline)  # whatever tests.support.short_runs did
    checked = Job("ddp", 2, 2, MODEL, 2).checked()
    with files_of_at_most(500), pytest.raises(UserError, match=r"strategy\.svg cannot be written \(File too large\)"):
        folder.begin({"seed": 0}, "", checked, "ddp", ByteTokenizer())
    folder.close()
    assert sorted(os.listdir(folder.path)) == ["config.toml", "metrics.jsonl", "run.json"]
    another = OutputFolder(tmp_path / "another")
    another.begin({"seed": 0}, "", checked, "ddp", ByteTokenizer())
    another.close()
    assert "ddp: one optimizer step" in (another.path / "strategy.svg").read_text()

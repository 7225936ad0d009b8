"""`shardlab history` and `shardlab show`: what is told of runs, however they ended and whatever their folders hold."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardlab.cli import main
from shardlab.common.files import write_atomically
from shardlab.train.history import find_runs, note_end, read_run, record_inode

Captured = pytest.CaptureFixture[str]


def make_run(folder: Path, steps: int = 3, wanted: int = 5, **record: Any) -> Path:
    folder.mkdir(parents=True)
    model = {"kind": "gpt", "layers": 4, "hidden_size": 16}
    known = {"began": "2026-01-02T03:04:05+00:00", "name": "ddp", "ranks": 2, "model": model}
    (folder / "run.json").write_text(json.dumps({**known, **record}))
    (folder / "config.toml").write_text(f"[train]\nsteps = {wanted}\n")
    lines = [json.dumps({"step": step, "loss": 5.0 - step, "dt": 0.1}) for step in range(steps)]
    (folder / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_runs_are_listed_in_the_order_in_which_they_began(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "b", began="2026-01-01")
    make_run(tmp_path / "runs" / "a", began="2026-01-03")
    other = make_run(tmp_path / "elsewhere", began="2026-01-02")
    runs = find_runs([tmp_path / "runs", other, tmp_path / "runs"])
    assert [run.folder.name for run in runs] == ["b", "elsewhere", "a"]


def test_a_run_that_ended_says_how_and_the_last_whole_line_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", ended={"how": "failed", "why": "rank 1 failed"})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    run = read_run(folder)
    assert (run.ended, run.why, run.steps, run.wanted, run.last["loss"]) == ("failed", "rank 1 failed", 3, 5, 3.0)


def test_a_run_without_an_end_was_killed_unless_its_metrics_are_locked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    assert read_run(folder).ended == "killed"
    with (folder / "metrics.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read_run(folder).ended == "running"


def test_only_a_complete_checkpoint_can_be_resumed_from(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "a", ended={"how": "interrupted"})
    (folder / "checkpoints" / "step-000002.part").mkdir(parents=True)
    (folder / "checkpoints" / "step-000002").mkdir()
    assert read_run(folder).resume is None
    for step in (1, 2):
        whole = folder / "checkpoints" / f"step-{step:06}"
        whole.mkdir(exist_ok=True)
        (whole / "manifest.json").write_text("{}")
    assert read_run(folder).resume == f"shardlab train --resume {folder}"
    assert main(["history", str(tmp_path)]) == 0
    output = "".join(capsys.readouterr().out.split())  # the folder may be too long for a line
    assert f"goonafterstep2:shardlabtrain--resume{folder}" in output
    (folder / "run.json").write_text(json.dumps({"ended": {"how": "finished"}}))
    assert read_run(folder).resume is None


@pytest.mark.parametrize("text", ["{", "[1]", '{"ended": 3}', "\x00"])
def test_a_torn_record_is_reported_and_hides_no_other_run(text: str, tmp_path: Path, capsys: Captured) -> None:
    (make_run(tmp_path / "torn") / "run.json").write_text(text)
    make_run(tmp_path / "whole")
    assert main(["history", str(tmp_path), "--json"]) == 0
    runs = {Path(run["folder"]).name: run for run in json.loads(capsys.readouterr().out)}
    assert runs["torn"]["ended"] == "unreadable"
    assert "run.json" in runs["torn"]["why"]
    assert runs["whole"]["ended"] == "killed"


def test_the_end_is_noted_only_of_a_run_that_this_process_began(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a")
    before = record_inode(folder)
    note_end(folder, "failed", before)
    assert read_run(folder).ended == "killed"
    write_atomically(folder / "run.json", (folder / "run.json").read_text())
    os.utime(folder / "run.json", (0, 0))  # the clock has been set back
    note_end(folder, "finished", before)
    assert read_run(folder).ended == "finished"
    note_end(tmp_path / "none", "failed", record_inode(tmp_path / "none"))  # which never began


def test_a_run_is_shown_with_its_configuration_and_files(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / "a", ended={"how": "failed", "why": "the loss is not finite"})
    assert main(["show", str(folder)]) == 0
    output = capsys.readouterr().out
    for line in (
        "train    steps  5",
        "steps           3 of 5",
        "failed: the loss is not finite",
        "loss 3.000, 0.1 s/step",
    ):
        assert line in output
    assert "metrics.jsonl" in output


LONG = "a-run-whose-name-is-so-long-that-a-table-of-eighty-columns-has-no-room-for-it"
PLANNED: dict[str, Any] = {"name": "plan", "strategy": {"mesh": {"dp_shard": 2, "pp": 2}, "schedule": "zb-v"}}


@pytest.mark.parametrize("width", [40, 80, 160])
def test_no_terminal_cuts_names_steps_and_losses(width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("runs") / LONG, 12_000, 120_000, ended={"how": "finished", "validation_loss": 2.4512})
    make_run(Path("runs/b"), 3, 5, **PLANNED)
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=width, color_system=None, highlight=False)
    monkeypatch.setattr("shardlab.cli.history.stdout_console", lambda: console)
    assert main(["history"]) == 0
    heads, long, *folded, planned = lines = re.sub(r"\x1b\[\d*m", "", shown.getvalue()).splitlines()
    assert "".join([long.split()[0], *map(str.strip, folded)]) == f"runs/{LONG}", "it goes on below itself"
    assert long.split()[-3:] == ["12000/120000", "-11994.000", "2.451"]
    assert planned.split()[-2:] == ["3/5", "3.000"]
    assert width < 80 or max(map(len, lines)) <= width
    assert "…" not in shown.getvalue()
    assert ("strategy" in heads, "began" in heads) == (width == 160, False), "columns are left out whole"


def test_a_pipe_has_all_columns_and_a_plan_is_called_by_its_mesh(tmp_path: Path, capsys: Captured) -> None:
    folder = make_run(tmp_path / LONG, **PLANNED)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 2.0, "validation_loss": 2.125}\n{"step": 4, "loss": 1.0}\n')
    assert main(["history", str(tmp_path)]) == 0
    row = capsys.readouterr().out.splitlines()[1]
    assert row.startswith(f"{folder}  2026-01-02 03:04  gpt 4x16  pp 2 x dp_shard 2 (zb-v)  killed")
    assert row.endswith("2    5/5  1.000       2.125")
    assert main(["history", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert (run["strategy"], run["validation_loss"]) == ("pp 2 x dp_shard 2 (zb-v)", 2.125)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("history nowhere", "nowhere does not exist; name the folder of a run, or one with runs in it"),
        ("history", "there is no folder runs in this folder"),
        ("show", "no run is given"),
        ("show .", "is not the folder of a run: it has no run.json"),
    ],
)
def test_a_folder_that_is_none_of_a_run_is_one_sentence(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.starts_ranks
@pytest.mark.parametrize(
    ("flags", "ended", "why"),
    [("--steps 2", "finished", ""), ("--steps 9 --learning-rate 1e30", "failed", "is not finite")],
)
def test_a_run_leaves_its_end_on_record(
    flags: str, ended: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(f"train --strategy ddp --ranks 2 --hidden-size 16 {flags} --out run".split())
    run = read_run(tmp_path / "run")
    assert run.ended == ended
    assert why in run.why
    assert (run.validation_loss is None) == (ended == "failed")

"""shardlab learn run: the words by which ranks find a student's program, and a real training."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.cli import command_of, main
from shardlab.cli.learn.train import (
    FEWER_RANKS,
    MOST_PROCESSES,
    comparison_report,
    run_command,
    strategy_words,
    train_and_verify,
)
from shardlab.language import Mesh, UserError
from shardlab.learn.course.catalogue import CourseEntry, course, find, gallery
from shardlab.strategies.load import load
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.find import find_schedule
from tests.cli.test_compare import written

REFUSED = {
    "tied_embeddings": "shardlab train --pp 2 --dp-shard 2 --shard-optimizer dp_shard --tied",
    "tied_copies": "shardlab train --pp 2 --tied",
    "shared_norm": "shardlab train --pp 2 --tied",
    "choose_plan": "shardlab simulate --model llama3-70b --cluster h100x64 --global-batch 128 --dp-shard 16 --tp 4 "
    "--shard-parameters dp_shard --shard-gradients dp_shard --shard-optimizer dp_shard --sequence-parallel",
}
"""Exercises whose programs cannot be trained here, with the command that is named in their place."""


def solved(name: str, folder: Path) -> tuple[CourseEntry, Path]:
    """An exercise, and a file with its solution."""
    entry = find(name)
    file = folder / f"{name}.py"
    file.write_text(entry.solution_text)
    return entry, file


def test_an_exercise_knows_whether_its_programs_can_be_trained() -> None:
    assert {entry.name for entry in (*course(), *gallery()) if not entry.exercise.trains} == set(REFUSED)


def test_a_program_runs_from_its_file_without_passes(tmp_path: Path) -> None:
    entry, file = solved("fsdp", tmp_path)
    assert strategy_words(entry, file) == ([f"{file}:fsdp", "--ranks", "4", "--passes", "none"], 4)


def test_a_program_on_another_mesh_runs_on_that_mesh(tmp_path: Path) -> None:
    words, ranks = strategy_words(*solved("hsdp_once", tmp_path))
    assert load(words[0]).grid(ranks) == Mesh(dp_replicate=2, dp_shard=2)


def test_a_plan_of_many_ranks_runs_on_few(tmp_path: Path) -> None:
    words, ranks = strategy_words(*solved("buckets", tmp_path))
    assert ranks == FEWER_RANKS
    assert words == ["--dp-shard", "4", "--passes", "bucket=4,defer=1"]


def test_a_program_of_too_many_ranks_is_refused(tmp_path: Path) -> None:
    entry, file = solved("fsdp", tmp_path)
    many = replace(entry, exercise=replace(entry.exercise, mesh=Mesh(dp_shard=32)))
    with pytest.raises(UserError, match="fsdp has 32 ranks, and at most 16 processes are started here"):
        strategy_words(many, file)


def test_a_schedule_of_several_stages_is_found_with_their_number(tmp_path: Path) -> None:
    for name, stages in (("interleaved", 2), ("v_half", 2), ("one_f_one_b", 1)):
        words, ranks = strategy_words(*solved(name, tmp_path))
        assert words[:3] == ["--pp", str(ranks), "--schedule"]
        schedule = find_schedule(words[3])
        assert isinstance(schedule, Schedule)
        assert schedule.stages_per_rank == stages


def test_what_no_model_here_has_is_not_trained(tmp_path: Path) -> None:
    for name, command in REFUSED.items():
        with pytest.raises(UserError) as refusal:
            strategy_words(*solved(name, tmp_path))
        assert str(refusal.value).endswith(f": {command}")


def test_the_commands_that_refusals_name_exist() -> None:
    for command in REFUSED.values():
        command_of(command.split()[1:])


def test_a_training_that_is_too_short_to_be_compared_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", "init", str(tmp_path / "course")]) == 0
    monkeypatch.chdir(tmp_path / "course")
    solved("one_rank", Path())
    assert main(["learn"]) == 0
    assert main(["learn", "run", "--steps", "3"]) == 2
    assert "--steps is 3; to compare its steps with the prediction, give 15 or more" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 130])
def test_of_an_interrupt_only_the_command_that_trains_tells(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(process: subprocess.Popen[bytes]) -> int:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    assert run_command([sys.executable, "-c", f"raise SystemExit({status})"], json=False) == 130


RUNNABLE = [entry.name for entry in (*course(), *gallery()) if entry.name not in REFUSED]


@pytest.mark.thorough
@pytest.mark.starts_ranks
@pytest.mark.parametrize("name", RUNNABLE)
def test_every_solution_trains_and_is_verified(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    entry, file = solved(name, tmp_path)
    assert train_and_verify(entry, file, 15, json=True) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["verified"]
    assert {row["what"] for row in report["comparison"]} >= {"step", "peak memory"}


@pytest.mark.parametrize("name", RUNNABLE)
def test_ranks_find_every_program_on_its_mesh(name: str, tmp_path: Path) -> None:
    entry, file = solved(name, tmp_path)
    words, ranks = strategy_words(entry, file)
    if entry.exercise.kind == "rank":
        assert load(words[0]).grid(ranks).used == entry.exercise.mesh.used
    elif entry.exercise.kind == "schedule":
        assert find_schedule(words[words.index("--schedule") + 1])
    assert ranks <= MOST_PROCESSES


def test_the_parts_of_a_step_add_up_and_a_sentence_says_which_differs_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    report = comparison_report(tmp_path)
    step, *parts, _ = report.data["comparison"]
    for side in ("predicted", "measured"):
        assert sum(row[side] for row in parts) == pytest.approx(step[side])
    report.show(json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "speed above is the median over all steps but the first ones" in said
    assert re.search(r"The step took \d\.\d\d times the predicted time. The largest difference is [+-]\S+ ms of", said)


@pytest.mark.starts_ranks
def test_a_passed_program_trains_and_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "init", "course"]) == 0
    monkeypatch.chdir(tmp_path / "course")
    solved("one_rank", Path())
    assert main(["learn"]) == 0
    capfd.readouterr()
    assert main(["learn", "run", "--steps", "15", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["verified"]
    assert report["exercise"] == "one_rank"
    rows = {row["what"]: row for row in report["comparison"]}
    assert all(row["predicted"] >= 0 and row["measured"] >= 0 for row in rows.values())
    assert rows["peak memory"]["predicted"] == pytest.approx(rows["peak memory"]["measured"], rel=0.05)
    assert (Path(report["folder"]) / "weights.safetensors").is_file()

"""shardlab learn run: the words by which ranks find a student's program, and a real training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.cli.learn.train import FEWER_RANKS, strategy_words
from shardlab.language import Mesh, UserError
from shardlab.learn.course.catalogue import CourseEntry, find
from shardlab.strategies.load import load
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.find import find_schedule


def solved(name: str, folder: Path) -> tuple[CourseEntry, Path]:
    """An exercise, and a file with its solution."""
    entry = find(name)
    file = folder / f"{name}.py"
    file.write_text(entry.solution_text)
    return entry, file


def test_a_program_runs_from_its_file_without_passes(tmp_path: Path) -> None:
    entry, file = solved("fsdp", tmp_path)
    assert strategy_words(entry, file) == ([f"{file}:fsdp", "--ranks", "4", "--passes", "none"], 4)


def test_a_program_on_another_mesh_runs_on_that_mesh(tmp_path: Path) -> None:
    words, ranks = strategy_words(*solved("hsdp_once", tmp_path))
    assert load(words[0]).grid(ranks) == Mesh(dp_replicate=2, dp_shard=2)


def test_a_plan_of_many_ranks_runs_on_few(tmp_path: Path) -> None:
    words, ranks = strategy_words(*solved("buckets", tmp_path))
    assert ranks == FEWER_RANKS
    assert words == ["--dp-shard", "4", "--passes", "bucket=4,defer=2"]


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
    for name in ("tied_embeddings", "choose_plan"):
        with pytest.raises(UserError, match=f"{name} "):
            strategy_words(*solved(name, tmp_path))


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

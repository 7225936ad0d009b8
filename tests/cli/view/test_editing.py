"""Editors: every version gets the verdict of the command line, and files to save give the same step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import command_of, main
from shardlab.cli.simulate.step_options import StepOptions
from shardlab.cli.view.editing import (
    Editor,
    ProgramEditor,
    ProgramLevel,
    ScheduleEditor,
    ScheduleLevel,
    editor_of,
    level_editor,
    levels,
    schedule_of,
)
from shardlab.common.user_code import trace_limits
from shardlab.language import UserError
from shardlab.learn.course.catalogue import CourseEntry, find
from shardlab.learn.course.folder import CourseFolder
from shardlab.learn.course.grading import grade
from shardlab.strategies.schedules import Schedule
from shardlab.strategies.schedules.pytorch_csv import export_csv
from tests.draw.viewer.test_source_lines import PROGRAM


def editor(*words: str) -> Editor:
    options = command_of(["view", *words])
    assert isinstance(options, StepOptions)
    return editor_of(options)


def swapped(text: str, row: int, one: str, other: str) -> str:
    """A schedule in which two actions of a rank have changed places."""
    rows = [line.split(",") for line in text.splitlines()]
    here, there = rows[row].index(one), rows[row].index(other)
    rows[row][here], rows[row][there] = other, one
    return "".join(",".join(words) + "\n" for words in rows)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-v", "interleaved-1f1b", "zb-h1"])
def test_the_starting_point_is_legal_and_as_fast_as_simulate_says(
    schedule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--pp", "4", "--schedule", schedule, "--microbatches", "8"]
    schedule_editor = editor(*words)
    verdict = schedule_editor.judge(schedule_editor.start)
    assert verdict.legal
    assert verdict.sentence == ""
    assert main(["simulate", *words, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    figures = verdict.as_dict()["figures"]
    assert figures == {"time": simulated["end"], "memory": simulated["peak_memory"], "bubble": simulated["bubble"]}


def test_a_move_that_is_illegal_is_refused_with_its_cell() -> None:
    schedule_editor = editor("gpipe")
    verdict = schedule_editor.judge(swapped(schedule_editor.start, 0, "0F0", "0B0"))
    assert not verdict.legal
    assert verdict.step is None
    assert verdict.sentence.startswith("row 1 (rank 0), column 1, 0B0: it needs 0F0")
    assert "data" not in verdict.as_dict()


def test_a_legal_move_changes_the_figures() -> None:
    schedule_editor = editor("gpipe", "--microbatches", "8")
    start = schedule_editor.judge(schedule_editor.start).as_dict()["figures"]
    other = editor("1f1b", "--microbatches", "8")
    moved = schedule_editor.judge(other.start)
    assert moved.legal
    assert moved.as_dict()["figures"]["memory"] < start["memory"]


@pytest.mark.parametrize("text", ["", "x", "0F0,0B0\n", "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n", "(", "0F0\n" * 4])
def test_any_text_is_answered_in_a_sentence(text: str) -> None:
    verdict = editor("gpipe").judge(text)
    assert not verdict.legal
    assert verdict.sentence
    assert "Traceback" not in verdict.sentence


def test_a_schedule_of_another_size_is_refused() -> None:
    text = editor("--pp", "2", "--schedule", "gpipe").start
    with pytest.raises(UserError, match="the schedule has 2 ranks and 4 microbatches; the pipeline has 4 and 4"):
        schedule_of(text, 4, 4)


@pytest.mark.parametrize("name", ["schedule.csv", "schedule-with-messages.csv", "schedule.py:edited"])
def test_a_saved_file_gives_the_same_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    schedule_editor = editor("zb-h1", "--microbatches", "6")
    verdict = schedule_editor.judge(swapped(schedule_editor.start, 0, "0W0", "0F5"))
    assert verdict.legal, verdict.sentence
    file = name.partition(":")[0]
    Path(file).write_text(verdict.files[file])
    assert main(["simulate", "--pp", "4", "--microbatches", "6", "--schedule", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["end"] == verdict.as_dict()["figures"]["time"]


def test_a_program_is_checked_without_changing_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(PROGRAM)
    program_editor = editor("mine.py:alone", "--ranks", "1")
    assert isinstance(program_editor, ProgramEditor)
    assert program_editor.judge(program_editor.start).legal
    wrong = program_editor.judge(PROGRAM.replace("reversed(rank.layers)", "rank.layers"))
    assert not wrong.legal
    assert wrong.sentence.startswith("mine.py:1")
    broken = program_editor.judge(PROGRAM + "\n(")
    assert broken.sentence.startswith("mine.py:")
    with trace_limits(None, 0.2):
        endless = program_editor.judge(
            PROGRAM.replace("for l in rank.layers:", "while True: pass\n    for l in rank.layers:", 1)
        )
    assert "mine.py:4" in endless.sentence
    assert "has not come within" in endless.sentence
    assert Path("mine.py").read_text() == PROGRAM
    program_editor.close()


def test_a_strategy_without_a_schedule_is_refused() -> None:
    with pytest.raises(UserError, match="fsdp has no schedule to edit; give a pipeline"):
        editor("fsdp")
    with pytest.raises(UserError, match="leave out --model and --cluster"):
        editor("--pp", "2", "--model", "gpt2", "--cluster", "a100x2")


def test_an_edited_page_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "gpipe", "--edit", "--out", "page.html"]) == 2
    assert "--edit writes no page" in capsys.readouterr().err


def test_the_schedule_of_another_mesh_keeps_its_data_parallel_ranks() -> None:
    schedule_editor = editor("--pp", "2", "--dp-shard", "2", "--schedule", "gpipe", "--microbatches", "8")
    assert isinstance(schedule_editor, ScheduleEditor)
    assert len(schedule_editor.start.splitlines()) == 2
    assert schedule_editor.judge(schedule_editor.start).legal


def test_the_levels_are_the_exercises_about_pipelines() -> None:
    assert [entry.exercise.number for entry in levels()] == list(range(13, 21))
    assert all(entry.exercise.mesh.pp > 1 for entry in levels())


@pytest.mark.parametrize("entry", levels(), ids=lambda entry: entry.name)
def test_each_level_has_a_start_and_its_solution_passes(entry: CourseEntry) -> None:
    level = level_editor(entry)
    assert not level.judge(level.start).sentence.startswith("Passed.")
    verdict = level.judge(entry.solution_text if isinstance(level, ProgramLevel) else solution_rows(level, entry))
    assert verdict.sentence.startswith("Passed."), verdict.sentence
    assert verdict.step is not None
    level.close()


def solution_rows(level: Editor, entry: CourseEntry) -> str:
    """The reference solution of a schedule as a CSV text."""
    assert isinstance(level, ScheduleLevel)
    assert level.judge(level.start).legal
    solution = entry.solution
    if not isinstance(solution, Schedule):
        solution = Schedule(entry.name, solution, stages_per_rank=entry.exercise.stages_per_rank)
    steps = level._plan(solution).steps(level._units, level._microbatches)
    return export_csv(steps, form="compute_only")


def test_the_typical_mistakes_of_a_program_are_named_in_its_level() -> None:
    (entry,) = [entry for entry in levels() if entry.name == "gpipe"]
    level = level_editor(entry)
    mistake = entry.exercise.mistakes[0]
    verdict = level.judge(entry.solution_text.replace(*mistake.edit))
    assert mistake.advice in verdict.sentence
    assert "shardlab-edit-" not in verdict.sentence
    level.close()


def test_the_file_of_an_exercise_is_edited_on_the_mesh_and_sizes_on_which_it_is_graded(tmp_path: Path) -> None:
    CourseFolder.create(tmp_path / "course")
    for name in ("pipeline", "buckets", "ring_attention"):
        entry, file = find(name), tmp_path / "course" / f"{name}.py"
        file.write_text(entry.solution_text)
        exercise_editor = editor(str(file))
        judgement = exercise_editor.judge(exercise_editor.start)
        figures = grade(entry.exercise, entry.solution).figures
        assert judgement.step is not None
        assert figures is not None
        assert judgement.step.timelines[0].timeline.end == figures.time
        exercise_editor.close()

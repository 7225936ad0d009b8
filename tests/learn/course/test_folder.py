"""The folder of a student: its files, its notebooks, its progress, and folders of other versions."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.common.user_code import trace_limits
from shardlab.language import UserError
from shardlab.learn.course import ExerciseGrade, check
from shardlab.learn.course import folder as folders
from shardlab.learn.course.catalogue import CourseEntry, all_entries, course, find
from shardlab.learn.course.folder import PROGRESS, CourseFolder, grade_file, notebook
from tests.support.thorough import sampled


@pytest.fixture
def folder(tmp_path: Path) -> CourseFolder:
    """A new course folder."""
    return CourseFolder.create(tmp_path / "course")


def progress(folder: CourseFolder) -> dict[str, Any]:
    return json.loads((folder.path / PROGRESS).read_text())


def solve(folder: CourseFolder, name: str) -> CourseEntry:
    """Write the solution of an exercise into its file."""
    entry = find(name)
    folder.file(entry).write_text(entry.solution_text)
    return entry


def test_a_new_folder_has_the_start_of_every_exercise(folder: CourseFolder) -> None:
    for entry in all_entries():
        assert folder.file(entry).read_text() == entry.start_text
    assert progress(folder)["current"] == "one_rank"


def test_a_folder_with_a_course_is_not_written_again(folder: CourseFolder) -> None:
    with pytest.raises(UserError, match="has a course in it"):
        CourseFolder.create(folder.path)


def test_files_that_are_there_stay_when_a_course_is_written(tmp_path: Path) -> None:
    (tmp_path / "ddp.py").write_text("mine")
    CourseFolder.create(tmp_path)
    assert (tmp_path / "ddp.py").read_text() == "mine"


def test_a_folder_without_a_course_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a course folder; make one: shardlab learn init course"):
        CourseFolder.open(tmp_path)


def test_a_folder_inside_a_course_names_the_way_out(folder: CourseFolder) -> None:
    with pytest.raises(UserError, match=r"gallery is inside a course folder; go there: cd .*gallery/\.\.$"):
        CourseFolder.open(folder.path / "gallery")


def test_a_damaged_progress_can_be_replaced_without_losing_a_file(folder: CourseFolder) -> None:
    solve(folder, "ddp")
    (folder.path / PROGRESS).write_text('{"format": 1, "cur')
    with pytest.raises(UserError, match=r"is damaged .* delete it, then `shardlab learn init"):
        CourseFolder.open(folder.path)
    (folder.path / PROGRESS).unlink()
    CourseFolder.create(folder.path)
    assert (folder.path / "ddp.py").read_text() == find("ddp").solution_text


@pytest.mark.parametrize(
    "wrong",
    [[], {"current": 3, "passed": "ddp", "hints": {"ddp": "two"}, "starts": 1}, {"current": "gone", "hints": []}],
)
def test_a_progress_with_wrong_fields_is_read_as_far_as_it_goes(folder: CourseFolder, wrong: object) -> None:
    (folder.path / PROGRESS).write_text(json.dumps(wrong))
    opened = CourseFolder.open(folder.path)
    assert (opened.current, opened.passed, opened.hints) == ("one_rank", [], {})


def test_a_passed_exercise_is_remembered_and_the_next_one_follows(folder: CourseFolder) -> None:
    assert folder.grade(solve(folder, "one_rank")).passed
    assert CourseFolder.open(folder.path).passed == ["one_rank"]
    assert CourseFolder.open(folder.path).current == "grad_accum"


@pytest.mark.parametrize("subfolder", ["", "notebooks"])
def test_a_check_in_a_notebook_is_recorded(
    subfolder: str, folder: CourseFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_notebooks()
    entry = find("one_rank")
    monkeypatch.chdir(tmp_path)
    assert check("one_rank", entry.solution).passed
    assert progress(folder)["passed"] == []  # this is no course folder
    monkeypatch.chdir(folder.path / subfolder)
    assert not check("ddp", entry.solution).passed
    assert progress(folder)["passed"] == []
    assert check(0, entry.solution).passed
    assert (progress(folder)["passed"], progress(folder)["current"]) == (["one_rank"], "grad_accum")


def test_an_exercise_that_is_passed_out_of_turn_does_not_change_the_current_one(folder: CourseFolder) -> None:
    assert folder.grade(solve(folder, "ddp")).passed
    assert CourseFolder.open(folder.path).current == "one_rank"


def test_hints_come_one_after_the_other_and_the_last_is_repeated(folder: CourseFolder) -> None:
    entry = find("ddp")
    assert [folder.next_hint(entry) for _ in range(4)] == [1, 2, 3, 3]
    assert CourseFolder.open(folder.path).hints == {"ddp": 3}


def test_a_file_that_was_deleted_is_named_and_written_again(folder: CourseFolder) -> None:
    file = folder.file(find("ddp"))
    assert CourseFolder.open(folder.path).restored == []
    file.unlink()
    assert CourseFolder.open(folder.path).restored == [file]
    assert file.read_text() == find("ddp").start_text


def test_a_reset_keeps_every_version_of_the_students_file(folder: CourseFolder) -> None:
    entry = find("ddp")
    assert folder.reset(entry) is None
    for text in ("first", "second"):
        folder.file(entry).write_text(text)
        copy = folder.reset(entry)
        assert copy is not None
        assert copy.read_text() == text
        assert folder.file(entry).read_text() == entry.start_text


def test_a_folder_of_an_older_version_gets_new_exercises_and_new_starts(
    folder: CourseFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A student's file is never written, and a file that nobody has edited follows its exercise."""
    folder.file(find("ddp")).write_text("mine")
    folder.file(find("fsdp")).unlink()
    later = [replace(entry, text=entry.text.replace('"""', '"""Now: ', 1)) for entry in all_entries()]
    monkeypatch.setattr(folders, "all_entries", lambda: tuple(later))
    opened = CourseFolder.open(folder.path)
    assert folder.file(find("ddp")).read_text() == "mine"
    assert folder.file(find("fsdp")).read_text().startswith('"""Now: ')
    assert folder.file(find("one_rank")).read_text().startswith('"""Now: ')
    assert CourseFolder.open(folder.path).starts == opened.starts


def test_a_folder_of_a_later_version_keeps_what_this_one_does_not_know(folder: CourseFolder) -> None:
    old_progress = progress(folder)
    later = {
        **old_progress,
        "format": 9,
        "medals": ["gold"],
        "passed": ["flying_pipeline"],
        "hints": {"flying_pipeline": 2},
    }
    (folder.path / PROGRESS).write_text(json.dumps(later))
    opened = CourseFolder.open(folder.path)
    opened.grade(solve(opened, "ddp"))
    new_progress = progress(folder)
    assert (new_progress["format"], new_progress["medals"]) == (9, ["gold"])
    assert new_progress["passed"] == ["flying_pipeline", "ddp"]
    assert new_progress["hints"] == {"flying_pipeline": 2}


def test_exercises_are_found_by_name_number_and_file(folder: CourseFolder) -> None:
    assert folder.find("9") is folder.find("fsdp") is folder.find("fsdp.py") is folder.find("FSDP") is find(9)
    with pytest.raises(UserError, match="there is no exercise 'fspd'; did you mean fsdp"):
        folder.find("fspd")


BROKEN = {
    "def ddp(:": r"ddp\.py:1 cannot be run: SyntaxError: [^()]*$",
    "import no_such_module": r"ddp\.py:1 cannot be run: ModuleNotFoundError",
    "from shardlab.language import Rank": r"ddp\.py has no function 'ddp'; its functions are: none",
    "async def ddp(rank):\n    while True:\n        pass\n": r"ddp\.py:[23]: .* CPU time; let the loop end\.$",
    "while True:\n    pass\n": r"ddp\.py:[12]: the end of ddp\.py has not come within .*; let the loop end\.$",
    "async def ddp(rank):\n    while True:\n        rank.load_batch([0])\n": r"ddp\.py:3: .* let its loops end",
    "async def ddp(rank):\n    raise KeyError('typo')\n": r"ddp\.py:2: .* the program raised KeyError: 'typo'",
    "def ddp(rank):\n    pass\n": "ddp is not a strategy: write it as `async def ddp",
}


@pytest.mark.parametrize(
    "text", sampled(BROKEN, lambda text: not text.startswith("while") and "load_batch" not in text)
)
def test_a_file_that_cannot_be_graded_is_refused_in_a_sentence(text: str, folder: CourseFolder) -> None:
    entry = find("ddp")
    folder.file(entry).write_text(text)
    with trace_limits(None, 0.2):
        result = grade_file(entry, folder.file(entry))
    assert result.stage == "refused"
    assert re.search(BROKEN[text], result.finding), result.finding
    assert "\n" not in result.finding


def test_a_missing_file_is_refused_in_a_sentence(folder: CourseFolder) -> None:
    entry = find("ddp")
    folder.file(entry).unlink()
    assert "does not exist; write it again: shardlab learn reset ddp" in grade_file(entry, folder.file(entry)).finding


def run(cells: list[dict[str, Any]], folder: Path) -> Any:
    """Run the code cells in order, and return the value of the last line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    result = None
    for number, cell in enumerate(cell for cell in cells if cell["cell_type"] == "code"):
        text, file = "".join(cell["source"]), str(folder / f"cell{number}.py")
        *body, last = ast.parse(text).body
        exec(compile(ast.Module(body, []), file, "exec"), names)
        if isinstance(last, ast.Expr):
            result = eval(compile(ast.Expression(last.value), file, "eval"), names)
        else:
            exec(compile(ast.Module([last], []), file, "exec"), names)
    return result


@pytest.mark.parametrize("entry", course(), ids=lambda entry: entry.name)
def test_a_notebook_grades_its_start(entry: CourseEntry, tmp_path: Path) -> None:
    cells = notebook(entry)["cells"]
    assert entry.statement in "".join(cells[0]["source"])
    result = run(cells, tmp_path)
    assert isinstance(result, ExerciseGrade)
    assert result.exercise is entry.exercise
    assert not result.passed


@pytest.mark.parametrize(("name", "goal"), [("ddp", "train a GPT"), ("choose_plan", "see what can be run")])
def test_the_last_cell_of_a_notebook_promises_what_the_command_does(name: str, goal: str) -> None:
    text = "".join(notebook(find(name))["cells"][-1]["source"])
    assert f"To {goal} with your solution, save the notebook and run this in a new cell:" in text


def test_a_notebook_with_the_solution_is_passed_and_drawn(tmp_path: Path) -> None:
    cells = notebook(find("ddp"))["cells"]
    cells[1]["source"] = [find("ddp").solution_text]
    result = run(cells, tmp_path)
    assert result.passed
    assert "<img" in result._repr_html_()


def test_notebooks_are_written_once(tmp_path: Path) -> None:
    folder = CourseFolder.create(tmp_path / "course")
    folder.write_notebooks()
    paths = sorted((tmp_path / "course" / "notebooks").glob("*.ipynb"))
    assert len(paths) >= len(course())
    read = json.loads(paths[0].read_text())
    assert (read["nbformat"], read["nbformat_minor"]) == (4, 5)
    paths[0].write_text("mine")
    folder.write_notebooks()
    assert paths[0].read_text() == "mine"

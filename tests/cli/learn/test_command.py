"""shardlab learn: what each subcommand prints, its exit status, and what it refuses."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.cli.learn import command
from shardlab.learn.course.catalogue import CourseEntry, all_entries, find
from shardlab.learn.course.folder import CourseFolder, notebook

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> Path:
    """A new course folder, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "init", "course"]) == 0
    said = capsys.readouterr().out
    assert "next: cd course, open one_rank.py in an editor, and run shardlab learn" in said
    monkeypatch.chdir(tmp_path / "course")
    return tmp_path / "course"


def solve(name: str) -> None:
    """Write the solution of an exercise into its file in the working directory."""
    Path(f"{name}.py").write_text(find(name).solution_text)


def test_without_a_terminal_the_current_exercise_is_graded_once(course: Path, capsys: Captured) -> None:
    assert main(["learn"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("\nExercise 0: One rank, in the least memory  one_rank.py\n")
    assert "FFFF" in said
    assert "peak memory     4,718,592   goal 2,621,440   missed" in said
    assert "Correct, but activations[2] stays in memory after its last use." in said
    assert said.count("Look at this next: ") == 1


def test_a_passed_exercise_shows_the_published_figures_and_what_comes_next(course: Path, capsys: Captured) -> None:
    solve("one_rank")
    assert main(["learn"]) == 0
    said = capsys.readouterr().out
    assert "Passed.\nTrain a GPT with it: shardlab learn run one_rank\nNext: grad_accum.py, exercise 1\n" in said
    text = " ".join(said.split())
    assert "published targets: 17 steps and 2,600,000 elements; the published solution has 16.5 and 2,621,440" in text


def test_hints_are_printed_one_more_at_each_call(course: Path, capsys: Captured) -> None:
    for count in (1, 2, 3, 3):
        assert main(["learn", "hint", "ddp"]) == 0
        assert capsys.readouterr().out.count("of 3") == count
    assert main(["learn", "hint", "ddp"]) == 0
    assert "These are all hints." in capsys.readouterr().out


def test_the_list_shows_the_progress(course: Path, capsys: Captured) -> None:
    solve("one_rank")
    assert main(["learn"]) == 0
    capsys.readouterr()
    assert main(["learn", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split()[:3] for line in lines]
    assert rows[1:4] == [["x", "0", "one_rank"], [">", "1", "grad_accum"], ["2", "ddp", "Data"]]
    assert lines[-1] == "x passed, > current"
    assert len(lines) == 1 + len(all_entries()) + 1
    assert max(map(len, lines)) <= 80
    assert main(["learn", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["current"] == "grad_accum"
    assert [row["name"] for row in listed["exercises"]] == [entry.name for entry in all_entries()]


def test_all_files_are_checked_and_the_status_says_whether_all_pass(course: Path, capsys: Captured) -> None:
    solve("ddp")
    Path("fsdp.py").write_text("async def fsdp(:")
    assert main(["learn", "check-all", "--json"]) == 1
    results = {row["name"]: row for row in json.loads(capsys.readouterr().out)["exercises"]}
    assert results["ddp"]["passed"]
    assert results["ddp"]["figures"]["sent"] == 786_432
    assert "fsdp.py:1 cannot be run: SyntaxError" in results["fsdp"]["finding"]
    assert results["one_rank"]["mistake"] == "the output stays after the loss"
    assert not results["one_rank"]["started"]


def test_the_table_of_all_files_does_not_tell_what_is_wrong_with_a_start(course: Path, capsys: Captured) -> None:
    Path("fsdp.py").write_text("async def fsdp(:")
    assert main(["learn", "check-all"]) == 1
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in capsys.readouterr().out.splitlines()[1:]}
    assert lines["one_rank"].split() == ["not", "started"]
    assert "not passed" in lines["fsdp"]
    assert "cannot be run" in lines["fsdp"]


def test_the_solution_is_shown_only_after_passing(course: Path, capsys: Captured) -> None:
    assert main(["learn", "solution", "ddp"]) == 2
    assert "ddp is not passed yet; solve it first" in capsys.readouterr().err
    solve("ddp")
    assert main(["learn", "watch", "ddp"]) == 0
    capsys.readouterr()
    assert main(["learn", "solution", "ddp"]) == 0
    assert capsys.readouterr().out == find("ddp").solution_text


def test_a_reset_says_where_the_old_file_is(course: Path, capsys: Captured) -> None:
    Path("ddp.py").write_text("mine")
    assert main(["learn", "reset", "ddp"]) == 0
    assert "ddp.py is as it was at the start; your file is now ddp.py.1" in capsys.readouterr().out
    assert Path("ddp.py.1").read_text() == "mine"
    assert main(["learn", "reset"]) == 0
    assert "one_rank.py, the current exercise, is as it was at the start\n" in capsys.readouterr().out


def test_a_reset_exercise_is_not_passed_any_more(course: Path, capsys: Captured) -> None:
    solve("one_rank")
    assert main(["learn"]) == 0
    capsys.readouterr()
    assert main(["learn", "reset", "one_rank"]) == 0
    said = capsys.readouterr().out
    state = "as it was at the start, not passed any more, and the current exercise"
    assert said == f"one_rank.py is {state}; your file is now one_rank.py.1\n"
    assert (CourseFolder.open(Path()).passed, CourseFolder.open(Path()).current) == ([], "one_rank")


def test_notebooks_are_written_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "init", "course", "--notebook"]) == 0
    file = tmp_path / "course" / "notebooks" / "ddp.ipynb"
    file.unlink()
    assert main(["learn", "init", "course", "--notebook"]) == 0
    assert file.is_file()


def test_a_notebook_that_does_not_exist_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    CourseFolder.create(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "watch", "notebooks/ddp.ipynb"]) == 2
    sentence = "notebooks/ddp.ipynb does not exist; write the notebooks with `shardlab learn init . --notebook`"
    assert sentence in capsys.readouterr().err


def test_a_solved_notebook_is_passed_and_a_damaged_one_is_named(
    course: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[Path] = []

    def train(entry: CourseEntry, file: Path, steps: int, *, json: bool) -> int:
        trained.append(file)
        return 0

    monkeypatch.setattr(command, "train_and_verify", train)
    entry = find("one_rank")
    file = Path("notebooks") / "one_rank.ipynb"
    file.parent.mkdir()
    cells = notebook(entry)
    file.write_text(json.dumps(cells))
    assert main(["learn", "run", str(file)]) == 2
    assert "notebooks/one_rank.ipynb is not passed: Correct, but activations[2] stays" in (
        refusal := capsys.readouterr().err
    )
    assert "A notebook is graded as it was saved last." in refusal
    for wrong, sentence in {
        "import nosuchmodule": "No module named 'nosuchmodule'",
        "def wrong(": "was never closed",
    }.items():
        cells["cells"][1]["source"] = [wrong]
        file.write_text(json.dumps(cells))
        assert main(["learn", "run", str(file)]) == 2
        assert sentence in capsys.readouterr().err
    cells["cells"][1]["source"] = entry.solution_text.splitlines(keepends=True)
    file.write_text(json.dumps(cells))
    assert main(["learn", "watch", str(file)]) == 0
    assert "Train a GPT with it: shardlab learn run notebooks/one_rank.ipynb" in (passed := capsys.readouterr().out)
    assert "Next: notebooks/grad_accum.ipynb, exercise 1" in passed
    assert main(["learn", "check-all", "--json"]) == 1
    assert main(["learn", "check-all"]) == 1
    assert "passed before" in capsys.readouterr().out
    assert "one_rank" in CourseFolder.open(Path()).passed
    assert main(["learn", "run", str(file)]) == 0
    assert trained == [Path("notebooks/code/one_rank.py")]
    file.write_text("{")
    assert main(["learn", "run", str(file)]) == 2
    assert "notebooks/one_rank.ipynb is not a notebook" in capsys.readouterr().err


def test_a_save_is_graded_and_the_next_exercise_follows(
    course: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a terminal, until Ctrl-C. A file that an editor replaces is missing for a moment."""
    saves: list[Callable[[], object]] = [
        lambda: Path("one_rank.py").write_text("async def one_rank(:"),
        lambda: Path("one_rank.py").unlink(),
        lambda: None,
        lambda: None,
        lambda: solve("one_rank"),
        lambda: solve("grad_accum"),
    ]

    def sleep(seconds: float) -> None:
        if not saves:
            raise KeyboardInterrupt
        saves.pop(0)()

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["learn"]) == 0
    said = capsys.readouterr().out
    order = [
        "activations[2]",
        "SyntaxError",
        "one_rank.py is gone",
        "Passed.",
        "the next save of grad_accum.py",
        "Passed.",
        "ddp.py",
    ]
    at = 0
    for words in order:
        at = said.index(words, at) + 1
    assert said.count("is gone") == 1


def test_a_cell_of_a_notebook_is_graded_once(
    course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    assert main(["learn"]) == 1
    assert "waiting for" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "goal"), [("one_rank", "Train a GPT"), ("choose_plan", "See what can be run")])
def test_a_command_that_a_notebook_shows_can_be_run_in_a_cell(
    name: str, goal: str, course: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JPY_PARENT_PID", "1")
    shell = f"!cd {course} && {sys.executable} -m shardlab"
    assert main(["learn", "watch", name]) == 1
    assert f"\nStuck? {shell} learn hint {name}\n" in capsys.readouterr().out
    solve(name)
    assert main(["learn", "watch", name]) == 0
    assert f"\n{goal} with it: {shell} learn run {name}\n" in capsys.readouterr().out


REFUSED: dict[tuple[str, ...], str] = {
    ("hint", "ddq"): "there is no exercise 'ddq'; did you mean ddp?",
    ("run", "ddp"): "ddp.py is not passed: Correct, but no rank all-reduces gradients",
    ("watch", "gallery/ddp.py"): "gallery/ddp.py is not a file of this course; give ddp.py, the file of ddp",
    ("watch", "tied_copies.py"): "give gallery/tied_copies.py, the file of tied_copies",
    ("watch", "../ddp.py"): "../ddp.py is not a file of this course; give ddp.py, the file of ddp",
    ("reset", "notebooks/ddp.ipynb"): "notebooks/ddp.ipynb is a notebook, and only files of Python are restored",
    ("run",): "no exercise is passed yet, so there is nothing to train with",
    ("init", "."): ". has a course in it; go on with `shardlab learn` there",
    ("init", "ddp.py"): "ddp.py is a file; name a new folder",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_wrong_request_gets_one_sentence(words: tuple[str, ...], course: Path, capsys: Captured) -> None:
    assert main(["learn", *words]) == 2
    said = capsys.readouterr().err
    assert REFUSED[words] in said
    assert said.count("\n") == 1


def test_outside_of_a_course_folder_the_way_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learn"]) == 2
    assert "make one: shardlab learn init course, then cd course" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["ddp", "2"])
def test_an_exercise_without_a_subcommand_leads_to_watch(course: Path, word: str, capsys: Captured) -> None:
    assert main(["learn", word]) == 2
    assert f"give one exercise: shardlab learn watch {word}" in capsys.readouterr().err

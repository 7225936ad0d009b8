"""Starter notebooks: their cells run in order, and the last one grades."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.learn.course import ExerciseGrade
from shardlab.learn.course.catalogue import CourseEntry, course, find
from shardlab.learn.course.folder import CourseFolder, notebook


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


def test_a_notebook_with_the_solution_is_passed_and_drawn(tmp_path: Path) -> None:
    cells = notebook(find("ddp"))["cells"]
    cells[1]["source"] = [find("ddp").solution_text]
    result = run(cells, tmp_path)
    assert result.passed
    assert result._repr_svg_().startswith("<?xml")


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

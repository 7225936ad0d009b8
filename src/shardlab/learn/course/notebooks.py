"""Starter notebooks: for each exercise its statement, the start, and a cell that grades it."""

from __future__ import annotations

import ast
import json
from typing import Any

from shardlab.common.files import write_atomically
from shardlab.learn.course.catalogue import CourseEntry, all_entries
from shardlab.learn.course.folder import CourseFolder

FOLDER = "notebooks"
"""Folder of the notebooks in a course folder."""


def write_notebooks(folder: CourseFolder) -> None:
    """Write a notebook for each exercise. Notebooks that are there already stay."""
    (folder.path / FOLDER).mkdir(exist_ok=True)
    for entry in all_entries():
        path = folder.path / FOLDER / f"{entry.name}.ipynb"
        if not path.exists():
            write_atomically(path, json.dumps(notebook(entry), indent=1) + "\n")


def notebook(entry: CourseEntry) -> dict[str, Any]:
    """Return the notebook of an exercise, in Jupyter's format 4.5."""
    call = f'from shardlab.learn.course import check\n\ncheck("{entry.name}", {entry.name})'
    cells = [
        _cell("statement", "markdown", f"```text\n{entry.statement}\n```"),
        _cell("start", "code", _without_docstring(entry.start_text)),
        _cell("check", "code", call),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def _cell(name: str, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _without_docstring(text: str) -> str:
    """Return a start without the statement, which is in a cell of its own."""
    statement = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[statement.end_lineno :]).strip()

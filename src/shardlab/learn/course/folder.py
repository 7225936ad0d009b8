"""Folder of a student: a file for each exercise, and the progress.

The *start* of an exercise is the content of its file before any work of the student. `CourseFolder.create` writes the
folder, `CourseFolder.open` reads it. A folder of another version of Shardlab is migrated when it is opened: exercises
that are new get their file, and a file that the student has not touched is replaced if its start has changed. Files
with a student's work are never overwritten, except by `reset`, which keeps a copy. `grade_file` grades a file, and
`notebook` creates the starter notebook of an exercise.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shardlab.common.calls import public
from shardlab.common.errors import Refused, UserError, why_unreadable
from shardlab.common.files import write_atomically
from shardlab.common.memory import memory_limit
from shardlab.common.user_code import file_and_name, find_member, load_module, run_stepwise
from shardlab.learn.course import catalogue
from shardlab.learn.course.catalogue import CourseEntry, all_entries
from shardlab.learn.course.exercise import Exercise
from shardlab.learn.course.grading import ExerciseGrade, grade, refused_grade

PROGRESS = "progress.json"
"""Name of the file with the progress."""

FORMAT = 1
"""Version of the progress file. A file with a larger number was written by a later version of Shardlab."""

NOTEBOOKS = "notebooks"
"""Name of the folder of the notebooks."""

NOTEBOOK = ".ipynb"

GRADES = "from shardlab.learn.course import check"
"""First line of the notebook cell that grades the solution."""

HINTS = 3
"""Number of hints of an exercise."""


@dataclass
class CourseFolder:
    """Folder of a student.

    Attributes:
        path: the folder.
        current: name of the current exercise.
        passed: names of the exercises that are passed.
        hints: number of hints shown, by the name of the exercise.
        starts: hash of the start that was written into each file, by the name of the exercise.
        format: version of the progress file. A number that a later version of Shardlab wrote is kept.
        others: fields of the progress file that this version does not know, and keeps.
        restored: files that were missing and were written again.
    """

    path: Path
    current: str
    passed: list[str] = field(default_factory=lambda: [])
    hints: dict[str, int] = field(default_factory=lambda: {})
    starts: dict[str, str] = field(default_factory=lambda: {})
    format: int = FORMAT
    others: dict[str, Any] = field(default_factory=lambda: {})
    restored: list[Path] = field(default_factory=lambda: [])

    @classmethod
    def create(cls, path: Path) -> CourseFolder:
        """Write the exercises into a folder. Existing files are kept.

        Raises:
            UserError: if the folder already has a course, or cannot be written.
        """
        if (path / PROGRESS).exists():
            raise UserError(f"{path} has a course in it; go on with `shardlab learn` there, or name another folder")
        folder = cls(path, all_entries()[0].name)
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file; name a new folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._write_starts()
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror or error}); name another folder") from error
        return folder

    @classmethod
    def open(cls, path: Path) -> CourseFolder:
        """Read a folder, and migrate it if another version of Shardlab has written it.

        Raises:
            UserError: if it is not a folder with a course, or its progress cannot be read.
        """
        file = path / PROGRESS
        if not file.is_file():
            subject = "this folder is" if path == Path() else f"{path} is"
            if (path.absolute().parent / PROGRESS).is_file():
                raise UserError(f"{subject} inside a course folder; go there: cd {path / '..'}")
            raise UserError(f"{subject} not a course folder; make one: shardlab learn init course, then cd course")
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {why_unreadable(error)}") from error
        except ValueError as error:
            remedy = f"delete it, then `shardlab learn init {path}` writes a new one and keeps your files"
            raise UserError(f"{file} is damaged ({error}); {remedy}") from None
        folder = cls._from_json(path, content)
        try:
            folder._write_starts()
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror or error})") from error
        return folder

    def file(self, entry: CourseEntry, name: str | None = None) -> Path:
        """Return the path of an exercise's file, or of its notebook if `name` is the notebook's (`*.ipynb`)."""
        if name is not None and name.endswith(NOTEBOOK):
            return self.path / name
        return (self.path / "gallery" if entry.in_gallery else self.path) / f"{entry.name}.py"

    def has_start(self, entry: CourseEntry) -> bool:
        """Return whether an exercise's file is unchanged since the start."""
        return self.file(entry).read_bytes() == entry.start_text.encode()

    def find(self, name: str | None) -> CourseEntry:
        """Return an exercise by its name, number, file or notebook (None: the current exercise).

        Raises:
            UserError: if there is none, or `name` is another file than that of the exercise. The message suggests the
                nearest name, or the file.
        """
        if name is None:
            return catalogue.find(self.current)
        entry = catalogue.find(Path(name).stem if name.endswith((".py", NOTEBOOK)) else name)
        if name.endswith(".py") and (self.path / name).resolve() != (file := self.file(entry)).resolve():
            raise UserError(f"{name} is not a file of this course; give {file}, the file of {entry.name}")
        return entry

    def next_hint(self, entry: CourseEntry) -> int:
        """Return the number of the next hint, and record that it was shown. The last hint is repeated."""
        number = min(self.hints.get(entry.name, 0) + 1, HINTS)
        self.hints[entry.name] = number
        self.save()
        return number

    def reset(self, entry: CourseEntry) -> Path | None:
        """Write the start of an exercise again. If it was passed, it is not any more, and becomes the current one.

        Returns:
            The copy of the student's file, in the same folder; None if there was nothing to copy.
        """
        file, copy = self.file(entry), None
        if file.exists() and file.read_text(encoding="utf-8", errors="replace") != entry.start_text:
            numbers = range(1, 1 + len(list(file.parent.glob(f"{entry.name}.py.*"))) + 1)
            copy = next(candidate for n in numbers if not (candidate := file.with_name(f"{file.name}.{n}")).exists())
            file.rename(copy)
        if entry.name in self.passed:
            self.passed.remove(entry.name)
            self.current = entry.name
        self._write_start(entry)
        self.save()
        return copy

    def program(self, entry: CourseEntry, name: str | None = None) -> Path:
        """Return the path of a student's program: the exercise's file, or a file with the code of the notebook.

        Raises:
            UserError: if the notebook cannot be read.
        """
        file = self.file(entry, name)
        if file.suffix != NOTEBOOK:
            return file
        if not file.is_file():
            remedy = "write the notebooks with `shardlab learn init . --notebook`"
            raise UserError(f"{file} does not exist; {remedy}")
        program = file.parent / "code" / f"{entry.name}.py"
        program.parent.mkdir(exist_ok=True)
        write_atomically(program, code_of_notebook(file))
        return program

    def grade(self, entry: CourseEntry, name: str | None = None) -> ExerciseGrade:
        """Grade the file of an exercise, or its notebook if `name` is one, and record whether it is passed.

        If the current exercise is passed, the next exercise that is not passed becomes the current one.
        """
        program = self.program(entry, name)
        with memory_limit():
            result = grade_file(entry, program)
        if result.passed:
            self.record_pass(entry)
        return result

    def record_pass(self, entry: CourseEntry) -> None:
        """Record that an exercise is passed. If it is the current one, choose the next current exercise."""
        if entry.name not in self.passed:
            self.passed.append(entry.name)
        if entry.name == self.current:
            remaining = [candidate for candidate in all_entries() if candidate.name not in self.passed]
            later = [candidate for candidate in remaining if candidate.exercise.number > entry.exercise.number]
            self.current = (later or remaining or [entry])[0].name
        self.save()

    def write_notebooks(self) -> None:
        """Write a starter notebook for each exercise. Existing notebooks are kept."""
        (self.path / NOTEBOOKS).mkdir(exist_ok=True)
        for entry in all_entries():
            path = self.path / NOTEBOOKS / f"{entry.name}.ipynb"
            if not path.exists():
                write_atomically(path, json.dumps(notebook(entry), indent=1) + "\n")

    def save(self) -> None:
        """Write the progress. If writing is interrupted, the old file is kept."""
        fields = {
            "format": max(FORMAT, self.format),
            "current": self.current,
            "passed": self.passed,
            "hints": self.hints,
            "starts": self.starts,
        }
        write_atomically(self.path / PROGRESS, json.dumps(self.others | fields, indent=2) + "\n")

    @classmethod
    def _from_json(cls, path: Path, content: object) -> CourseFolder:
        """Return the folder for a progress file's content. Invalid fields count as missing: students may edit it."""
        fields = cast(dict[str, Any], content) if isinstance(content, dict) else {}
        exercise_names = {entry.name for entry in all_entries()}

        def table(name: str, kind: type) -> dict[str, Any]:
            values = fields.get(name)
            items = cast(dict[str, Any], values).items() if isinstance(values, dict) else ()
            return {key: value for key, value in items if isinstance(value, kind)}

        values = fields.get("passed")
        names = [name for name in cast(list[Any], values) if isinstance(name, str)] if isinstance(values, list) else []
        current = fields.get("current")
        if current not in exercise_names:
            remaining = [entry.name for entry in all_entries() if entry.name not in names]
            current = (remaining or [all_entries()[0].name])[0]
        hints = {name: min(max(0, number), HINTS) for name, number in table("hints", int).items()}
        others = {name: value for name, value in fields.items() if name not in cls.__dataclass_fields__}
        version = fields.get("format")
        format = version if isinstance(version, int) else FORMAT
        return cls(path, cast(str, current), names, hints, table("starts", str), format, others)

    def _write_starts(self) -> None:
        """Write the start of each exercise without a file, and of each whose file is an older, unedited start."""
        changed = not (self.path / PROGRESS).exists()
        for entry in all_entries():
            file, start_hash = self.file(entry), self.starts.get(entry.name)
            if file.exists():
                text = file.read_bytes()
                if _hash(text) != start_hash or _hash(entry.start_text.encode()) == start_hash:
                    continue
            elif start_hash:
                self.restored.append(file)
            self._write_start(entry)
            changed = True
        if changed:
            self.save()

    def _write_start(self, entry: CourseEntry) -> None:
        file = self.file(entry)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, entry.start_text)
        self.starts[entry.name] = _hash(entry.start_text.encode())


@public
def check(exercise: int | str, solution: Any) -> ExerciseGrade:
    """Grade a solution of an exercise, given by its number or name, and record in the course folder if it passes.

    The course folder is the working directory, or its parent for a notebook. Elsewhere nothing is recorded. A notebook
    shows the result as text with a picture.

    Raises:
        UserError: for an exercise that does not exist, and for wrong arguments.
    """
    entry = catalogue.find(exercise)
    result = grade(entry.exercise, solution)
    folder = next((path for path in (Path(), Path("..")) if (path / PROGRESS).is_file()), None)
    if result.passed and folder is not None:
        CourseFolder.open(folder).record_pass(entry)
    return result


def exercise_of(strategy: str | None) -> Exercise | None:
    """Return the exercise whose file a strategy names (`ddp.py:ddp`), if the file is in a course folder, else None."""
    path = file_and_name(strategy or "")[0]
    if path is None or not any((folder / PROGRESS).is_file() for folder in path.absolute().parents[:2]):
        return None
    return next((entry.exercise for entry in all_entries() if entry.name == path.stem), None)


def grade_file(entry: CourseEntry, path: Path) -> ExerciseGrade:
    """Grade a student's file. A file that is missing, fails or does not end is refused like a wrong program."""
    try:
        if not path.is_file():
            raise UserError(f"{path} does not exist; write it again: shardlab learn reset {entry.name}")
        module = run_stepwise(lambda: load_module(path), lambda: 0, lambda: f"the end of {path.name}")
        _, solution = find_member(module, path, entry.name, ("function", "functions"), inspect.isfunction)
    except (Refused, UserError) as error:
        return refused_grade(entry.exercise, error)
    return grade(entry.exercise, solution)


def notebook(entry: CourseEntry) -> dict[str, Any]:
    """Return the notebook of an exercise, in Jupyter's format 4.5."""
    call = f'{GRADES}\n\ncheck("{entry.name}", {entry.name})'
    command = f"shardlab learn run {NOTEBOOKS}/{entry.name}{NOTEBOOK}"
    shell = "!cd .. && {sys.executable} -m"
    goal = "train a GPT" if entry.exercise.trains else "see what can be run"
    train = (
        f"Stuck? Run `{shell} shardlab learn hint {entry.name}` in a new cell, after `import sys`. There are three "
        "hints, and each call shows one more.\n\n"
        f"To {goal} with your solution, save the notebook and run this in a new cell:\n\n"
        f"```python\nimport sys\n{shell} {command}\n```"
    )
    cells = [
        _cell("statement", "markdown", f"```text\n{entry.statement}\n```"),
        _cell("start", "code", _without_docstring(entry.start_text)),
        _cell("check", "code", call),
        _cell("train", "markdown", train),
    ]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def code_of_notebook(path: Path) -> str:
    """Return the code of a notebook, without the cells that grade it and the lines that are not Python (`!`, `%`).

    Raises:
        UserError: if the file is not a notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from error
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not a notebook; save it in Jupyter's format 4") from None
    lines = "\n\n".join(text for text in texts if GRADES not in text).splitlines()
    return "".join(f"{line}\n" for line in lines if not line.startswith(("!", "%")))


def _cell(name: str, kind: str, text: str) -> dict[str, Any]:
    cell: dict[str, Any] = {"cell_type": kind, "id": name, "metadata": {}, "source": text.splitlines(keepends=True)}
    return cell | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def _without_docstring(text: str) -> str:
    """Return a start without the statement, which is in a separate cell."""
    statement = ast.parse(text).body[0]
    return "".join(text.splitlines(keepends=True)[statement.end_lineno :]).strip()


def _hash(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()

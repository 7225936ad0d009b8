"""`shardlab learn`: write the exercises, watch the current one, and check, explain and train solutions.

Each subcommand is a dataclass. `Watch`, which is the default, grades the current exercise's file at each save. All
subcommands but `Init` expect the course folder as the working directory.
"""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text
from tyro.conf import subcommand

from shardlab.cli.console import print_line, stdout_console
from shardlab.cli.learn.show import list_report, print_grade, results_report, shell_command
from shardlab.cli.learn.train import STEPS, require_steps, train_and_verify
from shardlab.cli.options import Count, Flag
from shardlab.common.errors import UserError
from shardlab.common.text import counted
from shardlab.common.user_code import in_notebook_cell
from shardlab.learn.course.catalogue import CourseEntry, all_entries, course, gallery
from shardlab.learn.course.folder import HINTS, NOTEBOOK, NOTEBOOKS, PROGRESS, CourseFolder

ExerciseName = Annotated[
    str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="(default: the current one)")
]
"""Name, number or file of an exercise; None for the current one."""

PassedName = Annotated[
    str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", help_behavior_hint="(default: the last one)")
]
"""Name, number or file of a passed exercise; None for the one that was passed last."""

POLL_SECONDS = 0.3
"""Interval in seconds at which the watched file is checked for changes."""

POLLS_UNTIL_MISSING = 2
"""Number of checks without the watched file after which it is reported. An editor may replace it, in a moment."""


@dataclass(frozen=True)
class Init:
    """Write the exercises into a folder."""

    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
    """New folder."""

    notebook: Flag = False
    """Write a notebook for each exercise as well, also into a course that exists."""

    def run(self) -> int:
        console = stdout_console()
        if self.notebook and (self.folder / PROGRESS).is_file():
            CourseFolder.open(self.folder).write_notebooks()
            print_line(console, Text(f"{self.folder}: the course now has notebooks in notebooks/"))
            return 0
        folder = CourseFolder.create(self.folder)
        contents = f"{counted(len(course()), 'exercise')} and {counted(len(gallery()), 'bug')} to find"
        if self.notebook:
            folder.write_notebooks()
            contents += ", with notebooks in notebooks/"
        first = folder.find(None)
        print_line(console, Text(f"{self.folder}: {contents}"))
        if self.notebook:
            print_line(console, Text(f"next: jupyter lab {self.folder}, and open {NOTEBOOKS}/{first.name}{NOTEBOOK}"))
        else:
            advice = f"open {first.name}.py in an editor, and run shardlab learn"
            print_line(console, Text(f"next: cd {self.folder}, {advice}"))
        return 0


@dataclass(frozen=True)
class Watch:
    """Grade the file of an exercise now and at each save: check it, draw it, and compare it with the goals.

    If standard output is not a terminal, or in a cell of a notebook, the file is graded once.
    """

    exercise: ExerciseName = None
    """Exercise to watch."""

    def run(self) -> int:
        folder = _open_folder()
        entry = folder.find(self.exercise)
        console = stdout_console()
        if not sys.stdout.isatty() or in_notebook_cell():
            return 0 if _grade(console, folder, entry, self.exercise) else 1
        try:
            while True:
                stamp = _stamp(folder.file(entry, self.exercise))
                console.clear()
                is_passed = _grade(console, folder, entry, self.exercise)
                if is_passed and self.exercise is None and folder.current != entry.name:
                    entry = folder.find(None)
                    stamp = _stamp(folder.file(entry))
                file = folder.file(entry, self.exercise)
                console.print()
                console.print(Text(f"waiting for the next save of {file} (Ctrl-C ends)", "dim"))
                missing = 0
                while (new_stamp := _stamp(file)) in (stamp, None):
                    missing = missing + 1 if new_stamp is None else 0
                    if missing == POLLS_UNTIL_MISSING:
                        words = "init . --notebook" if file.suffix == NOTEBOOK else f"reset {entry.name}"
                        console.print(Text(f"{file} is gone; for its start again: shardlab learn {words}"))
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            return 0


@dataclass(frozen=True)
class Hint:
    """Print a hint for an exercise. There are three, and each call prints one more."""

    exercise: ExerciseName = None
    """Exercise that the hint is for."""

    def run(self) -> int:
        folder = _open_folder()
        entry = folder.find(self.exercise)
        console = stdout_console()
        hint_count = folder.hints.get(entry.name, 0)
        for index in range(folder.next_hint(entry)):
            label = (f"hint {index + 1} of {HINTS}  ", "dim")
            console.print(Text.assemble(label, entry.exercise.hints[index]))
        if hint_count == HINTS:
            console.print(Text("These are all hints.", "dim"))
        return 0


@dataclass(frozen=True)
class Reset:
    """Restore the initial file of an exercise, which then counts as not passed. Your file is kept beside it."""

    exercise: ExerciseName = None
    """Exercise whose file is restored."""

    def run(self) -> int:
        if (name := self.exercise or "").endswith(NOTEBOOK):
            remedy = "rename it, then `shardlab learn init . --notebook` writes a new one"
            raise UserError(f"{name} is a notebook, and only files of Python are restored; {remedy}")
        folder = _open_folder()
        entry = folder.find(self.exercise)
        was_passed, copy = entry.name in folder.passed, folder.reset(entry)
        file = f"{folder.file(entry)}{'' if name else ', the current exercise,'}"
        text = f"{file} is as it was at the start{', not passed any more, and the current exercise' * was_passed}"
        copy_note = f"; your file is now {copy}" if copy else ""
        print_line(stdout_console(), Text(f"{text}{copy_note}"))
        return 0


@dataclass(frozen=True)
class ListExercises:
    """List the exercises with your progress."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        folder = _open_folder()
        list_report(folder, all_entries()).show(json=self.json)
        return 0


@dataclass(frozen=True)
class CheckAll:
    """Grade the files of all exercises. The exit status is 1 if one is not passed."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        folder = _open_folder()
        grades = [folder.grade(entry) for entry in all_entries()]
        not_started = {entry.name for entry in all_entries() if folder.has_start(entry)}
        results_report(grades, not_started, folder.passed).show(json=self.json)
        return 0 if all(grade.passed for grade in grades) else 1


@dataclass(frozen=True)
class Solution:
    """Print the reference solution of an exercise that is passed."""

    exercise: ExerciseName = None
    """Exercise whose solution is printed."""

    def run(self) -> int:
        folder = _open_folder()
        entry = folder.find(self.exercise)
        _require_passed(folder, entry)
        print(entry.solution_text, end="")
        return 0


@dataclass(frozen=True)
class TrainWithSolution:
    """Train a small GPT on processes with your program, and verify it against one device.

    The exercise must be passed. Predicted and measured time and memory are shown side by side.
    """

    exercise: PassedName = None
    """Passed exercise whose program is used."""

    steps: Count = STEPS
    """Number of training steps."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        folder = _open_folder()
        if self.exercise is None and not folder.passed:
            raise UserError("no exercise is passed yet, so there is nothing to train with; solve one first")
        entry = folder.find(folder.passed[-1] if self.exercise is None else self.exercise)
        require_steps(self.steps)
        grade = folder.grade(entry, self.exercise)
        if not grade.passed:
            file, finding = folder.file(entry, self.exercise), grade.finding_text.rstrip(".")
            notebook_note = " A notebook is graded as it was saved last." if file.suffix == NOTEBOOK else ""
            hint = shell_command(f"learn hint {entry.name}")
            raise UserError(f"{file} is not passed: {finding}. For a hint: {hint}.{notebook_note}")
        return train_and_verify(entry, folder.program(entry, self.exercise), self.steps, json=self.json)


@dataclass(frozen=True)
class Learn:
    """Learn parallel training by exercises that are checked, drawn, timed and run.

    Without a subcommand, watch the current exercise.
    """

    what: Annotated[
        Annotated[Watch, subcommand("watch", prefix_name=False)]
        | Annotated[Init, subcommand("init", prefix_name=False)]
        | Annotated[Hint, subcommand("hint", prefix_name=False)]
        | Annotated[Reset, subcommand("reset", prefix_name=False)]
        | Annotated[ListExercises, subcommand("list", prefix_name=False)]
        | Annotated[CheckAll, subcommand("check-all", prefix_name=False)]
        | Annotated[Solution, subcommand("solution", prefix_name=False)]
        | Annotated[TrainWithSolution, subcommand("run", prefix_name=False)],
        tyro.conf.arg(name=""),
    ] = field(default_factory=Watch)

    @property
    def json(self) -> bool:
        """Whether the subcommand prints JSON, including the JSON of an error."""
        return bool(getattr(self.what, "json", False))

    @property
    def elsewhere(self) -> dict[str, str]:
        """Error messages by wrong subcommand: the name or the number of an exercise."""
        words = [word for entry in all_entries() for word in (entry.name, str(entry.exercise.number))]
        return {word: f"give one exercise: shardlab learn watch {word}" for word in words}

    def run(self) -> int:
        return self.what.run()


def _open_folder() -> CourseFolder:
    """Read the course in the working directory. Missing files are restored, and named on stderr."""
    folder = CourseFolder.open(Path())
    for file in folder.restored:
        print(f"{file} was missing; its start is written again", file=sys.stderr)
    return folder


def _grade(console: Console, folder: CourseFolder, entry: CourseEntry, name: str | None) -> bool:
    """Grade the file or notebook of an exercise, and print the result. If it is passed, name the next exercise."""
    with console.status(f"checking {folder.file(entry, name)}") if console.is_terminal else nullcontext():
        grade = folder.grade(entry, name)
    print_grade(console, grade, str(folder.file(entry, name)))
    if not grade.passed:
        console.print(Text(f"Stuck? {shell_command(f'learn hint {entry.name}')}", "dim"), soft_wrap=True)
        return False
    next_entry = folder.find(None)
    source = name if name and name.endswith(NOTEBOOK) else entry.name
    goal = "Train a GPT" if entry.exercise.trains else "See what can be run"
    console.print(Text(f"{goal} with it: {shell_command(f'learn run {source}')}"), soft_wrap=True)
    if next_entry.name in folder.passed:
        console.print("All exercises are passed.")
    else:
        file = folder.file(next_entry, f"{NOTEBOOKS}/{next_entry.name}{NOTEBOOK}" if source != entry.name else None)
        print_line(console, Text(f"Next: {file}, exercise {next_entry.exercise.number}"))
    return True


def _require_passed(folder: CourseFolder, entry: CourseEntry) -> None:
    if entry.name not in folder.passed:
        raise UserError(f"{entry.name} is not passed yet; solve it first, and `shardlab learn hint {entry.name}` helps")


def _stamp(file: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever a file is saved (None: there is no file)."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size

"""Output of `shardlab learn`: the grade of a solution with its picture and goals, and the list of exercises."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardlab.cli.console import Report, print_line
from shardlab.cli.simulate.terminal_timeline import print_timeline
from shardlab.common.text import counted
from shardlab.common.user_code import in_notebook_cell
from shardlab.learn.course.catalogue import CourseEntry
from shardlab.learn.course.folder import CourseFolder
from shardlab.learn.course.grading import ExerciseGrade


def shell_command(words: str) -> str:
    """Return a command of Shardlab, for a shell in this folder, or for a notebook if it has started this process."""
    if not in_notebook_cell():
        return f"shardlab {words}"
    return f"!cd {shlex.quote(str(Path.cwd()))} && {shlex.quote(sys.executable)} -m shardlab {words}"


def print_grade(console: Console, grade: ExerciseGrade, place: str) -> None:
    """Print a grade: title, picture, figures with their goals, verdict, and one suggestion.

    Args:
        place: the student's file.
    """
    console.print()
    print_line(console, Text.assemble((grade.title, "bold cyan"), (f"  {place}", "dim")))
    if grade.timeline is not None:
        memory = [f"{peak:,}" for peak in grade.timeline.peak_memory_by_rank]
        console.print()
        print_timeline(console, grade.timeline, [("peak memory", memory)])
    if rows := grade.rows():
        console.print()
        width = max(len(text) for row in rows for text in (row.value, row.goal))
        for name, value, goal, is_missed in rows:
            parts = [(f"{name:<16}", "dim"), f"{value:>{width}}", ("   goal ", "dim"), goal or "none"]
            console.print(Text.assemble(*parts, ("   missed" if is_missed else "", "yellow")))
    if grade.published is not None and grade.passed:
        console.print(Text(published_text(grade), "dim"))
    console.print()
    console.print(Text(grade.finding_text, "green" if grade.passed else "yellow"))
    if grade.advice:
        console.print(Text.assemble(("Look at this next: ", "bold"), grade.advice))


def published_text(grade: ExerciseGrade) -> str:
    """Return a solution's time and memory in the costs of the puzzles, and the published targets.

    If the published solution misses a target, its time and memory are added.
    """
    assert grade.published is not None
    puzzle, steps, memory = grade.published
    text = (
        f"LLM Training Puzzles, puzzle {puzzle.number}, in its costs: {steps:g} steps, {memory:,} elements; published "
        f"targets: {puzzle.target_steps:g} steps and {puzzle.target_memory:,} elements"
    )
    if puzzle.target_steps < puzzle.known_steps or puzzle.target_memory < puzzle.known_memory:
        text += f"; the published solution has {puzzle.known_steps:g} and {puzzle.known_memory:,}"
    return text


def grade_fields(grade: ExerciseGrade) -> dict[str, Any]:
    """Return a grade for --json."""
    goals = grade.exercise.goals
    return {
        "number": grade.exercise.number,
        "name": grade.exercise.name,
        "passed": grade.passed,
        "stage": grade.stage,
        "finding": grade.finding,
        "mistake": grade.mistake.name if grade.mistake else None,
        "advice": grade.advice,
        "figures": grade.figures._asdict() if grade.figures else None,
        "goals": {"time": goals.time, "memory": goals.memory, "sent": goals.sent, "source": goals.source},
    }


def list_report(folder: CourseFolder, entries: Iterable[CourseEntry]) -> Report:
    """Return the list of exercises with their progress."""
    rows = [
        {
            "number": entry.exercise.number,
            "name": entry.name,
            "title": entry.exercise.title,
            "file": str(folder.file(entry)),
            "passed": entry.name in folder.passed,
            "current": entry.name == folder.current,
            "hints": folder.hints.get(entry.name, 0),
            "seen_in": entry.exercise.seen_in or None,
        }
        for entry in entries
    ]
    report = Report(current=folder.current)
    report.table(
        {
            "": lambda row: "x" if row["passed"] else ">" if row["current"] else "",
            "no.": lambda row: str(row["number"]),
            "exercise": lambda row: row["name"],
            "title": lambda row: Text(row["title"]),
        },
        rows,
        "exercises",
        words=4,
        folded=3,
    )
    report.line("x passed, > current", "dim")
    return report


def results_report(
    grades: Sequence[ExerciseGrade], not_started: Set[str] = frozenset(), earlier_passes: Sequence[str] = ()
) -> Report:
    """Return the results of all files. The console shows no findings for exercises that are not started.

    Args:
        grades: grades of the files.
        not_started: names of the exercises whose file is unchanged.
        earlier_passes: names of the exercises that were passed before: with another file, or in a notebook.
    """
    report = Report()
    rows = [{**grade_fields(grade), "started": grade.exercise.name not in not_started} for grade in grades]

    def result(row: dict[str, Any]) -> str:
        if row["passed"] or row["started"]:
            return "passed" if row["passed"] else "not passed"
        return "passed before" if row["name"] in earlier_passes else "not started"

    report.table(
        {
            "exercise": lambda row: row["name"],
            "result": result,
            "finding": lambda row: Text(row["finding"] if row["started"] else ""),
        },
        rows,
        "exercises",
        words=3,
        folded=2,
    )
    passed_count = sum(grade.passed for grade in grades)
    report.fact("passed", f"{passed_count} of {counted(len(grades), 'exercise')}", passed=passed_count)
    return report

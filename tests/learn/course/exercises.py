"""Grading of texts of exercises, as files of a student."""

from __future__ import annotations

from pathlib import Path

from shardlab.common.user_code import load_module
from shardlab.learn.course.catalogue import CourseEntry
from shardlab.learn.course.grading import ExerciseGrade, grade


def grade_text(entry: CourseEntry, text: str, folder: Path) -> ExerciseGrade:
    """Return the grade of a student's file with this text."""
    path = folder / f"{entry.name}.py"
    path.write_text(text, encoding="utf-8")
    return grade(entry.exercise, getattr(load_module(path), entry.name))

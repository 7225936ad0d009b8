"""Catalogue of the course: all exercises and all bugs of the gallery, collected from the modules that define them."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import ModuleType
from typing import Any

from shardlab.common.errors import UserError, closest_name
from shardlab.learn.course.exercise import Exercise, file_text

PACKAGES = ("shardlab.learn.course.exercises", "shardlab.learn.course.gallery")
"""Packages whose modules with an `EXERCISE`, at any depth, are exercises."""

FIRST_OF_GALLERY = 101
"""Smallest number of a bug of the gallery."""


@dataclass(frozen=True)
class CourseEntry:
    """Exercise with the texts that are generated from its module.

    Attributes:
        exercise: the exercise.
        module: the module that defines it.
        text: source text of the module.
    """

    exercise: Exercise
    module: ModuleType = field(repr=False)
    text: str = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the exercise."""
        return self.exercise.name

    @property
    def in_gallery(self) -> bool:
        """Whether it is a bug of the gallery rather than a step of the course."""
        return self.exercise.number >= FIRST_OF_GALLERY

    @property
    def solution(self) -> Any:
        """The reference solution: a function, or a `Schedule`."""
        return getattr(self.module, self.name)

    @cached_property
    def statement(self) -> str:
        """The task with its figure, as the student reads it."""
        return ast.get_docstring(ast.parse(self.text)) or ""

    @cached_property
    def start_text(self) -> str:
        """Content of the file with which a student starts."""
        return file_text(self.text, solved=False)

    @cached_property
    def solution_text(self) -> str:
        """The reference solution as a student's file."""
        return file_text(self.text, solved=True)


def course() -> tuple[CourseEntry, ...]:
    """Return the exercises of the course in their order, without the gallery."""
    return tuple(entry for entry in all_entries() if not entry.in_gallery)


def gallery() -> tuple[CourseEntry, ...]:
    """Return the bugs of the gallery in their order."""
    return tuple(entry for entry in all_entries() if entry.in_gallery)


def find(name: int | str) -> CourseEntry:
    """Return an exercise or a bug of the gallery by its name or number.

    Raises:
        UserError: if there is none. The message suggests the nearest name.
    """
    entries = all_entries()
    key = str(name).strip().lower().replace("-", "_")
    for entry in entries:
        if key in (entry.name.lower(), str(entry.exercise.number)):
            return entry
    near = closest_name(key, [entry.name for entry in entries])
    hint = f"did you mean {near}?" if near else "`shardlab learn list` lists them"
    raise UserError(f"there is no exercise {name!r}; {hint}")


@cache
def all_entries() -> tuple[CourseEntry, ...]:
    """Return the exercises of the course, then the bugs of the gallery."""
    entries = [entry for package in PACKAGES for entry in _entries_of(package)]
    return tuple(sorted(entries, key=lambda entry: entry.exercise.number))


def _entries_of(package: str) -> Iterator[CourseEntry]:
    """Yield the exercises of a package and its subpackages."""
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        module = importlib.import_module(info.name)
        exercise = getattr(module, "EXERCISE", None)
        if isinstance(exercise, Exercise):
            yield CourseEntry(exercise, module, inspect.getsource(module))

"""The catalogue, and the page of docs/ that lists it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardlab.language import UserError
from shardlab.learn.course.catalogue import all_entries, course, find, gallery

PAGE = Path(__file__).parents[3] / "docs" / "course.md"


def test_exercises_are_numbered_without_a_gap_and_bugs_from_101() -> None:
    assert [entry.exercise.number for entry in course()] == list(range(len(course())))
    assert [entry.exercise.number for entry in gallery()] == list(range(101, 101 + len(gallery())))
    assert all_entries() == (*course(), *gallery())


def test_exercises_are_found_by_number_and_name() -> None:
    assert find(2) is find("2") is find("ddp") is find("DDP")
    assert find("ddp-overlap") is find("ddp_overlap")


def test_an_unknown_exercise_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="there is no exercise 'ring_allreduce'; did you mean ring_all_reduce"):
        find("ring_allreduce")
    with pytest.raises(UserError, match="there is no exercise 99; `shardlab learn list` lists them"):
        find(99)


def test_the_page_lists_every_exercise() -> None:
    forms = {"rank": "a program on {0}", "schedule": "a schedule on {0}", "plan": "a plan for {0.world} ranks"}
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)` \| (.*?)(?: ★)? \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    exercises = [entry.exercise for entry in course()]
    assert rows == [
        (str(exercise.number), exercise.name, exercise.title, forms[exercise.kind].format(exercise.mesh))
        for exercise in exercises
    ]

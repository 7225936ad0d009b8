"""The gallery: twenty published bugs, each of which is refused, and docs/gallery.md, which shows them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from shardlab.learn.course.catalogue import CourseEntry, gallery
from shardlab.learn.course.grading import grade
from tests.learn.course.exercises import grade_text

ROOT = Path(__file__).parents[3]
PROJECTS = {"NVIDIA/Megatron-LM", "deepspeedai/DeepSpeed", "pytorch/pytorch", "pytorch/torchtitan"}


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    """The script beside the page."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_gallery_has_twenty_bugs_of_four_projects_each_from_its_own_thread() -> None:
    exercises = [entry.exercise for entry in gallery()]
    assert [exercise.number for exercise in exercises] == list(range(101, 121))
    places = [exercise.seen_in for exercise in exercises]
    assert len(set(places)) == len(places)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+#\d+", place) for place in places)
    assert {place.partition("#")[0] for place in places} == PROJECTS


@pytest.mark.parametrize("entry", gallery(), ids=lambda entry: entry.name)
def test_the_start_has_the_bug_and_shows_no_place_to_fill_in(entry: CourseEntry, tmp_path: Path) -> None:
    (bug,) = entry.exercise.mistakes
    assert grade_text(entry, entry.start_text, tmp_path).mistake is bug
    assert "Your code here" not in entry.start_text
    assert entry.solution_text.replace(*bug.edit) == entry.start_text


@pytest.mark.parametrize("entry", gallery(), ids=lambda entry: entry.name)
def test_a_repaired_program_runs_on_every_backend(entry: CourseEntry) -> None:
    result = grade(entry.exercise, entry.solution)
    assert result.checked is not None
    assert result.checked.backends() == ["gloo", "nccl"]


def test_the_page_is_what_the_modules_say_today(writer: ModuleType) -> None:
    assert writer.PAGE.read_text(encoding="utf-8") == writer.page(), "python docs/gallery.py writes the page again"


def test_every_folder_of_the_gallery_has_a_title(writer: ModuleType) -> None:
    assert {writer.folder_of(entry) for entry in gallery()} == set(writer.FOLDERS)

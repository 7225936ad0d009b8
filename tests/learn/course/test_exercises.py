"""Every exercise of the course and every bug of the gallery: its texts, its solution, and its mistakes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardlab.learn.course.catalogue import CourseEntry, course, find, gallery
from shardlab.learn.course.exercise import Mistake
from shardlab.learn.course.grading import grade
from shardlab.learn.puzzles.grader import find as find_puzzle
from tests.learn.course.exercises import grade_text
from tests.support.thorough import sampled

MOST_LINES, MOST_COLUMNS = 40, 88
"""Size of a statement that fits a screen, with its figure."""

FEWEST_MISTAKES = 4

USE_IT_TOO = {("one_rank", "zero2"), ("one_rank", "hsdp_once"), ("zero1", "zero2"), ("fsdp", "hsdp_once")}
"""Exercises, each with another one whose solution uses its technique on its mesh: on one rank nothing is sharded,
ZeRO-2 shards what ZeRO-1 shards, and HSDP with one replica is FSDP."""

ENTRIES = (*course(), *gallery())
MISTAKES = [(entry, mistake) for entry in ENTRIES for mistake in entry.exercise.mistakes]

LONG_MISTAKES = ("nothing says when the buckets are awaited", "the buckets are awaited too late")
"""Mistakes of plans for 64 ranks that are found by the same figures as two others of the exercise."""

NAMES = [entry.name for entry in course()]
each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)


def test_numbers_and_names_are_unique() -> None:
    assert len({entry.exercise.number for entry in ENTRIES}) == len(ENTRIES)
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert all(entry.module.__name__.rpartition(".")[2] == entry.name for entry in ENTRIES)


@each_entry
def test_the_statement_fits_a_screen(entry: CourseEntry) -> None:
    lines = entry.statement.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= MOST_COLUMNS
    if not entry.in_gallery:
        assert lines[0].startswith(f"Exercise {entry.exercise.number}: ")


@each_entry
def test_the_start_is_a_program_that_is_not_passed(entry: CourseEntry, tmp_path: Path) -> None:
    ast.parse(entry.start_text)
    assert entry.start_text != entry.solution_text
    assert not grade_text(entry, entry.start_text, tmp_path).passed


@each_entry
def test_the_solution_passes_with_every_goal_reached(entry: CourseEntry, tmp_path: Path) -> None:
    result = grade_text(entry, entry.solution_text, tmp_path)
    assert result.passed, result.verdict
    goals = entry.exercise.goals
    assert entry.in_gallery or (goals.time, goals.memory, goals.sent) != (None, None, None)
    assert goals.source
    if goals.source == "the reference solution" and not entry.exercise.cluster:
        reached = result.figures
        assert reached is not None
        for goal, figure in zip((goals.time, goals.memory, goals.sent), reached, strict=True):
            assert goal is None or goal == pytest.approx(figure), f"the goals are stale, the solution has {reached}"


@each_entry
def test_there_are_enough_mistakes_and_three_hints(entry: CourseEntry) -> None:
    exercise = entry.exercise
    assert len(exercise.mistakes) >= (1 if entry.in_gallery else FEWEST_MISTAKES)
    for texts in ([mistake.name for mistake in exercise.mistakes], [mistake.advice for mistake in exercise.mistakes]):
        assert len(set(texts)) == len(texts)
    assert len(set(exercise.hints)) == 3
    assert all(exercise.hints)


@pytest.mark.parametrize(
    ("entry", "mistake"),
    sampled(MISTAKES, lambda case: case[1].name not in LONG_MISTAKES),
    ids=[f"{entry.name}-{each.name}" for entry, each in MISTAKES],
)
def test_a_mistake_gets_its_own_advice(entry: CourseEntry, mistake: Mistake, tmp_path: Path) -> None:
    solution_text, mistake_text = mistake.edit
    assert entry.solution_text.count(solution_text) == 1, "the edit has one place"
    result = grade_text(entry, entry.solution_text.replace(solution_text, mistake_text), tmp_path)
    assert not result.passed
    assert result.mistake is mistake, f"{result.finding!r} shows {result.mistake and result.mistake.name}"
    assert mistake.advice in result.verdict


@pytest.mark.parametrize("entry", sampled(course(), lambda entry: entry.name != "buckets"), ids=NAMES)
def test_the_solution_of_another_exercise_does_not_pass_without_the_technique(entry: CourseEntry) -> None:
    exercise = entry.exercise
    for other in course():
        other_exercise = other.exercise
        uses_technique = other is entry or (entry.name, other.name) in USE_IT_TOO
        if (
            not uses_technique
            and other_exercise.kind == exercise.kind
            and set(exercise.techniques) - set(other_exercise.techniques)
        ):
            assert not grade(exercise, other.solution).passed, f"the solution of {other.name} passes"


@each_entry
def test_an_exercise_that_is_a_puzzle_has_its_sizes(entry: CourseEntry) -> None:
    exercise = entry.exercise
    if exercise.puzzle:
        puzzle = find_puzzle(exercise.puzzle)
        sizes = exercise.mesh.world, exercise.layers, exercise.microbatches
        assert sizes == (puzzle.ranks, puzzle.layers, puzzle.batches)


def test_the_last_exercise_asks_for_85_percent_of_its_rule_of_thumb() -> None:
    entry = find("choose_plan")
    rule = grade(entry.exercise, entry.module.rule_of_thumb).figures
    assert rule is not None
    assert entry.exercise.goals.time == pytest.approx(0.85 * rule.time, rel=0.01)
    for figure in (f"{rule.time:.1f} s", f"{rule.memory / 2**30:.1f} GiB", f"{entry.exercise.goals.time} s"):
        assert figure in entry.statement

"""Grading a solution."""

import asyncio
import io
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from rich.console import Console

from shardlab.program import UserError
from shardlab.puzzles import PUZZLES, Grade, Model, Puzzle, find, grade
from tests.puzzles import solutions


@pytest.mark.parametrize("puzzle", PUZZLES, ids=lambda puzzle: puzzle.name)
def test_every_puzzle_is_solved_by_its_solution(puzzle: Puzzle) -> None:
    result = grade(puzzle.name, getattr(solutions, puzzle.name))
    assert result.solved, str(result)
    assert (result.steps, result.peak_memory) == (result.puzzle.known_steps, result.puzzle.known_memory)
    assert "Solved." in str(result)


def test_puzzles_are_found_by_number_and_name() -> None:
    assert find(4) is find("4") is find("fsdp") is PUZZLES[4]
    assert [puzzle.number for puzzle in PUZZLES] == list(range(8))


def test_an_unknown_puzzle_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean gpipe"):
        find("gipe")
    with pytest.raises(UserError, match="there is no puzzle 8"):
        grade(8, solutions.ddp)


def test_a_solution_is_a_function() -> None:
    def of_nothing() -> None: ...
    def of_two(model: Model, more: object) -> None: ...

    things: list[Any] = ["ddp", None, dict, of_nothing, of_two]
    for thing in things:
        with pytest.raises(UserError, match=r"is not a solution; write it as `async def solution\(model\)"):
            grade("ddp", thing)


def test_a_solution_that_is_right_but_slow_is_told_so() -> None:
    result = grade("gpipe", solutions.pipeline)
    assert result.correct
    assert not result.solved
    assert result.verdict == "Correct, but too slow."


def test_a_solution_that_takes_too_much_memory_is_told_so() -> None:
    assert grade("grad_accum", solutions.standard).verdict == "Correct, but too much memory."


async def without_reducing(model: Model) -> None:
    model.fake_grad(0, [])
    solutions.load_all(model)
    model.grad_weights[0] = model.fake_grad(0, [model.rank])
    solutions.update_all(model, range(1))


def test_a_wrong_solution_is_told_why() -> None:
    result = grade("ddp", without_reducing)
    assert not result.correct
    assert re.search(r"\nWrong: \S+solutions\.py:\d+: rank 0, op 0 update\(layer 0\): microbatches 1-3 ", str(result))


def test_a_solution_that_hands_in_nothing_is_wrong() -> None:
    assert "no rank has set the final weight of layer 0" in grade("ddp", lambda model: None).verdict


def test_made_up_gradients_do_not_count() -> None:
    def cheat(model: Model) -> None:
        solutions.load_all(model)
        for l in range(model.LAYERS):
            model.grad_weights[l] = model.fake_grad(l, range(model.BATCHES))
        solutions.update_all(model, range(model.LAYERS))
        solutions.hand_in(model, range(model.LAYERS))

    assert "op 0 fake_grad(layer 0): grad_weights[0] (microbatches 0-3) was made up" in grade("standard", cheat).verdict


def test_an_error_in_a_solution_is_its_own() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 1:
            raise KeyError("typo")
        await model.receive()

    with pytest.raises(KeyError, match="typo"):
        grade("ddp", solution)


def test_a_solution_is_graded_inside_a_running_event_loop() -> None:
    async def notebook() -> Grade:
        return grade("ddp", solutions.ddp)

    assert asyncio.run(notebook()).solved


@pytest.mark.parametrize("width", [40, 80, 160])
def test_a_grade_is_printed_at_any_width(width: int) -> None:
    text = io.StringIO()
    console = Console(file=text, width=width)
    console.print(grade("ddp", solutions.ddp))
    console.print(grade("ddp", without_reducing))
    assert all(part in text.getvalue() for part in ("Distributed data parallel", "1,835,008", "Solved.", "Wrong: "))


def words_of(result: Grade) -> str:
    """What is written in a grade's picture, line breaks as blanks."""
    picture = result._repr_svg_()
    assert picture is not None
    return " ".join(" ".join(text.itertext()).strip() for text in ET.fromstring(picture).iter() if "text" in text.tag)


def test_a_notebook_shows_the_result_in_the_picture() -> None:
    words = words_of(grade("ddp", solutions.ddp))
    assert "Puzzle 2: Distributed data parallel" in words
    assert "Solved. Steps 5.1, goal 5.1; peak memory 1,835,008, goal 1,835,008." in words


def test_a_notebook_shows_what_is_missing_in_the_picture() -> None:
    assert "Correct, but too slow. Steps 66.9, goal 33.3;" in words_of(grade("gpipe", solutions.pipeline))
    words = words_of(grade("ddp", wrong_at_the_end))
    assert "rank 0, op 1 update(layer 0): microbatches 1-3 are missing" in words
    assert words.count("reduce the missing gradients first.") == 1, "it is not cut off"


async def wrong_at_the_end(model: Model) -> None:
    solutions.load_all(model)
    model.activations[0] = model.get_activation([model.rank])
    model.forward(0, model.activations[0], model.weights[0])
    model.grad_weights[0] = model.fake_grad(0, [model.rank])
    solutions.update_all(model, range(1))


def test_where_nothing_was_timed_a_notebook_shows_the_text() -> None:
    result = grade("ddp", without_reducing)
    assert result._repr_svg_() is None
    assert repr(result) == str(result)
    with pytest.raises(UserError, match="nothing was timed"):
        result.draw()


def test_a_puzzle_shows_what_to_write_and_what_to_reach() -> None:
    first, *text, goal, call = repr(PUZZLES[2]).splitlines()
    assert first == "Puzzle 2: Distributed data parallel (4 ranks, 2 layers, 4 microbatches)"
    assert all(len(line) <= 80 for line in text)
    assert goal == "Goal: 5.1 steps, 1,835,008 elements at most on a rank."
    assert call == 'grade("ddp", my_solution)'


def test_a_puzzle_does_not_say_what_the_published_solution_reaches() -> None:
    assert "1966080" not in repr(PUZZLES[1]).replace(",", "")


def test_an_error_in_a_solution_comes_with_its_own_frames() -> None:
    def solution(model: Model) -> None:
        model.wieghts[0]  # pyright: ignore

    with pytest.raises(AttributeError, match="wieghts") as caught:
        grade("standard", solution)
    places = [entry.path for entry in caught.traceback]
    assert str(places[-1]).endswith("test_grader.py")
    assert not any("asyncio" in str(place) for place in places)

"""Grading a solution."""

import asyncio
import io
import re
import xml.etree.ElementTree as ET

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
    with pytest.raises(UserError, match="is not a solution"):
        grade("ddp", "ddp")


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


def test_a_grade_shows_the_run_in_a_notebook() -> None:
    assert ET.fromstring(grade("ddp", solutions.ddp)._repr_svg_()).tag.endswith("svg")

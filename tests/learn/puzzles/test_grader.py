"""Grading a solution."""

import asyncio
import io
import re
from base64 import b64decode
from html import escape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardlab.language import Mesh, Rank, UserError
from shardlab.learn.puzzles import PUZZLES, Grade, Model, Puzzle, find, grade
from shardlab.strategies import find as find_imported
from tests.check.right_programs import fine_tuned
from tests.learn.puzzles import solutions
from tests.support.passing import gradients


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


def test_a_right_but_slow_solution_gets_a_verdict_about_time() -> None:
    result = grade("gpipe", solutions.pipeline)
    assert result.correct
    assert not result.solved
    assert result.verdict == "Correct, but too slow."


def test_a_solution_with_too_much_memory_gets_a_verdict_about_memory() -> None:
    assert grade("grad_accum", solutions.standard).verdict == "Correct, but too much memory."


async def without_reducing(model: Model) -> None:
    model.fake_grad(0, [])
    solutions.load_all(model)
    model.grad_weights[0] = model.fake_grad(0, [model.rank])
    solutions.update_all(model, range(1))


def test_a_wrong_solution_gets_the_reason() -> None:
    result = grade("ddp", without_reducing)
    assert not result.correct
    assert re.match(r"Wrong: \S+solutions\.py:\d+: rank 0, op 0 update\(layer 0\): microbatches 1-3 ", result.verdict)


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


def test_a_notebook_shows_the_result_and_the_goals_as_text_before_the_picture() -> None:
    text, picture = grade("ddp", solutions.ddp)._repr_html_().split("<img")
    assert "Puzzle 2: Distributed data parallel" in text
    assert "Solved." in text
    assert "<tr><th>steps</th><td>5.1</td><td>5.1</td><td></td></tr>" in text
    assert "<tr><th>peak memory</th><td>1,835,008</td><td>1,835,008</td><td></td></tr>" in text
    assert b64decode(picture.partition("base64,")[2].partition('"')[0]).startswith(b"<?xml")


def test_a_notebook_marks_a_missed_goal_and_shows_the_whole_reason() -> None:
    text = grade("gpipe", solutions.pipeline)._repr_html_()
    assert "Correct, but too slow." in text
    assert "<td>66.9</td><td>33.3</td><td><b>missed</b></td>" in text
    wrong = grade("ddp", wrong_at_the_end)
    assert escape(wrong.error) in wrong._repr_html_()
    assert "rank 0, op 1 update(layer 0): microbatches 1-3 are missing" in wrong.error
    assert "<img" in wrong._repr_html_()
    assert "<table" not in wrong._repr_html_()


async def wrong_at_the_end(model: Model) -> None:
    solutions.load_all(model)
    model.activations[0] = model.get_activation([model.rank])
    model.forward(0, model.activations[0], model.weights[0])
    model.grad_weights[0] = model.fake_grad(0, [model.rank])
    solutions.update_all(model, range(1))


def test_where_nothing_was_timed_a_notebook_shows_only_text() -> None:
    result = grade("ddp", without_reducing)
    assert escape(result.verdict) in result._repr_html_()
    assert "<img" not in result._repr_html_()
    assert repr(result) == str(result)
    assert all(len(line) <= 80 for line in repr(result).splitlines()), "a sentence is broken between words"
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


# Grading strategies of `shardlab.language`.


BUILT_IN = ("single", "grad-accum", "ddp", "wsdp", "fsdp", "pipeline")


@pytest.mark.parametrize(("number", "name"), list(enumerate(BUILT_IN)))
def test_built_in_strategies_solve_their_puzzles(number: int, name: str) -> None:
    result = grade(number, find_imported(name).program)
    assert result.solved, str(result)
    assert result.steps <= PUZZLES[number].known_steps
    assert 0 < result.peak_memory <= PUZZLES[number].known_memory
    assert "Solved." in result._repr_html_()


async def gpipe(rank: Rank) -> None:
    mine, last = rank.stage_layers(), rank.index == rank.world - 1
    for l in mine:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        act = rank.load_batch([m]) if rank.index == 0 else await rank.recv(source=rank.index - 1)
        for l in mine:
            rank.activations[l, m] = act
            act = rank.forward(l, act, rank.weights[l])
        if last:
            rank.activations["out", m] = act
        else:
            rank.send(act, to=rank.index + 1)
    for m in rank.microbatches:
        grad = rank.loss(rank.activations.pop(("out", m))) if last else await rank.recv(source=rank.index + 1)
        for l in reversed(mine):
            grad_weight, grad = rank.backward(l, rank.activations.pop((l, m)), grad, rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights.pop(l) + grad_weight if m else grad_weight
        if rank.index:
            rank.send(grad, to=rank.index - 1)
    for l in mine:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )


def test_a_strategy_of_ones_own_solves_gpipe() -> None:
    assert grade("gpipe", gpipe).verdict == "Solved."


def test_the_goals_for_time_and_memory_are_the_same() -> None:
    assert grade("gpipe", find_imported("pipeline").program).verdict == "Correct, but too slow."
    assert grade("grad_accum", find_imported("single").program).verdict == "Correct, but too much memory."


async def on_a_grid(rank: Rank) -> None:
    assert rank.group("pp").ranks
    raise KeyError(rank.mesh.pp)


def on_a_grid_mesh(ranks: int) -> Mesh:
    return Mesh(pp=4, dp_shard=ranks // 4)


def test_a_grid_is_what_the_function_beside_a_strategy_says() -> None:
    assert grade("pipeline_fsdp", on_a_grid).verdict.endswith("the program raised KeyError: 4; fix it there.")


async def without_reducing_of_native(rank: Rank) -> None:
    for l, grad_weight in gradients(rank):
        rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


async def without_updating(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)


async def waiting_in_a_ring(rank: Rank) -> None:
    await rank.recv(source=(rank.index + 1) % rank.world)


@pytest.mark.parametrize(
    ("strategy", "line", "sentence"),
    [
        (without_reducing_of_native, "rank.update(", "microbatches 1-3 are missing from"),
        (without_updating, "rank.load_weights(", "weights[0] is loaded here and never updated"),
        (waiting_in_a_ring, "rank.recv(", "deadlock: rank 0 waits in recv"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_strategy_gets_the_reason_and_the_line(strategy: Any, line: str, sentence: str) -> None:
    result = grade("ddp", strategy)
    assert not result.correct
    assert sentence in result.error
    number = int(result.error.split("test_grader.py:")[1].split(":")[0])
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert line in text[number - 1]
    assert strategy.__code__.co_firstlineno < number
    assert str(Path.cwd()) not in result.error
    assert "<img" not in result._repr_html_()


def test_an_argument_called_rank_is_a_rank() -> None:
    async def strategy(rank: Any) -> None:
        del rank

    async def bare(rank: Rank) -> None:
        rank.load_batch([0])

    bare.__annotations__.clear()  # as a student would write it
    assert "no rank has set the final weight" in grade("ddp", strategy).error
    assert "no rank loads this weight" in grade("ddp", bare).error


def test_a_puzzle_is_not_solved_by_freezing_layers() -> None:
    """Such a strategy is right, and takes less time and memory, but it trains less."""
    assert "no rank loads an optimizer state of layer 0, so it is frozen" in grade("ddp", fine_tuned).error


def test_a_strategy_is_an_async_function() -> None:
    def strategy(rank: Rank) -> None:
        del rank

    with pytest.raises(ValueError, match="is not a strategy: write it as `async def strategy"):
        grade("ddp", strategy)

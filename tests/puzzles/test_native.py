"""Grading strategies of `shardlab.program`."""

from pathlib import Path
from typing import Any

import pytest

from shardlab.program import Mesh, Rank
from shardlab.puzzles import PUZZLES, grade
from shardlab.strategies import find
from tests.check.right_programs import fine_tuned
from tests.support.passes import gradients

BUILT_IN = ("single", "grad-accum", "ddp", "wsdp", "fsdp", "pipeline")


@pytest.mark.parametrize(("number", "name"), list(enumerate(BUILT_IN)))
def test_built_in_strategies_solve_their_puzzles(number: int, name: str) -> None:
    result = grade(number, find(name).program)
    assert result.solved, str(result)
    assert result.steps <= PUZZLES[number].known_steps
    assert 0 < result.peak_memory <= PUZZLES[number].known_memory
    assert "Solved. Steps" in (result._repr_svg_() or "")


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
    assert grade("gpipe", find("pipeline").program).verdict == "Correct, but too slow."
    assert grade("grad_accum", find("single").program).verdict == "Correct, but too much memory."


async def on_a_grid(rank: Rank) -> None:
    assert rank.group("pp").ranks
    raise KeyError(rank.mesh.pp)


def on_a_grid_mesh(ranks: int) -> Mesh:
    return Mesh(pp=4, dp_shard=ranks // 4)


def test_a_grid_is_what_the_function_beside_a_strategy_says() -> None:
    assert grade("pipeline_fsdp", on_a_grid).verdict.endswith("the program raised KeyError: 4; mend it there.")


async def without_reducing(rank: Rank) -> None:
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
        (without_reducing, "rank.update(", "microbatches 1-3 are missing from"),
        (without_updating, "rank.load_weights(", "the step ends without weights[0] (step 1)"),
        (waiting_in_a_ring, "rank.recv(", "deadlock: rank 0 waits in recv"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_strategy_is_told_why_and_at_which_line(strategy: Any, line: str, sentence: str) -> None:
    result = grade("ddp", strategy)
    assert not result.correct
    assert sentence in result.error
    number = int(result.error.split("test_native.py:")[1].split(":")[0])
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert line in text[number - 1]
    assert strategy.__code__.co_firstlineno < number
    assert str(Path.cwd()) not in result.error
    assert result._repr_svg_() is None


def test_an_argument_called_rank_is_a_rank() -> None:
    async def strategy(rank: Any) -> None:
        del rank

    async def bare(rank: Rank) -> None:
        rank.load_batch([0])

    bare.__annotations__.clear()  # as a student would write it
    assert "no rank has set the final weight" in grade("ddp", strategy).error
    assert "no rank loads slice" in grade("ddp", bare).error


def test_a_puzzle_is_not_solved_by_freezing_layers() -> None:
    """Such a strategy is right, and takes less time and memory, but it trains less."""
    assert "no rank loads an optimizer state of layer 0, so it is frozen" in grade("ddp", fine_tuned).error


def test_a_strategy_is_an_async_function() -> None:
    def strategy(rank: Rank) -> None:
        del rank

    with pytest.raises(ValueError, match="is not a strategy: write it as `async def strategy"):
        grade("ddp", strategy)

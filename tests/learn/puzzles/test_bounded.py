"""Programs that do not end are stopped: by Ctrl-C, and at a bound."""

import asyncio
import math
import signal
import sys
import time
from typing import Any

import pytest

from shardlab.language import Rank, UserError
from shardlab.learn.puzzles import Model, grade
from tests.learn.puzzles import solutions
from tests.support.processes import started
from tests.support.waiting import PATIENCE


async def spins(model: Model) -> None:
    while True:
        pass


async def yields(model: Model) -> None:
    while True:
        await asyncio.sleep(0)


async def sleeps(model: Model) -> None:
    await asyncio.Event().wait()


async def computes(model: Model) -> None:
    solutions.load_all(model)
    model.activations[0] = model.get_activation([0])
    while True:
        model.forward(0, model.activations[0], model.weights[0])


async def catches_all(model: Model) -> None:
    for _ in range(3):
        try:
            while True:
                pass
        except BaseException:
            pass


async def strategy(rank: Rank) -> None:
    while True:
        pass


ENDLESS = [spins, yields, sleeps, computes, catches_all, strategy]


@pytest.mark.parametrize("solution", ENDLESS, ids=lambda solution: solution.__name__)
def test_a_solution_that_never_ends_is_stopped_with_a_sentence(solution: Any) -> None:
    verdict = grade("ddp", solution, seconds=0.3).verdict
    assert verdict.startswith("Wrong: the solution had not ended after 0.3 s")
    assert verdict.endswith("; make its loops end, or give it more time: grade(..., seconds=3).")
    if solution not in (yields, sleeps):
        code = solution.__code__
        number = int(verdict.split("test_bounded.py:")[1].split(";")[0])
        assert code.co_firstlineno < number <= max(line for _, _, line in code.co_lines() if line)


def test_what_took_too_long_does_not_go_on() -> None:
    turns = [0]

    async def solution(model: Model) -> None:
        while True:
            turns[0] += 1

    grade("ddp", solution, seconds=0.2)
    before = turns[0]
    time.sleep(0.1)
    assert turns[0] == before > 0


def test_a_picture_of_far_too_many_events_is_not_drawn() -> None:
    result = grade("ddp", solutions.ddp)
    result.models[0].log *= 10_000
    assert result._repr_svg_() is None
    with pytest.raises(UserError, match="too many for a picture of at most 20,000"):
        result.draw()


def test_a_solution_may_have_any_time() -> None:
    assert grade("ddp", solutions.ddp, seconds=math.inf).solved
    for seconds in (0, -1, math.nan):
        with pytest.raises(UserError, match="give more than 0"):
            grade("ddp", solutions.ddp, seconds=seconds)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise")
@pytest.mark.parametrize("solution", ENDLESS, ids=lambda solution: solution.__name__)
def test_ctrl_c_ends_an_endless_solution(solution: Any) -> None:
    name = solution.__name__
    program = (
        f"from tests.learn.puzzles.test_bounded import *; print('go', flush=True); grade('ddp', {name}, seconds=120)"
    )
    with started([sys.executable, "-c", program]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "go\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode != 0
    assert errors.strip().endswith("KeyboardInterrupt")

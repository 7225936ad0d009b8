"""A forgotten `await` is told in a sentence that names the line of the call."""

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from shardlab.learn.puzzles import Model, PuzzleRefused, grade
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import gathered, models_of, results, run
from tests.support.refusing import refuses


async def used(model: Model) -> None:
    solutions.load_all(model)
    total: Any = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    model.update(0, total, model.weights[0], model.opt_states[0])


async def kept(model: Model) -> None:
    store: dict[int, Any] = model.grad_weights
    store[0] = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    model.activations[0] = model.get_activation([0])
    model.forward(0, model.activations[0], model.load_weights(0)[0])


async def added(model: Model) -> None:
    first: Any = model.fake_grad(0, [])
    first + model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten


async def cut(model: Model) -> None:
    total: Any = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    total.shard(0, 4)


async def combined(model: Model) -> None:
    other: Any = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    model.fake_grad(0, []).combine(other)


async def unpacked(model: Model) -> None:
    call: Any = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    _, _ = call


async def passed_on(model: Model) -> None:
    await model.pass_to(model.rank, model.allreduce(model.fake_grad(0, [model.rank]), 0))  # forgotten


async def dropped(model: Model) -> None:
    model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten


async def dropped_by_one(model: Model) -> None:
    if model.rank == 0:
        model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten
    else:
        await model.allreduce(model.fake_grad(0, [model.rank]), 0)


def left_in_a_store(model: Model) -> None:
    store: dict[int, Any] = model.grad_weights
    store[0] = model.allreduce(model.fake_grad(0, [model.rank]), 0)  # forgotten


WAYS = [used, kept, added, cut, combined, unpacked, passed_on, dropped, dropped_by_one, left_in_a_store]


def forgotten_line() -> dict[str, int]:
    """By function, the line marked above."""
    lines: dict[str, int] = {}
    name = ""
    with open(__file__, encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            name = text.split("def ")[1].split("(")[0] if text.startswith(("def ", "async def ")) else name
            if text.rstrip().endswith("# forgotten"):
                lines[name] = number
    return lines


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_grade_names_the_line_without_await(way: Callable[[Model], Any]) -> None:
    verdict = grade("ddp", way).verdict
    line = forgotten_line()[way.__name__]
    assert f"test_calls.py:{line}: rank 0, op 0: allreduce(layer 0) was called without `await`" in verdict
    assert verdict.endswith("so it has not run; write `await model.allreduce(...)`.")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_so_does_a_run_that_the_student_drives(way: Callable[[Model], Any]) -> None:
    with refuses("not awaited", error=PuzzleRefused):
        Model.check(run(way, 4, 2, 4))


def test_a_receive_without_await_says_how_to_write_it() -> None:
    def solution(model: Model) -> None:
        model.receive()
        model.storage()

    with refuses("not awaited", error=PuzzleRefused):
        run(solution, 2)


async def reduce_all(model: Model) -> None:
    await model.allreduce(model.fake_grad(0, [model.rank]), 0)


def test_a_students_own_coroutine_that_nobody_awaits_is_named() -> None:
    async def solution(model: Model) -> None:
        reduce_all(model)  # pyright: ignore[reportUnusedCoroutine]

    verdict = grade("ddp", solution).verdict
    assert "test_calls.py:" in verdict
    assert verdict.endswith(
        ": reduce_all() was called without `await`, so it has not run; write `await reduce_all(...)`."
    )


def test_where_it_does_no_harm_python_warns_of_it_as_ever() -> None:
    def solution(model: Model) -> None:
        reduce_all(model)  # pyright: ignore[reportUnusedCoroutine]
        solutions.standard(model)

    with pytest.warns(RuntimeWarning, match="coroutine 'reduce_all' was never awaited"):
        assert grade("standard", solution).solved


def test_a_model_goes_on_after_the_message() -> None:
    model = Model(rank=0)
    model.receive()
    with refuses("not awaited", error=PuzzleRefused):
        model.load_weights(0)
    model.load_weights(0)


def test_other_warnings_of_a_solution_are_shown_as_ever() -> None:
    def solution(model: Model) -> None:
        warnings.warn("the cheese is old", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="the cheese is old"):
        grade("standard", solution)


def test_a_call_is_awaited_as_any_coroutine() -> None:
    async def solution(model: Model) -> list[Any]:
        task = asyncio.create_task(model.allreduce(model.rank, 0))
        later = model.allreduce(1, 0)
        got = [await task]
        got.append(await later)
        got += await asyncio.gather(asyncio.wait_for(model.allreduce(2, 0), 5))
        return got

    assert results(solution, 3) == [[3, 3, 6]] * 3


def test_a_call_closed_before_it_ran_was_not_forgotten() -> None:
    def solution(model: Model) -> None:
        model.receive().close()
        model.storage()

    asyncio.run(gathered(solution, models_of(2)))


def test_a_call_shows_what_it_is() -> None:
    call = Model().allreduce(1, 3)
    assert repr(call) == "<allreduce(layer 3), not awaited>"
    call.close()

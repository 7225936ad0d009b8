"""A forgotten `await` is told in a sentence that names the line of the call."""

import asyncio
import time
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Deadlock
from shardlab.learn.puzzles import Dist, Model, PuzzleDeadlock, PuzzleRefused, WeightGrad, grade
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


@pytest.mark.parametrize("solution", WAYS, ids=lambda way: way.__name__)
def test_the_grade_names_the_line_without_await(solution: Callable[[Model], Any]) -> None:
    verdict = grade("ddp", solution).verdict
    line = forgotten_line()[solution.__name__]
    assert f"test_calls.py:{line}: rank 0, op 0: allreduce(layer 0) was called without `await`" in verdict
    assert verdict.endswith("so it has not run; write `await model.allreduce(...)`.")


@pytest.mark.parametrize("solution", WAYS, ids=lambda way: way.__name__)
def test_so_does_a_run_that_the_student_drives(solution: Callable[[Model], Any]) -> None:
    with refuses("not awaited", error=PuzzleRefused):
        Model.check(run(solution, 4, 2, 4))


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


# Ranks driven by the user's own asyncio: nothing hangs, and results do not depend on the order of the loop.


# Deadlocks.


def test_both_sides_receiving_first_is_reported_with_the_cycle() -> None:
    async def solution(model: Model) -> None:
        await model.receive()
        await model.pass_to(1 - model.rank, "x")

    expected = (
        r"^deadlock: rank 0 waits in receive\(\) for a message from any rank \(\S+test_calls\.py:\d+\); "
        r"rank 1 waits in receive\(\) for a message from any rank \(\S+:\d+\)\. Let"
    )
    with pytest.raises(PuzzleDeadlock, match=expected):
        run(solution, 2)


def test_a_missing_send_is_reported_with_the_rank_that_has_ended() -> None:
    async def solution(model: Model) -> None:
        model.storage()
        if model.rank == 1:
            await model.receive()

    with (
        pytest.raises(PuzzleDeadlock, match=r"rank 1 waits in receive\(\) .*rank 0 ended.*; rank 0 has ended"),
    ):
        run(solution, 2)


def test_the_cycle_is_found_although_another_rank_has_ended() -> None:
    async def solution(model: Model) -> None:
        model.storage()
        if model.rank:
            await model.receive()

    with pytest.raises(PuzzleDeadlock, match=r"rank 1 waits in .*\(rank 0 ended\) \(\S+\); rank 2 waits in"):
        run(solution, 3)


def test_a_collective_that_a_rank_leaves_out_is_reported() -> None:
    async def solution(model: Model) -> None:
        model.storage()
        if model.rank != 2:
            await model.allreduce(WeightGrad(3, 4, {model.rank}, 4), 3)

    expected = (
        r"rank 0 waits in allreduce\(grad_weights\[3\] \(microbatch 0\)\) for rank 2 \(\S+\); "
        r"rank 2 has ended without it \(2 more ranks wait behind them\)"
    )
    with pytest.raises(PuzzleDeadlock, match=expected):
        run(solution, 4)


def test_a_collective_meeting_a_receive_is_reported() -> None:
    async def solution(model: Model) -> None:
        await (model.receive() if model.rank else model.allgather(model.load_weights(1)[0], 1))

    with pytest.raises(
        PuzzleDeadlock, match=r"rank 0 waits in allgather\(weights\[1\]\) for rank 1 \(\S+\); rank 1 waits in receive"
    ):
        run(solution, 2)


def test_two_full_mailboxes_are_reported() -> None:
    async def solution(model: Model) -> None:
        await model.pass_to(1 - model.rank, "first")
        await model.pass_to(1 - model.rank, "second")

    with pytest.raises(PuzzleDeadlock, match=r"rank 0 waits in pass_to\(rank 1\) of 'second', whose mailbox is full"):
        run(solution, 2)


def test_a_rank_that_is_not_driven_is_called_missing_after_a_second_and_not_before() -> None:
    async def main() -> None:
        await gathered(lambda model: model.receive(), models_of(3)[:2])

    start = time.monotonic()
    with pytest.raises(PuzzleDeadlock, match=r"Missing: rank 2 .* within 1 s"):
        asyncio.run(main())
    assert time.monotonic() - start > 0.9


def test_a_rank_alone_does_not_wait_for_itself() -> None:
    with pytest.raises(PuzzleDeadlock, match="rank 0 waits in receive"):
        run(lambda model: model.receive(), 1)


def test_a_rank_that_awaits_something_else_for_ever_is_named() -> None:
    async def solution(model: Model) -> None:
        model.storage()
        await (model.receive() if model.rank else asyncio.Event().wait())

    with pytest.raises(PuzzleDeadlock, match="Rank 0 awaits something else than a communication"):
        run(solution, 2)


def test_every_waiting_rank_learns_of_the_deadlock() -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*[model.receive() for model in models_of(3)], return_exceptions=True)

    outcomes = asyncio.run(main())
    assert [type(outcome) for outcome in outcomes] == [PuzzleDeadlock] * 3
    assert isinstance(outcomes[0], Deadlock)
    assert isinstance(outcomes[0], AssertionError)


# A rank that raises.


async def third_raises(model: Model) -> None:
    model.storage()
    if model.rank == 2:
        raise ValueError("out of cheese")
    await model.allreduce(model.fake_grad(0, []), 0)


def test_when_a_rank_raises_the_others_stop_with_an_error_that_names_it() -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*[third_raises(model) for model in models_of(4)], return_exceptions=True)

    outcomes = asyncio.run(main())
    assert isinstance(outcomes[2], ValueError)
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], PuzzleRefused)
        assert str(outcomes[rank]) == "rank 2 raised ValueError: out of cheese; the other ranks stop, fix it there."


def test_gather_ends_with_the_error_of_the_rank_that_raised() -> None:
    with pytest.raises(ValueError, match="out of cheese"):
        run(third_raises, 4)


def test_a_cancelled_rank_stops_the_others() -> None:
    async def main() -> list[Any]:
        tasks = [asyncio.ensure_future(model.receive()) for model in models_of(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    _, other = asyncio.run(main())
    assert str(other) == "rank 0 was cancelled; the other ranks stop, fix it there."


# Ways to drive.


def test_a_task_group_drives_the_ranks() -> None:
    async def main() -> list[Model]:
        models = models_of(4, 2, 4)
        async with asyncio.TaskGroup() as group:
            for model in models:
                group.create_task(solutions.ddp(model))
        return models

    Model.check(asyncio.run(main()))


def test_a_task_group_ends_with_the_deadlock() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for model in models_of(2):
                group.create_task(model.receive())

    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(main())
    assert caught.group_contains(PuzzleDeadlock, match="rank 0 waits in receive")


def test_one_task_may_drive_several_ranks_in_turn() -> None:
    async def main() -> str:
        first, second = models_of(2)
        await first.pass_to(1, "extra cheese")
        return await second.receive()

    assert asyncio.run(main()) == "extra cheese"


def test_a_rank_may_send_and_receive_at_once() -> None:
    async def solution(model: Model) -> Any:
        model.storage()
        _, got = await asyncio.gather(model.pass_to(1 - model.rank, model.rank), model.receive())
        return got, await model.allreduce(1, 0)

    assert results(solution, 2) == [(1, 2), (0, 2)]


def test_a_rank_that_comes_late_is_waited_for() -> None:
    async def solution(model: Model) -> Any:
        if model.rank == 0:
            await asyncio.sleep(0.1)
            return await model.pass_to(1, "late")
        return await model.receive()

    assert results(solution, 2) == [None, "late"]


def test_event_loops_may_follow_one_another() -> None:
    dist = Dist(4)
    for _ in range(2):
        models = models_of(4, 2, 4, dist)
        asyncio.run(gathered(solutions.ddp, models))
        Model.check(models)


def test_one_run_may_go_on_in_another_event_loop() -> None:
    models = models_of(2)
    assert asyncio.run(gathered(lambda model: model.rank or model.pass_to(1, "kept"), models)) == [None, 1]
    assert asyncio.run(gathered(lambda model: model.receive() if model.rank else None, models)) == [None, "kept"]


def test_after_a_failed_run_the_dist_works_again() -> None:
    dist = Dist(4)
    with pytest.raises(ValueError, match="cheese"):
        asyncio.run(gathered(third_raises, models_of(4, dist=dist)))
    models = models_of(4, 2, 4, dist)
    asyncio.run(gathered(solutions.fsdp, models))
    Model.check(models)


def test_models_may_be_made_inside_the_tasks() -> None:
    async def one(rank: int, dist: Dist) -> Model:
        model = Model(rank=rank, dist=dist, layers=2, batches=4)
        await solutions.ddp(model)
        return model

    async def main(dist: Dist) -> list[Model]:
        return await asyncio.gather(*[one(rank, dist) for rank in range(4)])

    dist = Dist(4)
    for _ in range(2):
        Model.check(asyncio.run(main(dist)))


# The order in which the event loop runs the tasks does not matter.


def logs(name: str, sizes: tuple[int, int, int], order: list[int], naps: list[int]) -> list[list[Any]]:
    models = models_of(*sizes)

    async def napping(model: Model) -> None:
        for _ in range(naps[model.rank]):
            await asyncio.sleep(0)
        await getattr(solutions, name)(model)

    asyncio.run(gathered(napping, [models[rank] for rank in order]))
    return [model.log for model in models]


@cache
def logs_in_order(name: str, sizes: tuple[int, int, int]) -> list[list[Any]]:
    """Return the logs of ranks that run in their order, without naps."""
    return logs(name, sizes, [0, 1, 2, 3], [0, 0, 0, 0])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ddp", (4, 2, 4)), ("fsdp", (4, 3, 4)), ("pipeline", (4, 4, 2)), ("gpipe", (4, 4, 3))],
)
@given(order=st.permutations(range(4)), naps=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_logs_do_not_depend_on_the_order_of_the_tasks(
    name: str, sizes: tuple[int, int, int], order: list[int], naps: list[int]
) -> None:
    assert logs(name, sizes, order, naps) == logs_in_order(name, sizes)

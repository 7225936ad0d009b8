"""Ranks driven by the user's own asyncio: nothing hangs, and results do not depend on the order of the loop."""

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Deadlock
from shardlab.learn.puzzles import Dist, Model, PuzzleDeadlock, PuzzleRefused, WeightGrad
from tests.learn.puzzles import solutions
from tests.learn.puzzles.drive import gathered, models_of, results, run

# Deadlocks.


def test_both_sides_receiving_first_is_reported_with_the_cycle() -> None:
    async def solution(model: Model) -> None:
        await model.receive()
        await model.pass_to(1 - model.rank, "x")

    expected = (
        r"^deadlock: rank 0 waits in receive\(\) for a message from any rank \(\S+test_asyncio\.py:\d+\); "
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
        assert str(outcomes[rank]) == "rank 2 raised ValueError: out of cheese; the other ranks stop, mend it there."


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
    assert str(other) == "rank 0 was cancelled; the other ranks stop, mend it there."


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


# The order in which the loop runs the tasks is of no account.


def logs(name: str, sizes: tuple[int, int, int], order: list[int], naps: list[int]) -> list[list[Any]]:
    models = models_of(*sizes)

    async def napping(model: Model) -> None:
        for _ in range(naps[model.rank]):
            await asyncio.sleep(0)
        await getattr(solutions, name)(model)

    asyncio.run(gathered(napping, [models[rank] for rank in order]))
    return [model.log for model in models]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ddp", (4, 2, 4)), ("fsdp", (4, 3, 4)), ("pipeline", (4, 4, 2)), ("gpipe", (4, 4, 3))],
)
@given(order=st.permutations(range(4)), naps=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_logs_do_not_depend_on_the_order_of_the_tasks(
    name: str, sizes: tuple[int, int, int], order: list[int], naps: list[int]
) -> None:
    assert logs(name, sizes, order, naps) == logs(name, sizes, [0, 1, 2, 3], [0, 0, 0, 0])

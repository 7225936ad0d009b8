"""Messages: what may be sent, which one a receive takes, and when."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.learn.puzzles import Model, Weight
from tests.learn.puzzles.drive import gathered, models_of, results, run

THINGS: list[Any] = [None, 0, "extra cheese", [1, 2], {"a": {1}}, object(), len, Weight(0, 1, 0), ValueError("x")]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_any_object_is_passed_and_keeps_its_identity(thing: Any) -> None:
    async def solution(model: Model) -> Any:
        return await model.pass_to(1, thing) if model.rank == 0 else await model.receive()

    assert results(solution, 2)[1] is thing


def work(model: Model, microbatches: int) -> None:
    """Let so much time pass."""
    model.weights[0], _ = model.load_weights(0)
    model.activations[0] = model.get_activation(range(microbatches))
    model.forward(0, model.activations[0], model.weights[0])


def test_a_pass_costs_0_2_and_so_does_a_receive() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            work(model, 3)
            await model.pass_to(1, "x")
        else:
            await model.receive()

    sender, receiver = run(solution, 2)
    assert (sender.log[-1].time, sender.time) == (3, 3.2)
    assert (receiver.log[-1].time, receiver.time) == (3.2, 3.4), "it starts when the message was sent"


def test_a_receiver_that_comes_later_does_not_wait() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "x")
        else:
            work(model, 5)
            await model.receive()

    assert run(solution, 2)[1].time == 5.2


@given(times=st.lists(st.integers(0, 4), min_size=2, max_size=5), seed=st.randoms(use_true_random=False))
def test_a_receive_takes_the_message_that_was_sent_first_and_of_two_the_lower_ranks(
    times: list[int], seed: Any
) -> None:
    async def solution(model: Model) -> list[int]:
        if model.rank == 0:
            return [await model.receive() for _ in times]
        work(model, times[model.rank - 1])
        for _ in range(seed.randint(0, 3)):
            await asyncio.sleep(0)
        await model.pass_to(0, model.rank)
        return []

    models = models_of(len(times) + 1, 1, 4)
    order = seed.sample(models, len(models))
    got = dict(zip([model.rank for model in order], asyncio.run(gathered(solution, order)), strict=True))[0]
    assert got == sorted(range(1, len(models)), key=lambda rank: (times[rank - 1], rank))


def test_a_mailbox_holds_one_message() -> None:
    entered: list[str] = []

    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "first")
            entered.append("first is in")
            await model.pass_to(1, "second")
            entered.append("second is in")
        else:
            await model.pass_to(2, "now")  # rank 2 takes it only after rank 0 has tried twice
            entered.append(await model.receive())
            entered.append(await model.receive())

    async def third(model: Model) -> None:
        await (model.receive() if model.rank == 2 else solution(model))

    run(third, 3)
    assert entered.index("first is in") < entered.index("first") < entered.index("second is in")


def test_waiting_for_room_takes_the_sender_no_time() -> None:
    async def solution(model: Model) -> None:
        if model.rank == 0:
            await model.pass_to(1, "first")
            await model.pass_to(1, "second")
        else:
            work(model, 9)
            await model.receive()
            await model.receive()

    assert [model.time for model in run(solution, 2, batches=9)] == [0.4, 9.4]


def test_a_rank_may_pass_a_message_to_itself() -> None:
    async def solution(model: Model) -> Any:
        await model.pass_to(model.rank, "note")
        return await model.receive()

    assert results(solution, 2) == ["note", "note"]


def test_messages_go_round_a_ring() -> None:
    async def solution(model: Model) -> int:
        total = carried = model.rank
        for _ in range(model.RANKS - 1):
            await model.pass_to((model.rank + 1) % model.RANKS, carried)
            carried = await model.receive()
            total += carried
        return total

    assert results(solution, 6) == [15] * 6

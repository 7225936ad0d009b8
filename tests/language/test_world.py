"""Tracing: refusals, reports of deadlocks, and equal tapes of equal traces."""

from __future__ import annotations

import asyncio
import functools
import gc

import pytest
from hypothesis import given

from shardlab.language import Deadlock, Handle, Mesh, Rank, Strategy, UserError, Value, World, trace
from shardlab.strategies.ddp import ddp
from tests.language.tapes import refusal, says
from tests.support.random_programs import Shape, program_of, shapes
from tests.support.refusing import require_refusal

# Invalid strategies and worlds.


def plain(rank: Rank) -> None:
    rank.load_batch([0])


async def two_arguments(rank: Rank, other: int) -> None:
    rank.load_batch([other])


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (plain, "plain is not a strategy: write it as `async def plain(rank): ...`"),
        (two_arguments, "two_arguments cannot be called with the rank alone: missing a required argument: 'other'"),
        (3, "3 is not a strategy"),
    ],
)
def test_an_object_that_is_no_strategy_is_refused_in_one_sentence(strategy: Strategy, message: str) -> None:
    with pytest.raises(UserError) as caught:
        trace(strategy, 2, 1, 1)
    says(caught.value, message)


def test_a_partial_strategy_is_a_strategy() -> None:
    assert trace(functools.partial(two_arguments, other=0), 1, 1, 1).ranks == 1


@pytest.mark.parametrize("count", [0, -3])
@pytest.mark.parametrize("name", ["ranks", "layers", "microbatches"])
def test_counts_below_one_are_refused_by_name(name: str, count: int) -> None:
    counts = {"ranks": 1, "layers": 1, "microbatches": 1} | {name: count}
    with pytest.raises(UserError, match=f"^{count} {name} were asked for; give 1 or more$"):
        trace(ddp, **counts)


# Actions that a program must not take.


async def sleeps(rank: Rank) -> None:
    await asyncio.sleep(0.1)


async def yields(rank: Rank) -> None:
    await asyncio.sleep(0)


async def gathers(rank: Rank) -> None:
    await asyncio.gather(rank.recv(source=1 - rank.index))


@pytest.mark.parametrize("strategy", [sleeps, yields])
def test_only_communications_are_awaited(strategy: Strategy) -> None:
    require_refusal(refusal(strategy), "awaited something else")


@pytest.mark.parametrize("strategy", [sleeps, yields, gathers])
def test_only_communications_are_awaited_also_when_a_loop_runs_around_the_trace(strategy: Strategy) -> None:
    async def notebook() -> None:
        require_refusal(refusal(strategy), "awaited something else")

    asyncio.run(notebook())


def test_the_handle_of_another_rank_is_not_awaited() -> None:
    handles: dict[int, Handle[Value]] = {}

    async def strategy(rank: Rank) -> None:
        handles[rank.index] = rank.recv(source=(rank.index + 1) % 3)
        if rank.index:
            await handles[0]

    require_refusal(refusal(strategy, 3), "awaited something else", rank=1, op=1)


def test_an_exception_of_the_program_is_a_refusal_with_its_cause() -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_batch([0])
        if rank.index == 1:
            raise KeyError("absent")

    error = refusal(strategy)
    require_refusal(error, "the program raised", rank=1, op=1)
    assert isinstance(error.__cause__, KeyError)


def test_a_request_that_cannot_be_met_stays_one_inside_a_program() -> None:
    async def strategy(rank: Rank) -> None:
        rank.share()

    with pytest.raises(UserError, match="do not divide"):
        trace(strategy, 2, 1, 3)


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_refusal_closes_every_program(wrong: int) -> None:
    """Warnings are errors here, so a coroutine that was never awaited would fail this test."""
    closed: list[int] = []

    async def strategy(rank: Rank) -> None:
        try:
            if rank.index == wrong:
                rank.load_weights(9)
            await rank.recv(source=(rank.index + 1) % 3)
        finally:
            closed.append(rank.index)

    assert refusal(strategy, 3).rank == wrong
    gc.collect(1)  # what this test has made, and not what a million objects of other tests leave
    assert sorted(closed) == list(range(wrong + 1)), "those that had started"
    assert gc.isenabled()


def test_errors_while_programs_are_closed_do_not_hide_the_first_error() -> None:
    async def awaits(rank: Rank) -> None:
        try:
            await rank.recv(source=1 - rank.index)
        finally:
            await rank.recv(source=1 - rank.index)

    async def computes(rank: Rank) -> None:
        if rank.index:
            rank.load_weights(9)
        try:
            await rank.recv(source=1)
        finally:
            rank.load_weights(8)

    says(refusal(awaits), "deadlock: rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 0.")
    require_refusal(refusal(computes), "unknown layer", rank=1, op=0)
    gc.collect(1)


# Deadlocks.


def test_both_sides_receiving_first_is_a_cycle() -> None:
    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        value = await rank.recv(source=other, expect=("activations", 0, other))
        await rank.send(value, to=other)

    error = refusal(strategy)
    assert isinstance(error, Deadlock)
    assert error.given == (
        "rank 0 waits in recv of activations[0] of microbatch 1 from rank 1; "
        "rank 1 waits in recv of activations[0] of microbatch 0 from rank 0"
    )


async def crossed(rank: Rank) -> None:
    """Rank 0 waits in a collective for rank 2, that for a message of rank 1, and that for the collective."""
    value = rank.load_weights(0, shard=rank.index, of=3)[0]
    if rank.index == 2:
        value = await rank.recv(source=1)
    await rank.all_gather(value)
    if rank.index == 1:
        await rank.send(value, to=2)


def test_a_deadlock_names_the_whole_cycle() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 3:
            await rank.recv(source=0)
        elif rank.index < 3:
            value = rank.load_weights(0)[0]
            await rank.all_gather(value, axis="tp")
            await rank.recv(source=(rank.index + 1) % 3)

    error = refusal(strategy, 4)
    says(error, "rank 0 waits in recv from rank 1; rank 1 waits in recv from rank 2; rank 2 waits in recv from rank 0")
    says(error, "(1 more rank waits behind them).")
    crossing = refusal(crossed, 3)
    assert crossing.given == (
        "rank 2 waits in recv from rank 1; rank 1 waits in all_gather(weights[0] (shard 1 of 3)) "
        "on world for rank 2 (1 more rank waits behind them)"
    )


def test_a_missing_send_is_reported_with_the_rank_that_has_ended() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index:
            await rank.recv(source=rank.index - 1)

    assert refusal(strategy, 4).given == (
        "rank 1 waits in recv from rank 0; rank 0 has ended without it (2 more ranks wait behind them)"
    )


def test_a_member_that_stays_away_from_a_collective_is_named() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index < 2:
            await rank.all_gather(rank.load_weights(0, shard=rank.index, of=4)[0], axis="dp_shard")

    says(refusal(strategy, Mesh(dp_shard=4)), "all_gather(weights[0] (shard 0 of 4)) on dp_shard for ranks 2, 3")


# Traces of one program are equal.


@given(shapes())
def test_two_traces_are_equal(shape: Shape) -> None:
    first, second = (trace(program_of(shape), shape.mesh, shape.layers, shape.microbatches) for _ in range(2))
    assert first == second


def test_a_strategy_awaited_by_hand_is_refused_with_the_remedy() -> None:
    async def strategy(rank: Rank) -> None:
        await rank.recv(source=1 - rank.index)

    async def main() -> None:
        await asyncio.gather(*map(strategy, World(2, 1, 1).ranks))

    with pytest.raises(RuntimeError, match="RecvHandle of rank 0; only `trace` drives a strategy"):
        asyncio.run(main())

"""Tracing: who is refused, how deadlocks are reported, and that the user's own asyncio gives the same tapes."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given

from shardlab.program import (
    Deadlock,
    Handle,
    Mesh,
    OpKind,
    Program,
    Rank,
    Refused,
    Strategy,
    UserError,
    Value,
    World,
    trace,
)
from shardlab.strategies import STRATEGIES, ddp
from tests.program.tapes import refusal, says
from tests.support.random_programs import Shape, program_of, shapes

# What is no strategy, or no world.


def plain(rank: Rank) -> None:
    rank.load_batch([0])


async def two_arguments(rank: Rank, other: int) -> None:
    rank.load_batch([other])


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (plain, "plain is not a strategy: write it as `async def plain(rank): ...`"),
        (two_arguments, "two_arguments cannot be called with the rank alone: missing a required argument: 'other'"),
        (3, "3 is not a strategy"),
    ],
)
def test_what_is_not_a_strategy_is_one_sentence(strategy: Strategy, said: str) -> None:
    with pytest.raises(UserError) as caught:
        trace(strategy, 2, 1, 1)
    says(caught.value, said)


def test_a_partial_strategy_is_a_strategy() -> None:
    assert trace(functools.partial(two_arguments, other=0), 1, 1, 1).ranks == 1


@pytest.mark.parametrize("count", [0, -3])
@pytest.mark.parametrize("what", ["ranks", "layers", "microbatches"])
def test_counts_below_one_are_refused_by_name(what: str, count: int) -> None:
    counts = {"ranks": 1, "layers": 1, "microbatches": 1} | {what: count}
    with pytest.raises(UserError, match=f"^{count} {what} were asked for; give 1 or more$"):
        trace(ddp, **counts)


# What a program may not do.


async def sleeps(rank: Rank) -> None:
    await asyncio.sleep(0.1)


async def yields(rank: Rank) -> None:
    await asyncio.sleep(0)


async def gathers(rank: Rank) -> None:
    await asyncio.gather(rank.recv(source=1 - rank.index))


@pytest.mark.parametrize("strategy", [sleeps, yields])
def test_only_communications_are_awaited(strategy: Strategy) -> None:
    says(refusal(strategy), "rank 0, op ", "awaited something else than a communication of its own rank")


@pytest.mark.parametrize("strategy", [sleeps, yields, gathers])
def test_only_communications_are_awaited_also_when_a_loop_runs_around_the_trace(strategy: Strategy) -> None:
    async def notebook() -> None:
        says(refusal(strategy), "rank 0, op ", "awaited something else")

    asyncio.run(notebook())


def test_the_handle_of_another_rank_is_not_awaited() -> None:
    handles: dict[int, Handle[Value]] = {}

    async def strategy(rank: Rank) -> None:
        handles[rank.index] = rank.recv(source=(rank.index + 1) % 3)
        if rank.index:
            await handles[0]

    says(refusal(strategy, 3), "rank 1, op 1", "of its own rank")


def test_an_exception_of_the_program_is_a_refusal_with_its_cause() -> None:
    async def strategy(rank: Rank) -> None:
        rank.load_batch([0])
        if rank.index == 1:
            print({}["absent"])

    error = refusal(strategy)
    says(error, "rank 1, op 1 the program raised KeyError: 'absent'")
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
    gc.collect()
    assert sorted(closed) == list(range(wrong + 1)), "those that had started"
    assert gc.isenabled()


def test_what_programs_do_while_they_are_closed_does_not_hide_the_error() -> None:
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
    says(refusal(computes), "rank 1, op 0 load_weight: layer 9")
    gc.collect()


# Deadlocks.


def test_both_sides_receiving_first_is_a_cycle() -> None:
    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        value = await rank.recv(source=other, expect=("activations", 0, other))
        await rank.send(value, to=other)

    error = refusal(strategy)
    assert isinstance(error, Deadlock)
    assert str(error) == (
        "deadlock: rank 0 waits in recv of activations[0] of microbatch 1 from rank 1; "
        "rank 1 waits in recv of activations[0] of microbatch 0 from rank 0."
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
    assert str(crossing) == (
        "deadlock: rank 2 waits in recv from rank 1; rank 1 waits in all_gather(weights[0] (shard 1 of 3)) "
        "on world for rank 2 (1 more rank waits behind them)."
    )


def test_a_missing_send_is_reported_with_the_rank_that_has_ended() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index:
            await rank.recv(source=rank.index - 1)

    assert str(refusal(strategy, 4)) == (
        "deadlock: rank 1 waits in recv from rank 0; rank 0 has ended without it (2 more ranks wait behind them)."
    )


def test_a_member_that_stays_away_from_a_collective_is_named() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index < 2:
            await rank.all_gather(rank.load_weights(0, shard=rank.index, of=4)[0], axis="dp_shard")

    says(refusal(strategy, Mesh(dp_shard=4)), "all_gather(weights[0] (shard 0 of 4)) on dp_shard for ranks 2, 3")


# One trace is like another, whoever drives it.


@given(shapes())
def test_two_traces_are_equal(shape: Shape) -> None:
    first, again = (trace(program_of(shape), shape.mesh, shape.layers, shape.microbatches) for _ in range(2))
    assert first == again


async def by_gather(world: World, strategy: Strategy) -> None:
    await asyncio.gather(*(strategy(rank) for rank in world.ranks))


async def by_gather_backwards(world: World, strategy: Strategy) -> None:
    await asyncio.gather(*(strategy(rank) for rank in reversed(world.ranks)))


async def by_task_group(world: World, strategy: Strategy) -> None:
    async with asyncio.TaskGroup() as group:
        for rank in world.ranks:
            group.create_task(strategy(rank))


Drive = Callable[[World, Strategy], Awaitable[None]]


def driven(strategy: Strategy, ranks: Mesh | int, layers: int, microbatches: int, drive: Drive) -> Program:
    world = World(ranks, layers, microbatches, driver="asyncio")

    async def main() -> Program:
        await drive(world, strategy)
        return world.finish()

    return asyncio.run(main())


@pytest.mark.parametrize("drive", [by_gather, by_gather_backwards, by_task_group])
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_asyncio_gives_the_same_tapes(name: str, drive: Drive) -> None:
    entry = STRATEGIES[name]
    mesh, layers = entry.mesh(entry.ranks), entry.puzzle(entry.ranks)
    assert driven(entry.program, mesh, layers, 4, drive) == trace(entry.program, mesh, layers, 4)


@given(shapes())
def test_asyncio_gives_the_same_tapes_for_any_program(shape: Shape) -> None:
    sizes = shape.mesh, shape.layers, shape.microbatches
    assert driven(program_of(shape), *sizes, by_gather) == trace(program_of(shape), *sizes)


async def one_after_the_other(world: World, strategy: Strategy) -> None:
    for rank in world.ranks:
        await strategy(rank)


async def downwards(rank: Rank) -> None:
    """Each rank hears only from the one before it, so they may run one after the other."""
    if rank.index:
        rank.activations[0] = await rank.recv(source=rank.index - 1)
    else:
        rank.activations[0] = rank.load_batch([0])
    if rank.index < rank.world - 1:
        await rank.send(rank.activations[0], to=rank.index + 1)


def test_plain_sequential_awaits_give_the_same_tapes() -> None:
    assert driven(downwards, 4, 1, 1, one_after_the_other) == trace(downwards, 4, 1, 1)


def test_handles_may_be_awaited_in_any_order_and_together() -> None:
    async def strategy(rank: Rank) -> None:
        handles = [rank.all_gather(rank.load_weights(l, shard=rank.index, of=2)[0]) for l in rank.layers]
        full = await asyncio.gather(*(handles[l] for l in (2, 0, 1)))
        assert [value.spec.layer for value in full] == [2, 0, 1]

    for tape in driven(strategy, 2, 3, 1, by_gather).tapes:
        assert sorted(op.handle for op in tape if op.kind is OpKind.WAIT) == [0, 1, 2]


def test_run_is_refused_in_a_world_that_asyncio_drives() -> None:
    with pytest.raises(UserError, match=r"run\(\) drives the ranks itself"):
        World(1, 1, 1, driver="asyncio").run(downwards)


# What goes wrong under asyncio.


def outcomes(strategy: Strategy, ranks: int, drive: list[int] | None = None) -> list[Any]:
    """What each rank driven by its own task ends with."""
    world = World(ranks, 1, 1, driver="asyncio")

    async def main() -> list[Any]:
        tasks: list[Coroutine[Any, Any, object]] = [strategy(world.ranks[rank]) for rank in drive or range(ranks)]
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)

    return asyncio.run(main())


def test_a_deadlock_is_reported_to_every_rank_in_it() -> None:
    with pytest.raises(Deadlock) as caught:
        trace(crossed, 3, 1, 1)
    for outcome in outcomes(crossed, 3):
        assert isinstance(outcome, Deadlock)
        assert str(outcome) == str(caught.value)


def test_a_ranks_end_is_learnt_from_its_task() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            await rank.send(rank.load_batch([0]), to=1)
        else:
            await rank.recv(source=0)
            await rank.recv(source=0)

    ended, hung = outcomes(strategy, 2)
    assert ended is None
    assert isinstance(hung, Deadlock)
    assert str(hung) == "deadlock: rank 1 waits in recv from rank 0; rank 0 has ended without it."


def test_a_rank_that_is_not_driven_is_called_missing_after_a_second() -> None:
    world = World(3, 1, 1, driver="asyncio")

    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(Deadlock, match=r"rank 1 has not come to it.* Missing: rank 1, 2 started no communication"):
            await world.ranks[0].recv(source=1)
        return loop.time() - start

    assert asyncio.run(main()) > 0.9  # not before its second is over


def test_a_rank_that_starts_late_is_waited_for() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            await asyncio.sleep(0.2)
        await downwards(rank)

    assert outcomes(strategy, 2) == [None, None]


def test_a_rank_that_awaits_something_else_for_ever_is_named() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 0:
            rank.recv(source=1)
            await asyncio.sleep(2)
        else:
            await rank.recv(source=0)

    says(outcomes(strategy, 2)[1], "rank 0 has not come to it", "Rank 0 awaits something else than a communication")


@pytest.mark.parametrize("before", ["nothing", "a helper task"])
def test_when_a_rank_raises_the_others_stop_with_its_name(before: str) -> None:
    async def strategy(rank: Rank) -> None:
        value = rank.load_weights(0, shard=rank.index, of=3)[0]
        if rank.index == 2:
            await asyncio.sleep(0.01)  # so that the others do wait
        handle = rank.all_gather(value)
        await (asyncio.gather(handle) if before == "a helper task" else handle)
        if rank.index == 1:
            raise ValueError("no such luck")
        await rank.recv(source=1)

    first, raised, last = outcomes(strategy, 3)
    assert isinstance(raised, ValueError)
    for outcome in (first, last):
        assert isinstance(outcome, Refused)
        assert str(outcome) == "rank 1 raised ValueError: no such luck; the other ranks stop."


def test_a_refusal_is_raised_where_it_happens_and_stops_the_others() -> None:
    async def strategy(rank: Rank) -> None:
        if rank.index == 1:
            await rank.send(rank.load_batch([0]), to=0)
            rank.load_weights(9)
        else:
            await rank.recv(source=1)
            await rank.recv(source=1)

    other, refused = outcomes(strategy, 2)
    assert (refused.rank, refused.op) == (1, 4)
    says(refused, "rank 1, op 4 load_weight: layer 9")
    says(other, "rank 1 raised Refused: rank 1, op 4 load_weight: layer 9", "the other ranks stop.")


def test_a_cancelled_rank_stops_the_others() -> None:
    world = World(2, 1, 1, driver="asyncio")

    async def main() -> None:
        tasks = [asyncio.create_task(world_rank(rank)) for rank in world.ranks]
        await asyncio.sleep(0)
        tasks[0].cancel()
        _, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(other, Refused)
        assert str(other) == "rank 0 was cancelled; the other ranks stop."

    async def world_rank(rank: Rank) -> None:
        await rank.recv(source=1 - rank.index)

    asyncio.run(main())


def test_one_event_loop_may_follow_another() -> None:
    world = World(2, 1, 1, driver="asyncio")

    async def half(rank: Rank) -> None:
        other = 1 - rank.index
        await rank.exchange(rank.load_batch([0]), to=other, source=other)

    async def main() -> None:
        await asyncio.gather(*map(half, world.ranks))

    asyncio.run(main())
    asyncio.run(main())
    assert [len(tape) for tape in world.finish().tapes] == [14, 14]

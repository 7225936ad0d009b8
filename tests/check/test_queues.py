"""What NCCL's queues let pass: with `device_id` a rank's communication is one queue, without it every two ranks' is."""

from __future__ import annotations

import re

import pytest

from shardlab.check import ChannelModel, Checked, check
from shardlab.language import Rank, Strategy, Value, trace
from tests.check.programs import finish, one_layer_gradient
from tests.support.interpreter import judge

QUEUED_PER_PAIR, QUEUED = ChannelModel.QUEUED_PER_PAIR, ChannelModel.QUEUED


def checked(strategy: Strategy, ranks: int) -> Checked:
    program = trace(strategy, ranks, 1, ranks)
    assert judge(program).right
    result = check(program)
    assert result.why_not("gloo") is None
    return result


def refusal(result: Checked, model: ChannelModel) -> str:
    deadlock = result.models[model]
    assert deadlock is not None
    return re.sub(r" of grad_weights\[0\] of microbatch \d| \(its op \d+\)", "", deadlock)


async def update(rank: Rank, mine: Value) -> None:
    rank.weights[0], rank.opt_states[0] = rank.update(
        0, await rank.all_reduce(mine), rank.weights[0], rank.opt_states[0]
    )


def circle(*, met_before: bool, in_one_order: bool) -> Strategy:
    """Three ranks tell each other their gradients: each sends to the next one, then receives from the one before.

    Those who have met before have told each other so once, one after the other.
    """

    async def program(rank: Rank) -> None:
        mine = await one_layer_gradient(rank, [rank.index])
        after, before = (rank.index + 1) % 3, (rank.index - 1) % 3
        expect = ("grad_weights", 0, before)
        if met_before and rank.index:
            await rank.recv(source=before, expect=expect)
        if met_before:
            await rank.send(mine, to=after)
        if met_before and rank.index == 0:
            await rank.recv(source=before, expect=expect)
        if in_one_order and rank.index:
            await rank.recv(source=before, expect=expect)
            await rank.send(mine, to=after)
        else:
            told = rank.send(mine, to=after)
            await rank.recv(source=before, expect=expect)
            await told
        await update(rank, mine)

    return program


def test_three_messages_in_a_circle_pass_only_where_every_two_ranks_have_a_queue() -> None:
    result = checked(circle(met_before=True, in_one_order=False), 3)
    assert result.backends() == ["gloo"]
    assert result.models[QUEUED_PER_PAIR] is None
    assert refusal(result, QUEUED).startswith(
        "deadlock: rank 0 waits in recv from rank 2, which is queued behind rank 0's send to rank 1, which is queued "
        "behind rank 1's send to rank 2, which is queued behind rank 2's send to rank 0; rank 1 waits in "
    )
    why_not = str(result.why_not("nccl"))
    assert why_not.startswith("on nccl this program can hang: deadlock: rank 0 waits in recv from rank 2")
    assert why_not.endswith(
        ". It passes only where communicators work side by side; NCCL does not promise that, and with device_id, which "
        "ranks start with, all messages share one. Issue in one order on all ranks, or put messages that cross into "
        "one exchange."
    )


def test_ranks_that_meet_for_the_first_time_in_a_circle_hang_in_both_modes() -> None:
    """Without `device_id` each waits for the other to make their communicator, whatever it has still to issue."""
    result = checked(circle(met_before=False, in_one_order=False), 3)
    assert result.backends() == ["gloo"]
    assert refusal(result, QUEUED_PER_PAIR) == (
        "deadlock: rank 0 waits in send to rank 1, the first use of its communicator, which waits for rank 1; "
        "rank 1 waits in send to rank 2, the first use of its communicator, which waits for rank 2; "
        "rank 2 waits in send to rank 0, the first use of its communicator, which waits for rank 0."
    )
    assert "side by side" not in refusal(result, QUEUED)


@pytest.mark.parametrize("met_before", [False, True])
def test_a_circle_that_one_rank_opens_passes(met_before: bool) -> None:
    assert checked(circle(met_before=met_before, in_one_order=True), 3).backends() == ["gloo", "nccl"]


async def pairs_met_in_another_order(rank: Rank) -> None:
    """0 goes to 1 then 2, 1 to 2 then 0, 2 to 0 then 1; nobody sends what it has not received first but 0."""
    mine = await one_layer_gradient(rank, [rank.index])
    if rank.index == 0:
        told = [rank.send(mine, to=1), rank.send(mine, to=2)]
        for each in told:
            await each
    elif rank.index == 1:
        await rank.recv(source=2, expect=("grad_weights", 0, 2))
        await rank.recv(source=0, expect=("grad_weights", 0, 0))
    else:
        await rank.recv(source=0, expect=("grad_weights", 0, 0))
        await rank.send(mine, to=1)
    await update(rank, mine)


def test_pairs_that_are_met_in_another_order_hang_in_both_modes() -> None:
    result = checked(pairs_met_in_another_order, 3)
    assert result.backends() == ["gloo"]
    assert refusal(result, QUEUED) == (
        "deadlock: rank 1 waits in recv from rank 2; rank 2 waits in recv from rank 0, which is queued behind rank 0's "
        "send to rank 1, which waits for rank 1's recv from rank 0 (1 more rank waits behind them)."
    )
    assert refusal(result, QUEUED_PER_PAIR) == (
        "deadlock: rank 0 waits in send to rank 1, the first use of its communicator, which waits for rank 1; "
        "rank 1 waits in recv from rank 2, the first use of its communicator, which waits for rank 2; "
        "rank 2 waits in recv from rank 0, the first use of its communicator, which waits for rank 0."
    )


def message_and_collective(*, crossed: bool, met_before: bool) -> Strategy:
    """Rank 0 sends, then sums up; rank 1 receives and sums up in this order or the other."""

    async def program(rank: Rank) -> None:
        mine = await one_layer_gradient(rank, [rank.index])
        if met_before:
            await (rank.recv(source=0, expect=("grad_weights", 0, 0)) if rank.index else rank.send(mine, to=1))
            await rank.barrier()
        if rank.index == 0:
            told = rank.send(mine, to=1)
            total = rank.all_reduce(mine)
        elif crossed:
            total = rank.all_reduce(mine)
            told = rank.recv(source=0, expect=("grad_weights", 0, 0))
        else:
            told = rank.recv(source=0, expect=("grad_weights", 0, 0))
            total = rank.all_reduce(mine)
        await told
        rank.weights[0], rank.opt_states[0] = rank.update(0, await total, rank.weights[0], rank.opt_states[0])

    return program


@pytest.mark.parametrize("met_before", [False, True])
def test_a_message_and_a_collective_that_cross_are_refused_on_nccl_alone(met_before: bool) -> None:
    result = checked(message_and_collective(crossed=True, met_before=met_before), 2)
    assert result.backends() == ["gloo"]
    assert refusal(result, QUEUED).startswith(
        "deadlock: rank 0 waits in send to rank 1, which is queued behind rank 1's all_reduce(layer 0) on world, which "
        "is queued behind rank 0's send to rank 1; rank 1 waits in recv from rank 0, which is queued behind"
    )
    if met_before:
        assert result.models[QUEUED_PER_PAIR] is None
    else:
        assert refusal(result, QUEUED_PER_PAIR) == (
            "deadlock: rank 0 waits in send to rank 1, the first use of its communicator, which waits for rank 1; rank "
            "1 waits in all_reduce(layer 0) on world, the first use of its communicator, which waits for rank 0."
        )


@pytest.mark.parametrize("met_before", [False, True])
def test_a_message_and_a_collective_in_one_order_pass(met_before: bool) -> None:
    result = checked(message_and_collective(crossed=False, met_before=met_before), 2)
    assert result.backends() == ["gloo", "nccl"]


async def exchange_meets_single_calls(rank: Rank) -> None:
    mine, peer = await one_layer_gradient(rank, [rank.index]), 1 - rank.index
    expect = ("grad_weights", 0, peer)
    if rank.index == 0:
        other = await rank.exchange(mine, to=1, source=1, expect=expect)
    else:
        told = rank.send(mine, to=0)
        other = await rank.recv(source=0, expect=expect)
        await told
    finish(rank, other)


def test_an_exchange_and_single_calls_meet_only_in_one_queue() -> None:
    result = checked(exchange_meets_single_calls, 2)
    assert result.backends() == ["gloo", "nccl"]
    assert refusal(result, QUEUED_PER_PAIR) == (
        "deadlock: rank 1 waits in send to rank 0; rank 0 waits in recv from rank 1: one is part of an exchange and "
        "the other is not, so they never meet."
    )

"""Deadlocks under the five channel models, and messages that reach the intended receive."""

from __future__ import annotations

import re

import pytest

from shardlab.check import BACKENDS, ChannelModel, Checked, check
from shardlab.language import Deadlock, Handle, Mesh, Op, OpKind, Program, Rank, Refused, Strategy, Value, trace
from shardlab.strategies import STRATEGIES
from tests.check.programs import (
    built_in,
    exchanged,
    finish,
    fits,
    gradients_swapped,
    layers_for,
    one_layer_gradient,
    two_microbatches_ahead,
)
from tests.support.interpreter import judge
from tests.support.mutations import with_tape
from tests.support.refusing import refuses
from tests.support.thorough import sampled

BUFFERED, IN_ORDER, RENDEZVOUS, QUEUED_PER_PAIR, QUEUED = ChannelModel

REMEDY = (
    " Let every op come on all of its ranks, and in one order: look for an `if`, a loop or an early return that "
    "differs between these ranks."
)
RECEIVES_REMEDY = " Let one of them send first, or let each send and receive at once with rank.exchange."
"""How every deadlock's message ends."""


def passed_models(program: Program) -> list[ChannelModel]:
    return [model for model, deadlock in check(program).models.items() if deadlock is None]


@pytest.mark.parametrize(
    ("order", "models", "backends"),
    [
        ("send first", [BUFFERED, IN_ORDER], []),
        ("send un-awaited", [BUFFERED, IN_ORDER, RENDEZVOUS], ["gloo"]),
        ("exchange", list(ChannelModel), ["gloo", "nccl"]),
        ("one sends first", list(ChannelModel), ["gloo", "nccl"]),
    ],
)
def test_two_ranks_that_tell_each_other_something(order: str, models: list[ChannelModel], backends: list[str]) -> None:
    program = trace(exchanged(order), 2, 1, 2)
    assert judge(program).right
    assert passed_models(program) == models
    assert check(program).backends() == backends


@pytest.mark.parametrize("model", [RENDEZVOUS, QUEUED_PER_PAIR, QUEUED])
def test_head_to_head_blocking_sends_name_the_whole_cycle(model: ChannelModel) -> None:
    deadlock = check(trace(exchanged("send first"), 2, 1, 2)).models[model]
    assert deadlock is not None
    assert re.fullmatch(
        r"deadlock: rank 0 waits in send to rank 1 \(its op \d+\); rank 1 waits in send to rank 0 \(its op \d+\)\.",
        re.sub(r", which is queued behind rank \d's send to rank \d \(its op \d+\)", "", deadlock),
    )


def test_two_ranks_that_both_receive_first_are_a_deadlock_while_tracing() -> None:
    with pytest.raises(Deadlock) as deadlock:
        trace(exchanged("receive first"), 2, 1, 2)
    assert str(deadlock.value) == (
        "deadlock: rank 0 waits in recv of grad_weights[0] of microbatch 1 from rank 1; "
        "rank 1 waits in recv of grad_weights[0] of microbatch 0 from rank 0."
        f"{RECEIVES_REMEDY}"
    )


def receives_first(tape: list[Op]) -> list[Op]:
    """The receive and its wait come before the send."""
    recv = next(op for op in tape if op.kind is OpKind.RECV)
    wait = next(op for op in tape if op.kind is OpKind.WAIT and op.handle == recv.handle)
    rest = [op for op in tape if op not in (recv, wait)]
    send = next(at for at, op in enumerate(rest) if op.kind is OpKind.SEND)
    return [*rest[:send], recv, wait, *rest[send:]]


def test_two_tapes_that_both_receive_first_are_a_deadlock_in_the_check() -> None:
    program = trace(exchanged("send first"), 2, 1, 2)
    one = with_tape(program, 1, receives_first(program.tapes[1]))
    assert check(one).backends() == ["gloo", "nccl"]
    with pytest.raises(Deadlock) as deadlock:
        check(with_tape(one, 0, receives_first(program.tapes[0])))
    assert str(deadlock.value) == (
        "deadlock: rank 0 waits in recv from rank 1 of grad_weights[0] of microbatch 1; "
        "rank 1 waits in recv from rank 0 of grad_weights[0] of microbatch 0."
        f"{RECEIVES_REMEDY}"
    )


@pytest.mark.parametrize("ranks", [3, 5])
def test_a_ring_of_receives_names_every_rank_of_the_cycle(ranks: int) -> None:
    async def ring(rank: Rank) -> None:
        rank.weights[0], _ = rank.load_weights(0)
        await rank.recv(source=(rank.index + 1) % rank.world)
        await rank.send(rank.weights[0], to=(rank.index - 1) % rank.world)

    with pytest.raises(Deadlock) as deadlock:
        trace(ring, ranks, 1, 1)
    waits = [f"rank {rank} waits in recv from rank {(rank + 1) % ranks}" for rank in range(ranks)]
    assert str(deadlock.value) == f"deadlock: {'; '.join(waits)}.{RECEIVES_REMEDY}"


def test_a_collective_and_a_receive_that_wait_for_each_other_name_both() -> None:
    async def program(rank: Rank) -> None:
        rank.weights[0], _ = rank.load_weights(0, rank.index, 2)
        if rank.index == 0:
            await rank.all_gather(rank.weights[0])
            await rank.send(rank.weights[0], to=1)
        else:
            await rank.recv(source=0)
            await rank.all_gather(rank.weights[0])

    with pytest.raises(Deadlock) as deadlock:
        trace(program, 2, 1, 1)
    assert str(deadlock.value) == (
        "deadlock: rank 0 waits in all_gather(weights[0] (shard 0 of 2)) on world for rank 1; "
        "rank 1 waits in recv from rank 0."
        f"{REMEDY}"
    )


# 1F1B.


def one_f_one_b(*, crossing: bool) -> Strategy:
    """The textbook's schedule (Narayanan et al. 2019): sends un-awaited, receives blocking, or both in one exchange."""

    async def program(rank: Rank) -> None:
        l, count = rank.index, len(rank.microbatches)
        first, last = l == 0, l == rank.world - 1
        warmup = min(rank.world - l - 1, count)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        receives: dict[str, Handle[Value]] = {}

        async def forward(m: int) -> None:
            if first:
                rank.activations[l, m] = rank.load_batch([m])
            elif "activation" in receives:
                rank.activations[l, m] = await receives.pop("activation")
            else:
                rank.activations[l, m] = await rank.recv(source=l - 1, expect=("activations", l, m))
            output = rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
            if last:
                return
            if crossing and m >= warmup:
                expect = ("grad_activations", l + 1, m - warmup)
                receives["gradient"] = rank.exchange(output, to=l + 1, source=l + 1, expect=expect)
            else:
                rank.send(output, to=l + 1)
            del rank.activations[l + 1, m]  # waits for the send if it is still under way
            if "gradient" in receives:
                rank.grad_activations[l + 1, m - warmup] = await receives.pop("gradient")

        async def backward(m: int) -> None:
            if last:
                rank.grad_activations[l + 1, m] = rank.loss(rank.activations.pop((l + 1, m)))
            elif (l + 1, m) not in rank.grad_activations:
                expect = ("grad_activations", l + 1, m)
                rank.grad_activations[l + 1, m] = await rank.recv(source=l + 1, expect=expect)
            gradient = rank.grad_activations.pop((l + 1, m))
            grad_weight, down = rank.backward(l, rank.activations.pop((l, m)), gradient, rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if m else grad_weight
            if first:
                return
            rank.grad_activations[l, m] = down
            ahead = m + warmup + 1
            if crossing and ahead < count:
                receives["activation"] = rank.exchange(down, to=l - 1, source=l - 1, expect=("activations", l, ahead))
            else:
                rank.send(down, to=l - 1)

        for m in range(warmup):
            await forward(m)
        for m in range(count - warmup):
            await forward(warmup + m)
            await backward(m)
        for m in range(count - warmup, count):
            await backward(m)
        total = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

    return program


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [4, 6])
def test_1f1b_with_exchanges_passes_every_model(ranks: int, microbatches: int) -> None:
    program = trace(one_f_one_b(crossing=True), Mesh(pp=ranks), ranks, microbatches)
    assert judge(program).right
    assert passed_models(program) == list(ChannelModel)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_textbook_1f1b_hangs_in_queues_alone_and_the_cycle_names_the_queued_ops(ranks: int) -> None:
    program = trace(one_f_one_b(crossing=False), Mesh(pp=ranks), ranks, 4)
    assert judge(program).right
    assert passed_models(program) == [BUFFERED, IN_ORDER, RENDEZVOUS]
    deadlock = check(program).models[QUEUED_PER_PAIR]
    assert deadlock is not None
    match = re.match(
        r"deadlock: rank (\d) waits in send to rank (\d) \(its op \d+\), which is queued behind rank \2's send to "
        r"rank \1 \(its op \d+\), which waits for rank \1's recv from rank \2 of grad_activations\[\d\] of microbatch",
        deadlock,
    )
    assert match, deadlock


# Messages and names.


def test_swapped_sends_are_refused_by_name() -> None:
    """The numbers would be wrong; nothing would hang."""
    assert passed_models(gradients_swapped(swapped=False)) == [BUFFERED, IN_ORDER]
    mutant = gradients_swapped(swapped=True)
    assert not judge(mutant).right
    with pytest.raises(Refused) as refused:
        check(mutant)
    assert not isinstance(refused.value, Deadlock)
    assert str(refused.value) == (
        "rank 1, op 2 recv from rank 0: expected activations[1] of microbatch 0, but the next message on this channel "
        "is activations[1] of microbatch 1; messages between two ranks arrive in the order they were sent. Make rank "
        "0's sends and this rank's receives agree."
    )


def test_a_message_of_another_layer_or_kind_is_refused_by_name() -> None:
    program = trace(two_microbatches_ahead, 2, 2, 2)
    tape = list(program.tapes[1])
    recv = next(at for at, op in enumerate(tape) if op.kind is OpKind.RECV)
    expect = tape[recv].expect
    assert expect is not None
    tape[recv] = tape[recv]._replace(layer=0, expect=expect._replace(layer=0))
    with refuses("other message", layer=0):
        check(with_tape(program, 1, tape))


# Models.


RANKS_AND_TIMES = [(1, 1), (1, 4), (2, 3), (3, 2), (4, 4), (6, 1), (8, 2)]
"""Ranks, and microbatches for each."""


@pytest.mark.parametrize(
    ("name", "size"),
    sampled(
        [(name, size) for name in STRATEGIES for size in RANKS_AND_TIMES if fits(name, size[0])],
        lambda case: case[1] in ((1, 4), (2, 3), (3, 2)) or (case[1] == (8, 2) and not fits(case[0], 2)),
    ),
)
def test_built_in_strategies_pass_every_model(name: str, size: tuple[int, int]) -> None:
    ranks, times = size
    assert passed_models(built_in(name, ranks, layers_for(name, ranks), times * ranks)) == list(ChannelModel)


def test_the_backends_follow_from_the_models() -> None:
    for order in ("send first", "send un-awaited", "exchange"):
        checked = check(trace(exchanged(order), 2, 1, 2))
        assert checked.backends() == [name for name, model in BACKENDS.items() if checked.models[model] is None]
    assert BACKENDS == {"gloo": RENDEZVOUS, "nccl": QUEUED}


# A large pipeline.


async def one_message_too_many(rank: Rank) -> None:
    """A forward pipeline whose last rank waits for one more activation than is ever sent."""
    l, last = rank.index, rank.world - 1
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        if l:
            rank.activations[l] = await rank.recv(source=l - 1, expect=("activations", l, m))
        else:
            rank.activations[0] = rank.load_batch([m])
        output = rank.forward(l, rank.activations[l], rank.weights[l])
        if l < last:
            await rank.send(output, to=l + 1)
    if l == last:
        await rank.recv(source=l - 1, expect=("activations", l, 0))


def test_a_message_too_many_in_a_pipeline_of_64_ranks_and_256_microbatches_is_reported() -> None:
    with pytest.raises(Deadlock) as deadlock:
        trace(one_message_too_many, Mesh(pp=64), 64, 256)
    assert str(deadlock.value) == (
        "deadlock: rank 63 waits in recv of activations[63] of microbatch 0 from rank 62; rank 62 has ended without it."
        f"{REMEDY}"
    )


def test_a_message_too_many_on_the_tapes_of_64_ranks_is_reported_by_the_check() -> None:
    program = built_in("gpipe", 64, 64, 32)
    recv = next(op for op in program.tapes[63] if op.kind is OpKind.RECV)
    extra_ops = [recv._replace(handle=10**6, outputs=(10**6,)), Op(OpKind.WAIT, -1, handle=10**6)]
    with pytest.raises(Deadlock) as deadlock:
        check(with_tape(program, 63, [*program.tapes[63], *extra_ops]))
    assert str(deadlock.value) == (
        "deadlock: rank 63 waits in recv from rank 62 of activations[63] of microbatch 0; rank 62 has ended without it."
        f"{REMEDY}"
    )


# Programs that NCCL's queues accept: with `device_id` a rank has one queue, without it every two ranks have one.


QUEUES_QUEUED_PER_PAIR, QUEUES_QUEUED = ChannelModel.QUEUED_PER_PAIR, ChannelModel.QUEUED


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
        next_rank, previous_rank = (rank.index + 1) % 3, (rank.index - 1) % 3
        expect = ("grad_weights", 0, previous_rank)
        if met_before and rank.index:
            await rank.recv(source=previous_rank, expect=expect)
        if met_before:
            await rank.send(mine, to=next_rank)
        if met_before and rank.index == 0:
            await rank.recv(source=previous_rank, expect=expect)
        if in_one_order and rank.index:
            await rank.recv(source=previous_rank, expect=expect)
            await rank.send(mine, to=next_rank)
        else:
            pending = rank.send(mine, to=next_rank)
            await rank.recv(source=previous_rank, expect=expect)
            await pending
        await update(rank, mine)

    return program


def test_three_messages_in_a_circle_pass_only_where_every_two_ranks_have_a_queue() -> None:
    result = checked(circle(met_before=True, in_one_order=False), 3)
    assert result.backends() == ["gloo"]
    assert result.models[QUEUES_QUEUED_PER_PAIR] is None
    assert refusal(result, QUEUES_QUEUED).startswith(
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
    assert refusal(result, QUEUES_QUEUED_PER_PAIR) == (
        "deadlock: rank 0 waits in send to rank 1, the first use of its communicator, which waits for rank 1; "
        "rank 1 waits in send to rank 2, the first use of its communicator, which waits for rank 2; "
        "rank 2 waits in send to rank 0, the first use of its communicator, which waits for rank 0."
    )
    assert "side by side" not in refusal(result, QUEUES_QUEUED)


@pytest.mark.parametrize("met_before", [False, True])
def test_a_circle_that_one_rank_opens_passes(met_before: bool) -> None:
    assert checked(circle(met_before=met_before, in_one_order=True), 3).backends() == ["gloo", "nccl"]


async def pairs_met_in_another_order(rank: Rank) -> None:
    """0 goes to 1 then 2, 1 to 2 then 0, 2 to 0 then 1; nobody sends what it has not received first but 0."""
    mine = await one_layer_gradient(rank, [rank.index])
    if rank.index == 0:
        pending = [rank.send(mine, to=1), rank.send(mine, to=2)]
        for handle in pending:
            await handle
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
    assert refusal(result, QUEUES_QUEUED) == (
        "deadlock: rank 1 waits in recv from rank 2; rank 2 waits in recv from rank 0, which is queued behind rank 0's "
        "send to rank 1, which waits for rank 1's recv from rank 0 (1 more rank waits behind them)."
    )
    assert refusal(result, QUEUES_QUEUED_PER_PAIR) == (
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
            pending = rank.send(mine, to=1)
            total = rank.all_reduce(mine)
        elif crossed:
            total = rank.all_reduce(mine)
            pending = rank.recv(source=0, expect=("grad_weights", 0, 0))
        else:
            pending = rank.recv(source=0, expect=("grad_weights", 0, 0))
            total = rank.all_reduce(mine)
        await pending
        rank.weights[0], rank.opt_states[0] = rank.update(0, await total, rank.weights[0], rank.opt_states[0])

    return program


@pytest.mark.parametrize("met_before", [False, True])
def test_a_message_and_a_collective_that_cross_are_refused_on_nccl_alone(met_before: bool) -> None:
    result = checked(message_and_collective(crossed=True, met_before=met_before), 2)
    assert result.backends() == ["gloo"]
    assert refusal(result, QUEUES_QUEUED).startswith(
        "deadlock: rank 0 waits in send to rank 1, which is queued behind rank 1's all_reduce(layer 0) on world, which "
        "is queued behind rank 0's send to rank 1; rank 1 waits in recv from rank 0, which is queued behind"
    )
    if met_before:
        assert result.models[QUEUES_QUEUED_PER_PAIR] is None
    else:
        assert refusal(result, QUEUES_QUEUED_PER_PAIR) == (
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
        pending = rank.send(mine, to=0)
        other = await rank.recv(source=0, expect=expect)
        await pending
    finish(rank, other)


def test_an_exchange_and_single_calls_meet_only_in_one_queue() -> None:
    result = checked(exchange_meets_single_calls, 2)
    assert result.backends() == ["gloo", "nccl"]
    assert refusal(result, QUEUES_QUEUED_PER_PAIR) == (
        "deadlock: rank 1 waits in send to rank 0; rank 0 waits in recv from rank 1: one is part of an exchange and "
        "the other is not, so they never meet."
    )

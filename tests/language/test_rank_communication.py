"""Messages that are issued together: what stands on the tape, what is waited for, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardlab.check import ChannelModel, check
from shardlab.language import OpKind, Program, Rank, Refused, Strategy, trace
from tests.support.channel_judge import hangs
from tests.support.interpreter import judge
from tests.support.refusing import Told, tells, told


def swap(between: Callable[[Rank], object] = lambda rank: None) -> Strategy:
    """Two ranks exchange their gradients twice over in one batch, and sum them."""

    async def strategy(rank: Rank) -> None:
        other = 1 - rank.index
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        rank.grad_weights[0], _ = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])
        with rank.batch_p2p():
            rank.send(rank.grad_weights[0], to=other)
            first = rank.recv(source=other)
            rank.send(rank.grad_weights[0], to=other)
            between(rank)
            second = rank.recv(source=other)
        await second
        total = rank.grad_weights[0] + await first
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    return strategy


def test_awaiting_one_of_a_batch_waits_for_all_in_their_order() -> None:
    program = trace(swap(), 2, 1, 2)
    messages = [op for op in program.tapes[0] if op.kind in (OpKind.SEND, OpKind.RECV, OpKind.WAIT)]
    assert [op.batch for op in messages] == [0, 0, 0, 0, -1, -1, -1, -1]
    assert [op.handle for op in messages[4:]] == [0, 1, 2, 3]
    assert check(program).backends() == ["gloo", "nccl"]
    assert judge(program).right


def test_what_else_is_done_in_the_block_comes_before_the_messages() -> None:
    program = trace(swap(lambda rank: rank.slice(rank.weights[0], 0, 2)), 2, 1, 2)
    kinds = [op.kind for op in program.tapes[0]]
    assert kinds[kinds.index(OpKind.SLICE) :][:5] == [OpKind.SLICE, *[OpKind.SEND, OpKind.RECV] * 2]
    assert judge(program).right


def swallow(rank: Rank) -> None:
    """Let go of what is being sent."""
    del rank.grad_weights[0]


REFUSED: list[tuple[Callable[[Rank], object], Told]] = [
    (swallow, told("batch of messages")),
    (lambda rank: rank.all_reduce(rank.grad_weights[0]), told("batch of messages")),
    (lambda rank: rank.batch_p2p().__enter__(), told("batch of messages")),
    (lambda rank: rank.exchange(rank.weights[0], to=1, source=1), told("batch of messages")),
]


@pytest.mark.parametrize(("between", "words"), REFUSED)
def test_a_batch_has_sends_and_receives_alone(between: Callable[[Rank], object], words: Told) -> None:
    with pytest.raises(Refused) as refusal:
        trace(swap(between), 2, 1, 2)
    tells(refusal.value, words)


def waits_for_one_half() -> Program:
    """Rank 0 waits for the receive of its batch, then meets rank 2, which only then takes the batch's other message.

    With queues the receive does not end before the whole batch does, and that hangs.
    """

    async def strategy(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        grad = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
        made = rank.grad_weights[0] = rank.backward(0, rank.activations.pop(0), grad, rank.weights[0])[0]
        if rank.index == 0:
            with rank.batch_p2p():
                rank.send(made, to=2)
                came = rank.recv(source=1)
            await came
        if rank.index == 1:
            with rank.batch_p2p():
                rank.send(made, to=0)
        if rank.index != 1:
            await rank.all_reduce(rank.weights[0], among=[0, 2], reduction="mean")
        if rank.index == 2:
            with rank.batch_p2p():
                received = rank.recv(source=0)
            await received
        total = await rank.all_reduce(made)
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    program = trace(strategy, 3, 1, 3)
    tape = program.tapes[0]
    send = next(op for op in tape if op.kind is OpKind.SEND)
    wait = next(at for at, op in enumerate(tape) if op.kind is OpKind.WAIT and op.handle == send.handle)
    tape.insert(len(tape) - 1, tape.pop(wait))  # a file's tape may wait for one of a batch alone
    frees = [at for at, op in enumerate(tape) if op.kind is OpKind.FREE and op.inputs == send.inputs]
    for at in frees:
        tape.insert(len(tape), tape.pop(at))
    return program


def test_nccl_waits_for_a_whole_batch_whichever_handle_is_meant() -> None:
    program = waits_for_one_half()
    models = check(program).models
    assert models[ChannelModel.RENDEZVOUS] is None
    for model in (ChannelModel.QUEUED_PER_PAIR, ChannelModel.QUEUED):
        assert models[model] is not None
        assert all(hangs(program, model, seed) for seed in range(5))
    assert not hangs(program, ChannelModel.RENDEZVOUS, 0)

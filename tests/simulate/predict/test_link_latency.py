"""Links that have latency only: messages take no stream, and any number of them travel at once."""

from __future__ import annotations

import pytest

from shardlab.language import OpKind, Rank, Strategy
from shardlab.simulate.timeline import Costs
from shardlab.strategies import STRATEGIES
from tests.simulate.timeline.runs import event, events, run

COSTS = Costs(forward=1, backward_input=1, backward_weight=1, update=0, send=5, recv=0, link_latency=True)


async def sends_all_forward(rank: Rank) -> None:
    """Two ranks; the first starts to send each microbatch as soon as it is through, and awaits each at once."""
    await _two_stages(rank, awaits=True)


async def sends_and_goes_on(rank: Rank) -> None:
    """Two ranks; the first starts to send each microbatch as soon as it is through, and awaits none."""
    await _two_stages(rank, awaits=False)


async def _two_stages(rank: Rank, awaits: bool) -> None:
    l = rank.index
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        if l == 0:
            rank.activations[0, m] = rank.load_batch([m])
        else:
            rank.activations[1, m] = await rank.recv(source=0, expect=("activations", 1, m))
        out = rank.forward(l, rank.activations[l, m], rank.weights[l])
        if l == 0:
            sent = rank.send(out, to=1)
            if awaits:
                await sent
        else:
            rank.grad_activations[2, m] = rank.loss(out)
    for m in rank.microbatches:
        if l == 0:
            rank.grad_activations[1, m] = await rank.recv(source=1, expect=("grad_activations", 1, m))
        weight, below = rank.backward(
            l, rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m)), rank.weights[l]
        )
        rank.grad_weights[l] = rank.grad_weights[l] + weight if m else weight
        if l == 1:
            await rank.send(below, to=0)
    rank.weights[l], rank.opt_states[l] = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])


@pytest.mark.parametrize("program", [sends_all_forward, sends_and_goes_on])
def test_a_message_arrives_its_latency_after_it_was_issued_however_many_travel(program: Strategy) -> None:
    timeline = run(program, 2, 2, 3, COSTS)
    assert [(e.start, e.end) for e in events(timeline, OpKind.SEND, 0)] == [(1, 6), (2, 7), (3, 8)]
    assert [e.start for e in events(timeline, OpKind.FORWARD, 0)] == [0, 1, 2]
    assert [(e.start, e.end) for e in events(timeline, OpKind.RECV, 1)] == [(6, 6), (7, 7), (8, 8)]
    assert [e.start for e in events(timeline, OpKind.FORWARD, 1)] == [6, 7, 8]


def test_a_receive_of_its_own_length_starts_when_the_message_arrives() -> None:
    costs = Costs(forward=1, update=0, send=5, recv=2, link_latency=True)
    entry = STRATEGIES["pipeline"]
    timeline = run(entry.program, entry.mesh(2), 2, 1, costs)
    (received,) = events(timeline, OpKind.RECV, 1)
    assert (received.start, received.end) == (6, 8)
    assert event(timeline, OpKind.FORWARD, 1, rank=1).start == 8


def test_collectives_still_take_the_streams() -> None:
    costs = Costs(collective=3, link_latency=True)
    assert run(STRATEGIES["fsdp"].program, 2, 2, 2, costs).events == (
        run(STRATEGIES["fsdp"].program, 2, 2, 2, Costs(collective=3)).events
    )

"""Random programs that mostly talk: messages, exchanges and collectives of any ranks, in orders that often cross."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from shardlab.language import Deadlock, Handle, Program, Rank, trace

Call = Callable[[Rank], Handle[object]]


def send(to: int) -> Call:
    return lambda rank: rank.send(rank.weights[0], to=to)


def recv(source: int) -> Call:
    return lambda rank: rank.recv(source=source)


def exchange(to: int, source: int) -> Call:
    return lambda rank: rank.exchange(rank.weights[0], to=to, source=source)


def batch(others: list[int]) -> Call:
    """A message to and from each of some ranks, all together; the handle of the last."""

    def call(rank: Rank) -> Handle[object]:
        last: Handle[object] | None = None
        with rank.batch_p2p():
            for other in others:
                rank.send(rank.weights[0], to=other)
                last = rank.recv(source=other)
        assert last is not None
        return last

    return call


def mean(members: list[int]) -> Call:
    return lambda rank: rank.all_reduce(rank.weights[0], reduction="mean", among=members)


def chatter(seed: int) -> Program | None:
    """Data parallelism of one layer on 2-4 ranks that first talk; None if not even buffered sends end it.

    Calls are drawn in one order of all ranks. Then each rank issues some of its own later or earlier, and awaits each
    one now or some time later.
    """
    random = Random(seed)
    ranks = random.randint(2, 4)
    calls: list[list[Call]] = [[] for _ in range(ranks)]
    for _ in range(random.randint(1, 8)):
        for rank, some in drawn(random, ranks):
            calls[rank] += some
    for mine in calls:
        for at in range(len(mine) - 1):
            if random.random() < 0.15:
                mine[at], mine[at + 1] = mine[at + 1], mine[at]
    patience = random.choice([0.2, 0.5, 0.8])

    async def program(rank: Rank) -> None:
        rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
        rank.activations[0] = rank.load_batch([rank.index])
        rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
        made, _ = rank.backward(0, rank.activations[0], rank.loss(rank.activations[1]), rank.weights[0])
        rank.grad_weights[0] = made
        choice = Random(seed * 100 + rank.index)
        loose: list[Handle[Any]] = []
        for call in calls[rank.index]:
            loose.append(call(rank))
            while loose and choice.random() > patience:
                await loose.pop(choice.randrange(len(loose)))
        for handle in loose:
            await handle
        total = await rank.all_reduce(rank.grad_weights.pop(0))
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])

    try:
        return trace(program, ranks, 1, ranks)
    except Deadlock:
        return None


def drawn(random: Random, ranks: int) -> list[tuple[int, list[Call]]]:
    """What some ranks do together: a message, a crossing, a ring of exchanges or a collective."""
    a, b = random.sample(range(ranks), 2)
    kind = random.choice(["message", "message", "message", "crossing", "ring", "collective", "all pairs"])
    if kind == "message":
        return [(a, [send(b)]), (b, [recv(a)])]
    if kind == "crossing":
        apart = random.random() < 0.3
        return [(a, [exchange(b, b)]), (b, [send(a), recv(a)] if apart else [exchange(a, a)])]
    members = sorted(random.sample(range(ranks), random.randint(2, ranks)))
    if kind == "collective":
        return [(rank, [mean(members)]) for rank in members]
    if kind == "all pairs":
        return [(rank, [batch([other for other in members if other != rank])]) for rank in members]
    ring = [(members[i - 1], members[i], members[(i + 1) % len(members)]) for i in range(len(members))]
    return [(here, [exchange(after, before)]) for before, here, after in ring]

"""Data parallel programs that each sum their gradients in a way of their own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence

from shardlab.language import Rank, Strategy, Value

Sum = Callable[[Rank, Value], Awaitable[Value]]
"""Makes of a rank's gradient the sum of all ranks'."""


def data_parallel(total: Sum) -> Strategy:
    """Every rank updates all weights from the sum that it has made."""

    async def program(rank: Rank) -> None:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
        gradient = computed(rank, rank.share())
        for l in reversed(rank.layers):
            grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights["mine"] = grad_weight
            rank.grad_weights["total"] = await total(rank, grad_weight)
            for key in list(rank.grad_weights):
                if key != "total":
                    del rank.grad_weights[key]
            rank.weights[l], rank.opt_states[l] = rank.update(
                l, rank.grad_weights.pop("total"), rank.weights[l], rank.opt_states[l]
            )

    return program


def computed(rank: Rank, microbatches: Sequence[int]) -> Value:
    """All layers' forward passes, and the gradient of the last activation."""
    rank.activations[0] = rank.load_batch(microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    return rank.loss(rank.activations.pop(len(rank.layers)))


async def all_gradients(rank: Rank, mine: Value) -> list[Value]:
    """Every rank's gradient, by rank, passed round a ring."""
    next_rank, previous_rank = (rank.index + 1) % rank.world, (rank.index - 1) % rank.world
    gradients = {rank.index: mine}
    for step in range(1, rank.world):
        source = (rank.index - step) % rank.world
        gradient = gradients[(source + 1) % rank.world]
        rank.grad_weights[source] = gradients[source] = await rank.exchange(
            gradient, to=next_rank, source=previous_rank
        )
    return [gradients[source] for source in range(rank.world)]


def added(order: Callable[[int, int], Sequence[int]]) -> Sum:
    """Each rank has all gradients, and adds them in an order: of (rank, world), the ranks one after the other."""

    async def total(rank: Rank, mine: Value) -> Value:
        gradients = await all_gradients(rank, mine)
        first, *others = order(rank.index, rank.world)
        rank.grad_weights["sum"] = gradients[first]
        for other in others:
            rank.grad_weights["sum"] = rank.grad_weights["sum"] + gradients[other]
        return rank.grad_weights["sum"]

    return total


def turned(rank: int, world: int) -> list[int]:
    """One's own gradient first, then those before it round the ring."""
    return [(rank - step) % world for step in range(world)]


async def there_and_back(rank: Rank, mine: Value) -> Value:
    """The sum grows from rank to rank, and the last one tells it to those before."""
    last = rank.world - 1
    rank.grad_weights["sum"] = mine
    if rank.index > 0:
        rank.grad_weights["sum"] = mine + await rank.recv(source=rank.index - 1)
    if rank.index < last:
        await rank.send(rank.grad_weights["sum"], to=rank.index + 1)
        rank.grad_weights["sum"] = await rank.recv(source=rank.index + 1)
    if rank.index > 0:
        await rank.send(rank.grad_weights["sum"], to=rank.index - 1)
    return rank.grad_weights["sum"]


async def recursive_doubling(rank: Rank, mine: Value) -> Value:
    """Pairs of ranks add up what they have, then pairs of pairs."""
    rank.grad_weights["sum"], distance = mine, 1
    while distance < rank.world:
        peer = rank.index ^ distance
        theirs = await rank.exchange(rank.grad_weights["sum"], to=peer, source=peer)
        rank.grad_weights["sum"] = rank.grad_weights["sum"] + theirs
        distance *= 2
    return rank.grad_weights["sum"]


async def reduced(rank: Rank, mine: Value) -> Value:
    return await rank.all_reduce(mine)


async def reduced_in_slices(rank: Rank, mine: Value) -> Value:
    rank.grad_weights["slice"] = await rank.reduce_scatter(mine)
    return await rank.all_gather(rank.grad_weights["slice"])


async def summed_on_one(rank: Rank, mine: Value) -> Value:
    """The last rank's sum, in whatever order, is broadcast."""
    root = rank.world - 1
    total = await added(turned)(rank, mine)
    return total if await _sum_from_root(rank, total, root) is None else rank.grad_weights["told"]


async def _sum_from_root(rank: Rank, total: Value, root: int) -> Value | None:
    if rank.index == root:
        await rank.broadcast(total, root=root)
        return None
    rank.grad_weights["told"] = await rank.broadcast(None, root=root)
    return rank.grad_weights["told"]


drifting = data_parallel(added(turned))
one_turned = data_parallel(added(lambda rank, world: turned(0 if rank < world - 1 else rank, world)))
all_in_one_order = data_parallel(added(lambda rank, world: range(world)))
chained = data_parallel(there_and_back)
doubled = data_parallel(recursive_doubling)
all_reduced = data_parallel(reduced)
in_slices = data_parallel(reduced_in_slices)
broadcast = data_parallel(summed_on_one)


def sum_apart_on_last_rank(rank: Rank, layers: Container[int]) -> None:
    """Sum all microbatches' gradients. The last rank reads those of some layers again, and so adds them apart."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        gradient = computed(rank, [m])
        for l in reversed(rank.layers):
            grad_weight, gradient = rank.backward(l, rank.activations.pop(l), gradient, rank.weights[l])
            rank.grad_weights["new"] = grad_weight
            rank.accumulate(grad_weight)
            if l in layers and rank.index == rank.world - 1:
                rank.slice(grad_weight, 0, 2)
            del rank.grad_weights["new"]


async def fused_on_one_rank(rank: Rank) -> None:
    """Every rank computes the whole batch; the last one reads each new gradient once more before it is added.

    So its sums are no part of the backward passes. The first layer's gradients are made equal by a mean.
    """
    sum_apart_on_last_rank(rank, rank.layers)
    rank.grad_weights[0] = await rank.all_reduce(rank.grad_weights[0], reduction="mean")
    for l in rank.layers:
        total = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

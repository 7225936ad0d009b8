"""Programs as a user would write them: data parallelism in which what is sent, and when, is unusual."""

from __future__ import annotations

from shardlab.language import Handle, Mesh, Rank, Value
from tests.train.user_programs import accumulate, backward, forward


def load(rank: Rank) -> None:
    """Whole weights and optimizer states."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)


def update(rank: Rank) -> None:
    """Every layer by its gradient, which is used up."""
    for l in rank.layers:
        total = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def losses_computed_twice(rank: Rank) -> None:
    """Two ranks compute microbatch 0, and one of them its loss twice; only rank 0's gradient of it is used."""
    last = len(rank.layers)
    load(rank)
    for m in [0, 1] if rank.index == 0 else [2, 0]:
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        if m == 0:
            rank.loss(rank.activations[last])
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        if rank.index == 1 and m == 0:
            continue
        for l in reversed(rank.layers):
            accumulate(rank, l, backward(rank, l, rank.weights[l]))
    for l in rank.layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l])
    update(rank)


def scattered_twice_mesh(ranks: int) -> Mesh:
    return Mesh(dp_replicate=2, dp_shard=ranks // 2)


async def scattered_twice(rank: Rank) -> None:
    """A hierarchical all-reduce: scattered along one axis, then along the other, and gathered back."""
    load(rank)
    forward(rank, rank.share())
    for l in reversed(rank.layers):
        half = await rank.reduce_scatter(backward(rank, l, rank.weights[l]), axis="dp_shard")
        quarter = await rank.reduce_scatter(half, axis="dp_replicate")
        half = await rank.all_gather(quarter, axis="dp_replicate")
        rank.grad_weights[l] = await rank.all_gather(half, axis="dp_shard")
    update(rank)


async def ring(rank: Rank) -> None:
    """An all-reduce by hand: what travels is added to only once it has been sent."""
    world = rank.world
    load(rank)
    forward(rank, rank.share())
    for l in reversed(rank.layers):
        rank.grad_weights[l] = rank.grad_weights["piece"] = backward(rank, l, rank.weights[l])
        for _ in range(world - 1):
            rank.send(rank.grad_weights["piece"], to=(rank.index + 1) % world)
            rank.grad_weights["piece"] = await rank.recv(source=(rank.index - 1) % world)
            rank.grad_weights[l] = rank.grad_weights[l] + rank.grad_weights["piece"]
        del rank.grad_weights["piece"]
    update(rank)


async def sent_while_it_accumulates(rank: Rank) -> None:
    """Each microbatch's gradient is exchanged at once, un-awaited, while the next one is added to the first."""
    peer = 1 - rank.index
    arriving: dict[int, list[Handle[Value]]] = {l: [] for l in rank.layers}
    load(rank)
    for m in rank.share():
        forward(rank, [m])
        for l in reversed(rank.layers):
            new = rank.grad_weights["new"] = backward(rank, l, rank.weights[l])
            arriving[l].append(rank.exchange(new, to=peer, source=peer))
            accumulate(rank, l, new)
    del rank.grad_weights["new"]
    for l in rank.layers:
        for handle in arriving[l]:
            rank.grad_weights[l] = rank.grad_weights[l] + await handle
    update(rank)


async def prefetched(rank: Rank) -> None:
    """FSDP that gathers the next layer while it computes on this one, and recomputes in the backward pass."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.world - 1 - rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())
    coming = rank.all_gather(rank.weights[0])
    for l in rank.layers:
        full = await coming
        if l + 1 < last:
            coming = rank.all_gather(rank.weights[l + 1])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full, save=False)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        full = await rank.all_gather(rank.weights[l])
        rank.grad_weights[l] = await rank.all_reduce(backward(rank, l, full))
    update(rank)


async def crossing(rank: Rank) -> None:
    """Two ranks that swap halves of the batch by crossing messages before they train data parallel."""
    other = 1 - rank.index
    mine, theirs = ([0, 1], [2, 3]) if rank.index == 0 else ([2, 3], [0, 1])
    load(rank)
    rank.activations["mine"] = rank.load_batch(mine)
    rank.activations[0] = await rank.exchange(
        rank.activations.pop("mine"), to=other, source=other, expect=("activations", 0, theirs)
    )
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.activations["there"] = await rank.exchange(
        rank.activations[1], to=other, source=other, expect=("activations", 1, mine)
    )
    last = len(rank.layers)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l] = await rank.all_reduce(backward(rank, l, rank.weights[l]))
    update(rank)


async def gathered_microbatches(rank: Rank) -> None:
    """Every rank computes on a batch that is gathered from single microbatches, so no gradient is reduced."""
    last = len(rank.layers)
    load(rank)
    rank.activations[0] = await rank.all_gather(rank.load_batch([len(rank.microbatches) - 1 - rank.index]))
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
    for l in reversed(rank.layers):
        rank.grad_weights[l] = backward(rank, l, rank.weights[l])
    update(rank)


async def sent_weights(rank: Rank) -> None:
    """Rank 0 owns the weights and sends them to rank 1 each step; gradients come back and are added."""
    if rank.index == 0:
        load(rank)
        for l in rank.layers:
            await rank.send(rank.weights[l], to=1)
    else:
        for l in rank.layers:
            rank.weights[l] = await rank.recv(source=0)
    forward(rank, rank.share())
    for l in reversed(rank.layers):
        rank.grad_weights[l] = backward(rank, l, rank.weights[l])
    for l in rank.layers:
        if rank.index == 1:
            await rank.send(rank.grad_weights.pop(l), to=0)
        else:
            rank.grad_weights[l] = rank.grad_weights[l] + await rank.recv(source=1)
    if rank.index == 0:
        update(rank)

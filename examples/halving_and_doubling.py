"""Data parallelism whose all-reduce is written by hand, by recursive halving and doubling.

In each of log2(n) exchanges a rank keeps the half of what it has that its bit names, gives the other half away and adds
what comes; then the halves are put together again in the opposite order. It sends as much as a ring, in fewer messages
(Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH").
"""

from shardlab.language import Rank, UserError, Value


async def halving_and_doubling(rank: Rank) -> None:
    if rank.world & (rank.world - 1):
        raise UserError(f"{rank.world} ranks were given; halving wants 1, 2, 4, 8, ...")
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        rank.grad_weights[l], grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        total = await reduced(rank, l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def reduced(rank: Rank, l: int) -> Value:
    """The sum of all ranks' gradients of a layer."""
    mine, distances = rank.grad_weights, [1 << bit for bit in range(rank.world.bit_length() - 1)]
    for distance in reversed(distances):
        half = int(bool(rank.index & distance))
        given = rank.slice(mine[l], 1 - half, 2)
        mine[l] = rank.slice(mine[l], half, 2)
        mine[l] += await swapped(rank, given, distance)
    for distance in distances:
        arrived = await swapped(rank, mine[l], distance)
        mine[l] = rank.concatenate([mine[l], arrived])
    return mine.pop(l)


async def swapped(rank: Rank, value: Value, distance: int) -> Value:
    """What the rank at this distance gives, while this rank gives it `value`."""
    other = rank.index ^ distance
    return await rank.exchange(value, to=other, source=other)

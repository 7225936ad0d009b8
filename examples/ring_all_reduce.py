"""Data parallelism whose all-reduce is written by hand, as a ring: every rank talks to its two neighbours alone.

Each gradient is cut into as many chunks as there are ranks. In a first round partial sums of the chunks go round, until
each rank has one whole sum; in a second round these go round. So every rank sends 2 (n - 1) / n of the gradient, which
is the least possible (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations").
"""

from shardlab.language import Rank, Value


async def ring_all_reduce(rank: Rank) -> None:
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
    """The sum of all ranks' gradients of a layer; chunk i is `grad_weights[l, i]`."""
    chunks, n, me = rank.grad_weights, rank.world, rank.index
    for i in range(n):
        chunks[l, i] = rank.slice(chunks[l], i, n)
    del chunks[l]
    for hop in range(n - 1):
        mine, next_one = (l, (me - hop) % n), (l, (me - hop - 1) % n)
        chunks[next_one] += await to_the_right(rank, chunks.pop(mine))
    for hop in range(n - 1):
        mine, next_one = (l, (me + 1 - hop) % n), (l, (me - hop) % n)
        chunks[next_one] = await to_the_right(rank, chunks[mine])
    return rank.concatenate(chunks.pop((l, i)) for i in range(n))


async def to_the_right(rank: Rank, value: Value) -> Value:
    """What the left neighbour gives, while this rank gives `value` to the right one."""
    return await rank.exchange(value, to=(rank.index + 1) % rank.world, source=(rank.index - 1) % rank.world)

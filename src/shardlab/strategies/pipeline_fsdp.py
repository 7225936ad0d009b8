"""GPipe over one mesh axis and fully sharded data parallel over the other, on a grid of pp x dp_shard ranks."""

import math

from shardlab.program import Mesh, Rank


def pipeline_fsdp_mesh(ranks: int) -> Mesh:
    """The grid nearest to a square: as many pipeline stages as the largest divisor not above the root of the ranks."""
    stages = max(n for n in range(1, math.isqrt(max(ranks, 1)) + 1) if ranks % n == 0)
    return Mesh(pp=stages, dp_shard=ranks // stages)


async def pipeline_fsdp(rank: Rank) -> None:
    """Each stage's layers are sharded over the ranks that share the stage, and gathered at each use."""
    stage = rank.stage_layers("pp")
    first, after = stage[0], stage[-1] + 1
    position, column = rank.coordinate("pp"), rank.group("pp").ranks
    shard, shards = rank.coordinate("dp_shard"), len(rank.group("dp_shard").ranks)
    is_first, is_last = position == 0, position == len(column) - 1
    share = rank.share("dp_shard")
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=shard, of=shards)

    for m in share:
        if is_first:
            rank.activations[0, m] = rank.load_batch([m])
        else:
            rank.activations[first, m] = await rank.recv(source=column[position - 1], expect=("activations", first, m))
        for l in stage:
            full = await rank.all_gather(rank.weights[l], axis="dp_shard")
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], full)
        if not is_last:
            await rank.send(rank.activations.pop((after, m)), to=column[position + 1])

    for m in share:
        if is_last:
            rank.grad_activations[after] = rank.loss(rank.activations.pop((after, m)))
        else:
            rank.grad_activations[after] = await rank.recv(
                source=column[position + 1], expect=("grad_activations", after, m)
            )
        for l in reversed(stage):
            full = await rank.all_gather(rank.weights[l], axis="dp_shard")
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop((l, m)), rank.grad_activations.pop(l + 1), full
            )
            grad_shard = await rank.reduce_scatter(grad_weight, axis="dp_shard")
            rank.grad_weights[l] = grad_shard if m == share[0] else rank.grad_weights[l] + grad_shard
        if not is_first:
            await rank.send(rank.grad_activations.pop(first), to=column[position - 1])

    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

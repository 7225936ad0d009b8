"""Programs that go by way of a root, as a user would write them."""

from __future__ import annotations

from examples.parameter_server import parameter_server
from shardlab.language import Mesh, Rank
from tests.train.user_programs import accumulate, backward, forward

__all__ = ["by_root", "by_root_mesh", "parameter_server", "replicas"]


def by_root_mesh(ranks: int) -> Mesh:
    return Mesh(dp_replicate=2, dp_shard=ranks // 2) if ranks > 2 else Mesh(dp_shard=ranks)


async def by_root(rank: Rank) -> None:
    """FSDP along dp_shard in which the last rank of a group sees to everything, also to who gets which microbatches.

    Replicas are reduced on their first rank, which hands the sum to the others.
    """
    last, first = rank.group("dp_shard").ranks[-1], rank.group("dp_replicate").ranks[0]
    place, shards = rank.coordinate("dp_shard"), len(rank.group("dp_shard").ranks)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, place, shards)
    mine = rank.share("dp_replicate")
    batch = rank.load_batch(mine) if rank.index == last else None
    part = mine[place * len(mine) // shards : (place + 1) * len(mine) // shards]
    expect = ("activations", 0, part)
    rank.activations["mine"] = await rank.scatter(batch, root=last, axis="dp_shard", expect=expect)
    for l in rank.layers:
        whole = await rank.gather(rank.weights[l], root=last, axis="dp_shard")
        rank.weights["full", l] = await rank.broadcast(whole, root=last, axis="dp_shard")
    tokens = rank.activations.pop("mine")
    n = len(rank.layers)
    rank.activations[0] = tokens
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights["full", l])
    rank.grad_activations[n] = rank.loss(rank.activations.pop(n))
    for l in reversed(rank.layers):
        total = await rank.reduce(backward(rank, l, rank.weights.pop(("full", l))), root=last, axis="dp_shard")
        piece = await rank.scatter(total, root=last, axis="dp_shard")
        rank.grad_weights["all", l] = await rank.broadcast(
            await rank.reduce(piece, root=first, axis="dp_replicate"), root=first, axis="dp_replicate"
        )
    await rank.barrier(axis="dp_shard")
    for l in rank.layers:
        part = rank.norm(l, rank.grad_weights["all", l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    rank.scalars["largest"] = await rank.all_reduce(rank.scalars[0], reduction="max")
    rank.scalars["norm"] = await rank.all_reduce(rank.scalars.pop(0), axis="dp_shard")
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(("all", l)), rank.weights[l], rank.opt_states[l], rank.scalars["norm"]
        )
    del rank.scalars["norm"], rank.scalars["largest"]


async def replicas(rank: Rank) -> None:
    """Data parallel, two microbatches at a time; the replicas' mean, least and largest are what each of them has."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        forward(rank, [m])
        for l in reversed(rank.layers):
            accumulate(rank, l, backward(rank, l, rank.weights[l]))
        del rank.grad_activations[0]
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.grad_weights["mean", l] = await rank.all_reduce(total, reduction="mean")
        new, rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(("mean", l)), rank.weights[l], rank.opt_states[l]
        )
        least = await rank.reduce(new, root=rank.world - 1, reduction="min")
        again = await rank.broadcast(least, root=rank.world - 1)
        rank.weights[l] = await rank.all_reduce(again, reduction="max")

"""Fully sharded data parallel: each rank stores 1/n of every layer (ZeRO stage 3, Rajbhandari et al. 2020).

This program gathers a layer only when it needs it, without prefetching. Plans such as `zero-3` prefetch
(`shardlab.strategies.plan.sharding`).
"""

from shardlab.language import Rank
from shardlab.strategies.registry import built_in


@built_in(
    "the batch, weights, gradients and optimizer state",
    sends="3 * (n - 1) / n * W",
    keeps="(W + G + O)/n",
    source="Rajbhandari et al. 2020, arXiv 1910.02054, stage 3",
    order=5,
)
async def fsdp(rank: Rank) -> None:
    """All-gather each layer just before its use and free it afterwards. Reduce-scatter its gradient to slices."""
    last = len(rank.layers)
    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        full = await rank.all_gather(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for l in reversed(rank.layers):
        full = await rank.all_gather(rank.weights[l])
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
        )
        rank.accumulate(await rank.reduce_scatter(grad_weight))

    norm = None
    if rank.wants_norm():  # clipping needs the norm of the whole gradient
        squares = [rank.norm(l, rank.grad_weights[l]) for l in rank.weighted_layers]
        rank.scalars["norm"] = norm = await rank.all_reduce(sum(squares[1:], squares[0]))
    for l in rank.weighted_layers:
        await rank.update_shard(l, norm)

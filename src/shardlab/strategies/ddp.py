"""Distributed data parallel: each rank holds the whole model and a share of the batch (Li et al. 2020)."""

from shardlab.language import Handle, Rank, Value
from shardlab.strategies.registry import built_in


@built_in(
    "the batch", sends="2 * (n - 1) / n * W", keeps="W + G + O", source="Li et al. 2020, arXiv 2006.15704", order=3
)
async def ddp(rank: Rank) -> None:
    """All-reduce each layer's gradient while the backward pass computes the layer below."""
    last = len(rank.layers)
    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    reductions: dict[int, Handle[Value]] = {}
    for l in reversed(rank.layers):
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
        if l + 1 in reductions:  # one reduction in flight at a time bounds the memory
            rank.accumulate(await reductions.pop(l + 1))
        reductions[l] = rank.all_reduce(grad_weight)
    del rank.grad_activations[0]

    for l in reversed(rank.weighted_layers):
        if l in reductions:
            rank.accumulate(await reductions.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

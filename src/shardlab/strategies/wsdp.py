"""Weight-sharded data parallel: each rank stores 1/n of the weights and optimizer state, but whole gradients."""

from shardlab.language import Rank
from shardlab.strategies.registry import built_in


@built_in(
    "the batch, weights and optimizer state",
    sends="4 * (n - 1) / n * W",
    keeps="G + (W + O)/n",
    source="LLM Training Puzzles, puzzle 3",
    order=4,
)
async def wsdp(rank: Rank) -> None:
    """All-gather each layer just before its use and free it afterwards. All-reduce the gradients; update the slice."""
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
        rank.accumulate(grad_weight)
    for l in rank.weighted_layers:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights.pop(l))
        await rank.update_shard(l)

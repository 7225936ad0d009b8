"""Weight-sharded data parallel: weights and optimizer state are sharded, gradients stay whole until reduced."""

from shardlab.program import Rank
from shardlab.strategies.entry import built_in


@built_in(
    "the batch, weights and optimizer state", keeps="G + (W + O)/n", source="LLM Training Puzzles, puzzle 3", order=4
)
async def wsdp(rank: Rank) -> None:
    """Gather each layer just before it is used and free it right after; all-reduce gradients, update one's slice."""
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        full = await rank.all_gather(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for l in reversed(rank.layers):
        full = await rank.all_gather(rank.weights[l])
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), full
        )
    for l in rank.layers:
        reduced = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, reduced, rank.weights[l], rank.opt_states[l])

"""Gradient accumulation: microbatches run one by one, so memory holds the activations of only one of them."""

from shardlab.language import Rank
from shardlab.strategies.registry import built_in, one_device_mesh


@built_in(
    "nothing; the batch over time",
    sends="0",
    keeps="W + G + O",
    source="LLM Training Puzzles, puzzle 1",
    mesh=one_device_mesh,
    ranks=1,
    order=2,
)
async def grad_accum(rank: Rank) -> None:
    """Run forward and backward for each microbatch, sum the gradients, and update once at the end."""
    last = len(rank.layers)
    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    for m in rank.microbatches:
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
            )
            rank.accumulate(grad_weight)
        del rank.grad_activations[0]

    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

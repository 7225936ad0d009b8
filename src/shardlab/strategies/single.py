"""One device: forward through every layer, backward in reverse, then the update. The other programs extend this one."""

from shardlab.language import Rank
from shardlab.strategies.registry import built_in, one_device_mesh


@built_in(
    "nothing",
    sends="0",
    keeps="W + G + O",
    source="LLM Training Puzzles, puzzle 0",
    mesh=one_device_mesh,
    ranks=1,
    order=1,
)
async def single(rank: Rank) -> None:
    """Train on one rank. Further ranks would only repeat the same step."""
    last = len(rank.layers)
    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for l in reversed(rank.layers):
        grad_weight, rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
        rank.accumulate(grad_weight)
    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

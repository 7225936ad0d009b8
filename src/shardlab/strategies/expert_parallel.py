"""Expert parallelism: each rank stores 1/n of the experts and a copy of all other layers.

Source: GShard, Lepikhin et al. 2020, arXiv 2006.16668, section 3.2.
"""

from shardlab.language import Rank, Value
from shardlab.strategies.registry import built_in, expert_parallel_mesh


@built_in(
    "the batch and the experts",
    sends="4 * (e - 1) / e * L * k * A + 2 * (e - 1) / e * D",
    keeps="D + E/e of W, G and O",
    source="Lepikhin et al. 2020, GShard, arXiv 2006.16668",
    mesh=expert_parallel_mesh,
    order=8,
)
async def expert_parallel(rank: Rank) -> None:
    """Send tokens to their experts and back by all-to-all, in both passes. Other layers are data parallel.

    The gradients of replicated layers are all-reduced. An expert receives the tokens of all ranks, so its gradient
    needs no reduction.
    """
    last = len(rank.layers)
    for l in rank.weighted_layers:
        cut = (rank.index, rank.world) if rank.signatures[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.share())

    residual: list[Value] = []
    for l in rank.layers:
        if rank.signatures[l].sliced:
            rank.activations[l] = await rank.all_to_all(rank.activations.pop(l))
            results = rank.forward(l, rank.activations[l], rank.weights[l])
            rank.activations[l + 1] = await rank.all_to_all(results)
        else:
            inputs = rank.activations[l], *residual
            rank.activations[l + 1], *residual = rank.forward(l, inputs, rank.weights[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    residual = []
    for l in reversed(rank.layers):
        x, gradient = rank.activations.pop(l), rank.grad_activations.pop(l + 1)
        if rank.signatures[l].sliced:
            gradient = await rank.all_to_all(gradient)
            rank.grad_weights[l], gradient = rank.backward(l, x, gradient, rank.weights[l])
            rank.grad_activations[l] = await rank.all_to_all(gradient)
        else:
            gradients = rank.backward(l, x, (gradient, *residual), rank.weights[l])
            grad_weight, rank.grad_activations[l], *residual = gradients
            rank.accumulate(await rank.all_reduce(grad_weight))

    for l in rank.weighted_layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

"""Data parallelism, as a user would first write it: every rank takes its share of the batch, gradients are summed."""

from shardlab.language import Rank


async def my_ddp(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

"""Tensor parallelism: ranks split every matrix (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, fig. 3).

A block is two layers here: a norm, which every rank repeats, and a body (attention or MLP), whose matrices are split.
"""

from shardlab.language import Rank, Value
from shardlab.strategies.registry import built_in, tensor_parallel_mesh


@built_in(
    "the matrices of every layer",
    sends="2 * (2 * L + 1) * 2 * (t - 1) / t * m * A",
    keeps="(W + G + O)/t",
    source="Shoeybi et al. 2019, arXiv 1909.08053",
    mesh=tensor_parallel_mesh,
    ranks=2,
    order=7,
)
async def tensor_parallel(rank: Rank) -> None:
    """All-reduce the output of each body in the forward pass, and the gradient of its input in the backward pass.

    Each rank computes with its slices of a body's matrices. Its result is one term of the sum that the all-reduce
    computes.
    """
    last = rank.layers[-1]
    for l in rank.weighted_layers:
        cut = (rank.index, rank.world) if rank.signatures[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    residual: list[Value] = []
    for l in rank.layers:
        weight = rank.weights[l]
        if rank.signatures[l].sliced:
            terms = rank.forward(l, rank.activations[l], weight)
            rank.activations[l + 1] = await rank.all_reduce(terms, axis="tp") if l < last else terms
        else:
            inputs = rank.activations[l], *residual
            rank.activations[l + 1], *residual = rank.forward(l, inputs, weight)

    stats = await rank.all_gather(rank.loss_stats(rank.activations[last + 1]), axis="tp")
    gradient = rank.loss(rank.activations.pop(last + 1), stats)  # for this rank's slice of the vocabulary
    residual = []
    for l in reversed(rank.layers):
        x, weight = rank.activations.pop(l), rank.weights[l]
        if rank.signatures[l].sliced:
            grad_weight, terms = rank.backward(l, x, gradient, weight)
            rank.accumulate(grad_weight)
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
        else:
            grad_weight, gradient, *residual = rank.backward(l, x, (gradient, *residual), weight)
            rank.accumulate(grad_weight)
    for l in rank.weighted_layers:
        await rank.update_shard(l, axis="tp")

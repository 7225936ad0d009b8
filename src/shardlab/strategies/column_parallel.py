"""Tensor parallelism in its simplest form: ranks split the columns of every matrix.

Source: Stanford CS336, spring 2025, lecture 8 (github.com/stanford-cs336/spring2025-lectures, lecture_08.py), which
leaves the backward pass as an exercise.
"""

from shardlab.language import Rank, Value
from shardlab.strategies.registry import built_in, tensor_parallel_mesh


@built_in(
    "the columns of every matrix",
    sends="(3 * L - 2) * (t - 1) / t * m * A",
    keeps="(W + G + O)/t",
    source="Stanford CS336, spring 2025, lecture 8",
    mesh=tensor_parallel_mesh,
    ranks=2,
    columns=True,
    order=6,
)
async def column_parallel(rank: Rank) -> None:
    """All-gather the features of each layer's output in the forward pass; all-reduce the gradient of its input.

    A rank computes the features that its columns give, and the next layer reads all features. In the backward pass each
    rank's columns give one term of the gradient of the layer's input. The terms are summed; in the layer below, each
    rank reads its own features of the sum.
    """
    for l in rank.layers:
        cut = (rank.index, rank.world) if rank.signatures[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    residual: list[Value] = []
    for l in rank.layers:
        if rank.signatures[l].sliced:
            features = rank.forward(l, rank.activations[l], rank.weights[l])
            rank.activations[l + 1] = await rank.all_gather(features, axis="tp")
        else:
            inputs = rank.activations[l], *residual
            rank.activations[l + 1], *residual = rank.forward(l, inputs, rank.weights[l])

    gradient, residual = rank.loss(rank.activations.pop(len(rank.layers))), []
    for l in reversed(rank.layers):
        x = rank.activations.pop(l)
        if rank.signatures[l].sliced:
            rank.grad_weights[l], terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
        else:
            rank.grad_weights[l], gradient, *residual = rank.backward(l, x, (gradient, *residual), rank.weights[l])
    for l in rank.layers:
        await rank.update_shard(l, axis="tp")

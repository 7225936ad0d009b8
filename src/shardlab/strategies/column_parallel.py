"""Tensor parallelism in its simplest form: every matrix is cut by columns (Stanford CS336, spring 2025, lecture 8:
github.com/stanford-cs336/spring2025-lectures lecture_08.py, whose backward pass is "homework exercise")."""

from shardlab.language import Rank, Value
from shardlab.strategies.registry import built_in, tensor_parallel_mesh


@built_in(
    "the columns of every matrix",
    keeps="(W + G + O)/t",
    source="Stanford CS336, spring 2025, lecture 8",
    mesh=tensor_parallel_mesh,
    ranks=2,
    columns=True,
    order=6,
)
async def column_parallel(rank: Rank) -> None:
    """Column parallelism: each rank makes some features of every layer's output, gathered for the next layer.

    Backward, each rank's columns tell a term of the gradient of the layer's input: the terms are summed, and of the sum
    each rank of the layer below reads its own features.
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
            given = rank.activations[l], *residual
            rank.activations[l + 1], *residual = rank.forward(l, given, rank.weights[l])

    gradient, residual = rank.loss(rank.activations.pop(len(rank.layers))), []
    for l in reversed(rank.layers):
        x, given = rank.activations.pop(l), (gradient, *residual)
        if rank.signatures[l].sliced:
            rank.grad_weights[l], terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
        else:
            rank.grad_weights[l], gradient, *residual = rank.backward(l, x, given, rank.weights[l])
    for l in rank.layers:
        direction = None
        if rank.wants_direction(l) and rank.signatures[l].sliced:  # of whole matrices, for Muon
            direction = await rank.all_gather(rank.direction(l, rank.grad_weights[l], rank.opt_states[l]), axis="tp")
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], direction=direction
        )

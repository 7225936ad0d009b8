"""Tensor parallelism: matrices are cut over the ranks (Megatron-LM, Shoeybi et al. 2019, arXiv 1909.08053, fig. 3)."""

from shardlab.program import LayerKind, Mesh, Rank, UserError


def tensor_parallel_mesh(ranks: int) -> Mesh:
    """Put all ranks on the axis that cuts layers.

    Raises:
        UserError: for one rank, which has nothing to cut.
    """
    if ranks < 2:
        raise UserError(f"tensor parallelism cuts layers over 2 or more ranks, but {ranks} was asked for")
    return Mesh(tp=ranks)


async def tensor_parallel(rank: Rank) -> None:
    """A body makes its slice's terms of a sum: one all-reduce for each body and direction. Norms run on every rank."""
    norm, last = LayerKind.NORM, rank.layers[-1]
    for l in rank.layers:
        cut = (0, 1) if rank.kinds[l] is norm else (rank.index, rank.world)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    rank.activations[0] = rank.load_batch(rank.microbatches)

    residual = None
    for l in rank.layers:
        if rank.kinds[l] is norm:
            residual, rank.activations[l + 1] = rank.forward_norm(l, residual, rank.activations[l], rank.weights[l])
        else:
            terms = rank.forward(l, rank.activations[l], rank.weights[l])
            rank.activations[l + 1] = await rank.all_reduce(terms, axis="tp") if l < last else terms

    stats = await rank.all_gather(rank.loss_stats(rank.activations[last + 1]), axis="tp")
    gradient = rank.loss(rank.activations.pop(last + 1), stats)  # of this rank's slice of the vocabulary
    residual = None
    for l in reversed(rank.layers):
        x = rank.activations.pop(l)
        if rank.kinds[l] is norm:
            rank.grad_weights[l], gradient, residual = rank.backward_norm(l, x, gradient, residual, rank.weights[l])
        else:
            rank.grad_weights[l], terms = rank.backward(l, x, gradient, rank.weights[l])
            gradient = await rank.all_reduce(terms, axis="tp") if l else terms
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

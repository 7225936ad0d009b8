"""Programs that slice layers in ways of their own: some that ranks can run, and some that are right and cannot."""

from __future__ import annotations

from shardlab.language import Mesh, Rank, Strategy, Value


def microbatches_together_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks)


async def gathered_matrices(rank: Rank) -> None:
    """Matrices are kept in slices and gathered to compute; each rank has its own microbatches."""
    for l in rank.layers:
        cut = (0, 1) if rank.sizes.signatures[l].carries else (rank.index, rank.world)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
        rank.weights["full", l] = (
            rank.weights[l] if rank.sizes.signatures[l].carries else await rank.all_gather(rank.weights[l], axis="tp")
        )
    rank.activations[0] = rank.load_batch(rank.share())
    residual: list[Value] = []
    for l in rank.layers:
        full = rank.weights["full", l]
        if rank.sizes.signatures[l].carries:
            rank.activations[l + 1], *residual = rank.forward(l, (rank.activations[l], *residual), full)
        else:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
    gradient, grad_residual = rank.loss(rank.activations.pop(len(rank.layers))), list[Value]()
    for l in reversed(rank.layers):
        x, full = rank.activations.pop(l), rank.weights.pop(("full", l))
        if rank.sizes.signatures[l].carries:
            grad_weight, gradient, *grad_residual = rank.backward(l, x, (gradient, *grad_residual), full)
            rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        else:
            grad_weight, gradient = rank.backward(l, x, gradient, full)
            rank.grad_weights[l] = await rank.reduce_scatter(grad_weight, axis="tp")
    _update(rank)


async def microbatches_together(rank: Rank) -> None:
    """Each rank has its own microbatches for the norms; for the slices of a matrix all are gathered, and dealt back."""
    for l in rank.layers:
        cut = (0, 1) if rank.sizes.signatures[l].carries else (rank.index, rank.world)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    value, residual = rank.load_batch(rank.share()), list[Value]()
    for l in rank.layers:
        if rank.sizes.signatures[l].carries:
            rank.activations[l] = value
            value, *residual = rank.forward(l, (value, *residual), rank.weights[l])
        else:
            rank.activations[l] = await rank.all_gather(value, axis="tp")
            terms = rank.activations["made"] = rank.forward(l, rank.activations[l], rank.weights[l])
            value = terms if l == rank.layers[-1] else await rank.reduce_scatter(terms, axis="tp")
    stats = await rank.all_gather(rank.loss_stats(value), axis="tp")
    gradient, grad_residual = rank.loss(rank.activations.pop("made"), stats), list[Value]()
    for l in reversed(rank.layers):
        x = rank.activations.pop(l)
        if rank.sizes.signatures[l].carries:
            grad_weight, gradient, *grad_residual = rank.backward(l, x, (gradient, *grad_residual), rank.weights[l])
            rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        else:
            whole = gradient if l == rank.layers[-1] else await rank.all_gather(gradient, axis="tp")
            rank.grad_weights[l], grad_input = rank.backward(l, x, whole, rank.weights[l])
            gradient = await rank.reduce_scatter(grad_input, axis="tp") if l else grad_input
    _update(rank)


def _update(rank: Rank) -> None:
    for l in rank.layers:
        new = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = new


def gathers(batches: list[tuple[list[int], list[int]]]) -> Strategy:
    """A right step, and before it a gather of what each rank loads: microbatches, and slices of their sequences."""

    async def strategy(rank: Rank) -> None:
        await rank.all_gather(rank.load_batch(*batches[rank.index]))
        await microbatches_together(rank)

    return strategy

"""Expert parallel: every rank holds 1/world of every layer's experts and all of the rest (GShard, Lepikhin et al. 2020,
section 3.2)."""

from shardlab.program import LayerKind, Rank


async def expert_parallel(rank: Rank) -> None:
    """Data parallel but for the experts: their tokens travel to them and back, in both directions.

    Dense layers are replicated, and their gradients summed over the ranks. Experts see the tokens of all ranks, so that
    their gradients are complete where they are.
    """
    last = len(rank.layers)
    for l in rank.layers:
        shard, of = (rank.index, rank.world) if rank.kinds[l] is LayerKind.EXPERTS else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard, of)
    rank.activations[0] = rank.load_batch(rank.share())

    for l in rank.layers:
        if rank.kinds[l] is LayerKind.EXPERTS:
            rank.activations[l] = await rank.all_to_all(rank.activations.pop(l))
            results = rank.forward(l, rank.activations[l], rank.weights[l])
            rank.activations[l + 1] = await rank.all_to_all(results)
        else:
            residual = rank.residuals.pop(l) if l > 0 else None
            residual, rank.activations[l + 1] = rank.forward_dense(l, residual, rank.activations[l], rank.weights[l])
            if residual is not None:
                rank.residuals[l + 2] = residual
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))

    for l in reversed(rank.layers):
        x, gradient = rank.activations.pop(l), rank.grad_activations.pop(l + 1)
        if rank.kinds[l] is LayerKind.EXPERTS:
            gradient = await rank.all_to_all(gradient)
            rank.grad_weights[l], gradient = rank.backward(l, x, gradient, rank.weights[l])
            rank.grad_activations[l] = await rank.all_to_all(gradient)
        else:
            above = rank.grad_residuals.pop(l + 2) if l < last - 1 else None
            grad_weight, rank.grad_activations[l], below = rank.backward_dense(l, x, gradient, above, rank.weights[l])
            rank.grad_weights[l] = await rank.all_reduce(grad_weight)
            if below is not None:
                rank.grad_residuals[l] = below

    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

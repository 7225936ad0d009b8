"""GPipe: the pipeline fed one microbatch at a time, all forward, then all backward (Huang et al. 2019, fig. 2c)."""

from shardlab.program import Rank


async def gpipe(rank: Rank) -> None:
    """While one rank works on a microbatch the next rank works on the one before it."""
    stage = rank.stage_layers()
    first, after = stage[0], stage[-1] + 1
    is_first, is_last = rank.index == 0, rank.index == rank.world - 1
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    for m in rank.microbatches:
        if is_first:
            rank.activations[0, m] = rank.load_batch([m])
        else:
            rank.activations[first, m] = await rank.recv(source=rank.index - 1, expect=("activations", first, m))
        for l in stage:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
        if not is_last:
            await rank.send(rank.activations.pop((after, m)), to=rank.index + 1)

    for m in rank.microbatches:
        if is_last:
            rank.grad_activations[after] = rank.loss(rank.activations.pop((after, m)))
        else:
            rank.grad_activations[after] = await rank.recv(source=rank.index + 1, expect=("grad_activations", after, m))
        for l in reversed(stage):
            grad_weight, rank.grad_activations[l] = rank.backward(
                l, rank.activations.pop((l, m)), rank.grad_activations.pop(l + 1), rank.weights[l]
            )
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if m else grad_weight
        if not is_first:
            await rank.send(rank.grad_activations.pop(first), to=rank.index - 1)

    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

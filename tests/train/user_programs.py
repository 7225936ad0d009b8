"""Programs as a user would write them: states sharded apart from weights, backward passes of two halves, clipping."""

from __future__ import annotations

from shardlab.language import Mesh, Rank, Value


def forward(rank: Rank, microbatches: list[int] | range, weights: dict[int, Value] | None = None) -> None:
    """All layers, up to the gradient of the last activation."""
    last = len(rank.layers)
    rank.activations[0] = rank.load_batch(microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], (weights or rank.weights)[l])
    rank.grad_activations[last] = rank.loss(rank.activations.pop(last))


def backward(rank: Rank, l: int, weight: Value) -> Value:
    gradient, rank.grad_activations[l] = rank.backward(
        l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), weight
    )
    return gradient


def accumulate(rank: Rank, l: int, gradient: Value) -> None:
    rank.grad_weights[l] = rank.grad_weights[l] + gradient if l in rank.grad_weights else gradient


async def zero_1(rank: Rank) -> None:
    """Whole weights and gradients, sliced optimizer states; clips by the norm of the replicated gradient."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=rank.index, of=rank.world)
    forward(rank, rank.share())
    for l in reversed(rank.layers):
        rank.grad_weights[l] = await rank.all_reduce(backward(rank, l, rank.weights[l]))
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if 0 in rank.scalars else part
    for l in rank.layers:
        new, rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0]
        )
        rank.weights[l] = await rank.all_gather(new)


async def zero_2(rank: Rank) -> None:
    """Every microbatch's gradient is scattered at once, and its slice added to the older ones.

    The gathers of the new weights are all under way together.
    """
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=rank.index, of=rank.world)
    for m in rank.share():
        forward(rank, [m])
        for l in reversed(rank.layers):
            accumulate(rank, l, await rank.reduce_scatter(backward(rank, l, rank.weights[l])))
    coming = {}
    for l in rank.layers:
        new_values = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights["new", l], rank.opt_states[l] = new_values
        coming[l] = rank.all_gather(rank.weights["new", l])
    for l in reversed(rank.layers):
        rank.weights[l] = await coming[l]


async def zero_2_in_turned_order(rank: Rank) -> None:
    """Rank 0 keeps the state of the last slice: what is gathered has to be put in order."""
    mine = rank.world - 1 - rank.index
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, shard=mine, of=rank.world)
    forward(rank, rank.share())
    for l in reversed(rank.layers):
        total = await rank.all_reduce(backward(rank, l, rank.weights[l]))
        new, rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new)


def partly_sharded_mesh(ranks: int) -> Mesh:
    return Mesh(dp_replicate=2, dp_shard=ranks // 2)


async def partly_sharded(rank: Rank) -> None:
    """Weights over dp_shard, states over both axes, each layer updated as soon as its gradient is there."""
    shards, index = len(rank.group("dp_shard").ranks), rank.coordinate("dp_shard")
    finer = 2 * index + rank.coordinate("dp_replicate")
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, index, shards)
        rank.opt_states[l] = rank.load_opt_state(l, finer, 2 * shards)
    for l in rank.layers:
        rank.weights["full", l] = await rank.all_gather(rank.weights[l], axis="dp_shard")
    forward(rank, rank.share(), {l: rank.weights["full", l] for l in rank.layers})
    for l in reversed(rank.layers):
        half = await rank.reduce_scatter(backward(rank, l, rank.weights.pop(("full", l))), axis="dp_shard")
        quarter = await rank.reduce_scatter(half, axis="dp_replicate")
        new, rank.opt_states[l] = rank.update(l, quarter, rank.weights[l], rank.opt_states[l])
        rank.weights[l] = await rank.all_gather(new, axis="dp_replicate")


async def split(rank: Rank) -> None:
    """Data parallel; the weights' halves of all layers come after all the inputs' halves, the lowest layer first."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.share():
        forward(rank, [m])
        for l in reversed(rank.layers):
            inputs = rank.activations[l], rank.grad_activations[l + 1]
            rank.grad_activations[l] = rank.backward_input(l, *inputs, rank.weights[l])
        for l in rank.layers:
            accumulate(rank, l, rank.backward_weight(l, rank.activations.pop(l), rank.grad_activations.pop(l + 1)))
        del rank.grad_activations[0]
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def split_fsdp(rank: Rank) -> None:
    """FSDP whose gathered weights are gone when the weights' halves come; clips by the sum over slices."""
    await _split_fsdp(rank, save=True)


async def split_fsdp_recomputed(rank: Rank) -> None:
    await _split_fsdp(rank, save=False)


async def _split_fsdp(rank: Rank, *, save: bool) -> None:
    last = len(rank.layers)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            full = await rank.all_gather(rank.weights[l])
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], full, save=save)
        rank.grad_activations[last] = rank.loss(rank.activations.pop(last))
        for l in reversed(rank.layers):
            full = await rank.all_gather(rank.weights[l])
            inputs = rank.activations[l], rank.grad_activations[l + 1]
            rank.grad_activations[l] = rank.backward_input(l, *inputs, full)
        for l in reversed(rank.layers):
            accumulate(rank, l, rank.backward_weight(l, rank.activations.pop(l), rank.grad_activations.pop(l + 1)))
    for l in rank.layers:
        rank.grad_weights["slice", l] = await rank.reduce_scatter(rank.grad_weights.pop(l))
        part = rank.norm(l, rank.grad_weights["slice", l])
        rank.scalars[0] = rank.scalars[0] + part if l else part
    rank.scalars[0] = await rank.all_reduce(rank.scalars[0])
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(("slice", l)), rank.weights[l], rank.opt_states[l], rank.scalars[0]
        )


async def split_pipeline(rank: Rank) -> None:
    """A stage a rank; each sends its input's gradient before it turns to its weights; the norm goes round in a ring."""
    stage, last = rank.stage_layers(), rank.index == rank.world - 1
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        arriving = None if not rank.index else rank.recv(source=rank.index - 1, expect=("activations", stage[0], m))
        rank.activations[stage[0], m] = rank.load_batch([m]) if arriving is None else await arriving
        for l in stage:
            rank.activations[l + 1, m] = rank.forward(l, rank.activations[l, m], rank.weights[l])
        out = rank.activations.pop((stage[-1] + 1, m))
        if last:
            rank.grad_activations[stage[-1] + 1, m] = rank.loss(out)
        else:
            await rank.send(out, to=rank.index + 1)
    for m in rank.microbatches:
        if not last:
            rank.grad_activations[stage[-1] + 1, m] = await rank.recv(source=rank.index + 1)
        for l in reversed(stage):
            inputs = rank.activations[l, m], rank.grad_activations[l + 1, m]
            rank.grad_activations[l, m] = rank.backward_input(l, *inputs, rank.weights[l])
        below = rank.grad_activations.pop((stage[0], m))
        if rank.index:
            await rank.send(below, to=rank.index - 1)
    for m in reversed(rank.microbatches):
        for l in stage:
            inputs = rank.activations.pop((l, m)), rank.grad_activations.pop((l + 1, m))
            accumulate(rank, l, rank.backward_weight(l, *inputs))
    for l in stage:
        part = rank.norm(l, rank.grad_weights[l])
        rank.scalars[0] = rank.scalars[0] + part if 0 in rank.scalars else part
    if rank.index:
        rank.scalars[0] = rank.scalars[0] + await rank.recv(source=rank.index - 1)
    if not last:
        await rank.send(rank.scalars.pop(0), to=rank.index + 1)
        rank.scalars[0] = await rank.recv(source=rank.index + 1, expect=("scalars", 0, None))
    if rank.index:
        await rank.send(rank.scalars[0], to=rank.index - 1)
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars[0]
        )

"""Pipeline parallelism without microbatches: each rank stores consecutive layers, and the whole batch passes through.

Plans with the schedules of `strategies/schedules` split the batch, so that ranks work at the same time.
"""

from shardlab.language import Rank
from shardlab.strategies.registry import built_in, pipeline_mesh


@built_in(
    "the layers",
    sends="min(2, p - 1) * m * A",
    keeps="(W + G + O)/p",
    source="LLM Training Puzzles, puzzle 5",
    mesh=pipeline_mesh,
    order=9,
)
async def pipeline(rank: Rank) -> None:
    """Send activations up the ranks and their gradients down. Only one rank works at a time."""
    stage = rank.stage_layers()
    first, end = stage[0], stage[-1] + 1
    is_first, is_last = rank.index == 0, rank.index == rank.world - 1
    batch = rank.microbatches
    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    if is_first:
        rank.activations[0] = rank.load_batch(batch)
    else:
        rank.activations[first] = await rank.recv(source=rank.index - 1, expect=("activations", first, batch))
    for l in stage:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])

    if is_last:
        rank.grad_activations[end] = rank.loss(rank.activations.pop(end))
    else:
        await rank.send(rank.activations.pop(end), to=rank.index + 1)
        rank.grad_activations[end] = await rank.recv(source=rank.index + 1, expect=("grad_activations", end, batch))
    for l in reversed(stage):
        rank.grad_weights[l], rank.grad_activations[l] = rank.backward(
            l, rank.activations.pop(l), rank.grad_activations.pop(l + 1), rank.weights[l]
        )
    if not is_first:
        await rank.send(rank.grad_activations.pop(first), to=rank.index - 1)

    for l in stage:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )

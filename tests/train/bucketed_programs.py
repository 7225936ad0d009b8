"""Programs in which a gradient is read again after its sum, and optimizer states lie apart."""

from __future__ import annotations

from shardlab.language import Rank, Value
from tests.support.passing import gradients


async def apart(rank: Rank) -> None:
    """Each rank steps two slices that lie apart."""
    n = rank.world
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        parts = [rank.load_opt_state(l, rank.index + n * i, 2 * n) for i in range(2)]
        rank.opt_states[l] = rank.concatenate(parts)
    for l, gradient in gradients(rank):
        rank.grad_weights[l] = await rank.all_reduce(gradient)
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.update(
            l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l]
        )
    for l in rank.layers:
        rank.weights[l] = await rank.all_gather(rank.weights[l])
        for i in range(2):
            rank.opt_states[l, i] = rank.slice(rank.opt_states[l], i, 2)
        del rank.opt_states[l]


async def twice(rank: Rank) -> None:
    """Every microbatch's gradients are summed over ranks to be looked at, and then added up."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for i, m in enumerate(rank.share()):
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        grad = rank.loss(rank.activations.pop(len(rank.layers)))
        own: dict[int, Value] = {}
        for l in reversed(rank.layers):
            own[l], grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
            if i:
                own[l] = rank.grad_weights.pop(l) + own[l]
            rank.grad_weights[l] = own[l]
        if not i:
            looked = [rank.all_reduce(own[l]) for l in rank.layers]
            for handle in looked:
                await handle
    for l in rank.layers:
        total = await rank.all_reduce(rank.grad_weights.pop(l))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

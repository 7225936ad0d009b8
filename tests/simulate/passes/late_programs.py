"""Small programs, right but slow: each waits for something that one pass moves."""

from __future__ import annotations

from shardlab.check import Checked, check
from shardlab.language import Rank, Strategy, trace
from tests.support.passing import gradients


def checked(strategy: Strategy, ranks: int, layers: int = 4, microbatches: int = 4) -> Checked:
    return check(trace(strategy, ranks, layers, microbatches))


async def awaited_at_once(rank: Rank) -> None:
    """Data parallel; every gradient's sum is awaited before the layer below is computed."""
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def received_late(rank: Rank) -> None:
    """A pipeline of two ranks with a layer each; a message is asked for when there is nothing else left to do."""
    l, other = rank.index, 1 - rank.index
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for i in rank.microbatches:
        rank.activations[l, i] = await rank.recv(source=other) if rank.index else rank.load_batch([i])
        rank.activations[l + 1, i] = rank.forward(l, rank.activations[l, i], rank.weights[l])
        if not rank.index:
            rank.send(rank.activations.pop((l + 1, i)), to=other)
    for i in rank.microbatches:
        grad = rank.loss(rank.activations.pop((l + 1, i))) if rank.index else await rank.recv(source=other)
        grad_weight, grad = rank.backward(l, rank.activations.pop((l, i)), grad, rank.weights[l])
        if rank.index:
            rank.send(grad, to=other)
        rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if i else grad_weight
    gradient = rank.grad_weights.pop(l)
    rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def updated_last(rank: Rank) -> None:
    """One device; updates wait for all gradients, and the first layer's weight is read once more before them."""
    for l, grad_weight in gradients(rank):
        rank.grad_weights[l] = grad_weight
    rank.activations["again"] = rank.forward(0, rank.load_batch(rank.share()), rank.weights[0], save=False)
    for l in reversed(rank.layers):
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])

"""Small whole programs, each with one thing to see in its timeline."""

from __future__ import annotations

from shardlab.language import Rank
from tests.support.passing import gradients


async def uneven(rank: Rank) -> None:
    """Data parallel; rank 0 has one microbatch, rank 1 all others."""
    mine = [0] if rank.index == 0 else list(rank.microbatches)[1:]
    for l, grad_weight in gradients(rank, mine):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def reductions_at_once(rank: Rank) -> None:
    """Data parallel; all gradients are computed first, and then reduced by collectives that are all issued at once."""
    for l, grad_weight in gradients(rank):
        rank.grad_weights[l] = grad_weight
    handles = {l: rank.all_reduce(rank.grad_weights.pop(l)) for l in rank.layers}
    for l, handle in handles.items():
        rank.weights[l], rank.opt_states[l] = rank.update(l, await handle, rank.weights[l], rank.opt_states[l])


async def prefetching(rank: Rank) -> None:
    """Fully sharded; every layer is gathered at the start, while earlier ones compute, and kept for the backward."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, rank.index, rank.world)
    rank.activations[0] = rank.load_batch(rank.share())
    handles = {l: rank.all_gather(rank.weights[l]) for l in rank.layers}
    for l in rank.layers:
        rank.weights[l, "full"] = await handles[l]
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l, "full"])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights.pop((l, "full")))
        rank.grad_weights[l] = await rank.reduce_scatter(grad_weight)
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def early_receive(rank: Rank) -> None:
    """A pipeline of two ranks and two layers; both post their receive before anything else."""
    l, other = rank.index, 1 - rank.index
    store = "activations" if rank.index else "grad_activations"
    handle = rank.recv(source=other, expect=(store, 1, rank.microbatches))
    rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    if rank.index == 0:
        rank.activations[0] = rank.load_batch(rank.microbatches)
        await rank.send(rank.forward(0, rank.activations[0], rank.weights[0]), to=1)
        grad_weight, _ = rank.backward(0, rank.activations.pop(0), await handle, rank.weights[0])
    else:
        rank.activations[1] = await handle
        grad = rank.loss(rank.forward(1, rank.activations[1], rank.weights[1]))
        grad_weight, grad = rank.backward(1, rank.activations.pop(1), grad, rank.weights[1])
        rank.send(grad, to=0)
    rank.weights[l], rank.opt_states[l] = rank.update(l, grad_weight, rank.weights[l], rank.opt_states[l])


async def recomputing(rank: Rank) -> None:
    """One device; nothing is saved for the backward pass."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.microbatches)
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l], save=False)
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        rank.grad_weights[l], grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
    for l in rank.layers:
        gradient = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, gradient, rank.weights[l], rank.opt_states[l])


async def reduction_before_a_send(rank: Rank) -> None:
    """Rank 1 comes last to a reduction and at the same moment starts to send what rank 0 waits for."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.activations[0] = rank.load_batch([0] if rank.index == 0 else [1, 2])
    rank.activations[1] = rank.forward(0, rank.activations[0], rank.weights[0])
    gradient = rank.loss(rank.activations[1])
    grad_weight, rank.grad_activations[0] = rank.backward(0, rank.activations[0], gradient, rank.weights[0])
    total = rank.all_reduce(grad_weight)
    if rank.index == 1:
        rank.send(rank.activations[1], to=0)
    else:
        rank.activations["theirs"] = await rank.recv(source=1, expect=("activations", 1, [1, 2]))
    rank.weights[0], rank.opt_states[0] = rank.update(0, await total, rank.weights[0], rank.opt_states[0])

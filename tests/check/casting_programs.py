"""Programs that move values in fewer bytes than layers compute in, or sum them in more."""

from __future__ import annotations

from shardlab.language import Rank
from tests.support.passing import gradients


async def gradients_in_half(rank: Rank) -> None:
    """Data parallelism whose gradients travel in bfloat16 (PyTorch's communication hook `bf16_compress_hook`)."""
    for l, grad_weight in gradients(rank):
        rank.grad_weights[l] = await rank.all_reduce(rank.cast(grad_weight, "bfloat16"))
    for l in rank.layers:
        squares = rank.norm(l, rank.grad_weights[l])
        rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"])
        rank.weights[l], rank.opt_states[l] = update


async def weights_in_half(rank: Rank) -> None:
    """FSDP whose weights are gathered in float16 and whose gradients are summed in float32."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, shard=rank.index, of=rank.world)
    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            full = rank.cast(await rank.all_gather(rank.cast(rank.weights[l], "float16")))
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], full)
        grad = rank.loss(rank.activations.pop(len(rank.layers)))
        for l in reversed(rank.layers):
            full = rank.cast(await rank.all_gather(rank.cast(rank.weights[l], "float16")))
            grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, full)
            mine = await rank.reduce_scatter(rank.cast(grad_weight, "float32"))
            rank.grad_weights[l] = rank.grad_weights[l] + mine if l in rank.grad_weights else mine
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = update


async def messages_in_half(rank: Rank) -> None:
    """A pipeline of two stages whose activations and gradients travel in bfloat16."""
    mine, other = rank.stage_layers(), 1 - rank.index
    for l in mine:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    for m in rank.microbatches:
        first = mine[0]
        if rank.index == 0:
            rank.activations[first] = rank.load_batch([m])
        else:
            rank.activations[first] = rank.cast(await rank.recv(source=other, expect=("activations", first, m)))
        for l in mine:
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
        out = rank.activations.pop(mine[-1] + 1)
        if rank.index == 0:
            await rank.send(rank.cast(out, "bfloat16"), to=other)
            grad = rank.cast(await rank.recv(source=other, expect=("grad_activations", mine[-1] + 1, m)))
        else:
            grad = rank.loss(out)
        for l in reversed(mine):
            grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
            rank.grad_weights[l] = rank.grad_weights[l] + grad_weight if l in rank.grad_weights else grad_weight
        if rank.index == 1:
            await rank.send(rank.cast(grad, "bfloat16"), to=other)
    for l in mine:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = update


RIGHT = [gradients_in_half, weights_in_half, messages_in_half]

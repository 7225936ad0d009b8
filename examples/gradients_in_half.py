"""Data parallelism whose gradients travel in bfloat16, and are summed there: half the bytes on the wire.

PyTorch's DDP does this with the communication hook `bf16_compress_hook`.
"""

from shardlab.language import Rank


async def gradients_in_half(rank: Rank) -> None:
    """Each layer's gradient is cast for the way alone; its update computes in the run's own numbers."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        made, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        rank.grad_weights[l] = await rank.all_reduce(rank.cast(made, "bfloat16"))
    for l in rank.layers:
        made = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l])
        rank.weights[l], rank.opt_states[l] = made

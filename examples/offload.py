"""Data parallelism whose optimizer lives in the host's memory (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840)."""

from shardlab.language import Handle, Rank, Value


async def offload(rank: Rank) -> None:
    for l in rank.layers:
        rank.weights[l, "host"], rank.opt_states[l] = rank.load_weights(l, place="host")
        rank.weights[l] = await rank.reload(rank.weights[l, "host"])
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    leaving: dict[int, Handle[Value]] = {}
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights.pop(l))
        leaving[l] = rank.offload(await rank.all_reduce(grad_weight))
    for l in reversed(rank.layers):
        rank.weights[l, "host"], rank.opt_states[l] = rank.update(
            l, await leaving[l], rank.weights[l, "host"], rank.opt_states[l]
        )

"""A parameter server: rank 0 alone keeps weights and optimizer states, and all others compute for it."""

from shardlab.language import Rank

SERVER = 0


async def parameter_server(rank: Rank) -> None:
    is_server = rank.index == SERVER
    if is_server:
        for l in rank.layers:
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.weights[l] = await rank.broadcast(rank.weights[l] if is_server else None, root=SERVER)
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        total = await rank.reduce(grad_weight, root=SERVER)
        if total is None:
            del rank.weights[l]
        else:
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])

"""Programs of which every op is right by itself, and which do not compute one device's step."""

from __future__ import annotations

from shardlab.language import Rank, Value


async def _total(rank: Rank) -> Value:
    """The gradient of layer 0, the only one, which has been loaded."""
    rank.activations[0] = rank.load_batch(rank.share())
    gradient = rank.loss(rank.forward(0, rank.activations[0], rank.weights[0]))
    rank.grad_weights[0] = await rank.all_reduce(
        rank.backward(0, rank.activations.pop(0), gradient, rank.weights[0])[0]
    )
    return rank.grad_weights[0]


async def two_states_of_one_weight(rank: Rank) -> None:
    """A state of the whole layer, and one of half of it: both step the weight that is kept here."""
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)
    rank.opt_states["half"] = rank.load_opt_state(0, rank.index, rank.world)
    total, other = await _total(rank), 1 - rank.index
    rank.weights["copy"] = await rank.exchange(rank.weights[0], to=other, source=other)
    rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])
    _, rank.opt_states["half"] = rank.update(0, total, rank.weights.pop("copy"), rank.opt_states["half"])


async def stepped_after_it_arrived(rank: Rank) -> None:
    """Rank 1 tells rank 0 the new weight; rank 0 then steps half of it, given a copy of the old one."""
    await _step_after_messages(rank, lets_go=True)


async def stepped_while_it_arrived_apart(rank: Rank) -> None:
    """Rank 1 tells rank 0 the new weight while the old one is still there, and it has room of its own: it is right."""
    await _step_after_messages(rank, lets_go=False)


async def _step_after_messages(rank: Rank, *, lets_go: bool) -> None:
    rank.weights[0] = rank.load_weight(0)
    rank.opt_states[0] = rank.load_opt_state(0, 0, 2 - rank.index)
    total = await _total(rank)
    if rank.index == 1:
        await rank.send(rank.weights[0], to=0)
        rank.weights[0], rank.opt_states[0] = rank.update(0, total, rank.weights[0], rank.opt_states[0])
        await rank.send(rank.weights[0], to=0)
        return
    rank.weights["old"] = await rank.recv(source=1)
    if lets_go:
        del rank.weights[0]
    rank.weights["new"] = await rank.recv(source=1)
    _, rank.opt_states[0] = rank.update(0, total, rank.weights.pop("old"), rank.opt_states[0])


async def sent_while_it_is_written(rank: Rank) -> None:
    """The kept weight is on its way to the other rank when an update, given a copy of it, writes over half of it."""
    rank.weights[0], rank.opt_states[0] = rank.load_weight(0), rank.load_opt_state(0, rank.index, rank.world)
    total, other = await _total(rank), 1 - rank.index
    rank.weights["copy"] = await rank.exchange(rank.weights[0], to=other, source=other)
    sending = rank.send(rank.weights[0], to=other)
    receiving = rank.recv(source=other)
    new, rank.opt_states[0] = rank.update(0, total, rank.weights.pop("copy"), rank.opt_states[0])
    await sending
    await receiving
    rank.weights[0] = await rank.all_gather(new)

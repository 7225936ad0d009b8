"""Programs that keep values in the host's memory and on the disk."""

from __future__ import annotations

from shardlab.language import Rank
from tests.support.passing import gradients


async def offloaded(rank: Rank) -> None:
    """Data parallelism whose optimizer works in the host's memory, on weights that lie there (ZeRO-Offload)."""
    for l in rank.layers:
        rank.weights[l, "host"], rank.opt_states[l] = rank.load_weights(l, place="host")
        rank.weights[l] = await rank.reload(rank.weights[l, "host"])
    for l, grad_weight in gradients(rank):
        del rank.weights[l]
        total = await rank.offload(await rank.all_reduce(grad_weight))
        rank.weights[l, "host"], rank.opt_states[l] = rank.update(l, total, rank.weights[l, "host"], rank.opt_states[l])


async def state_away(rank: Rank) -> None:
    """An optimizer state that lies on the disk, and comes for its update."""
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l)
        rank.opt_states[l] = rank.load_opt_state(l, place="disk")
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        state = await rank.reload(rank.opt_states.pop(l))
        rank.weights[l], state = rank.update(l, total, rank.weights[l], state)
        rank.opt_states[l] = await rank.offload(state, "disk")


async def weights_away(rank: Rank) -> None:
    """Weights that lie on the disk and are updated on the device; activations that wait in the host's memory."""
    for l in rank.layers:
        rank.weights[l, "disk"] = rank.load_weight(l, place="disk")
        rank.opt_states[l] = rank.load_opt_state(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        weight = await rank.reload(rank.weights[l, "disk"])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], weight, save=False)
        rank.activations[l] = await rank.offload(rank.activations.pop(l))
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        weight = rank.weights[l] = await rank.reload(rank.weights.pop((l, "disk")))
        activation = await rank.reload(rank.activations.pop(l))
        grad_weight, grad = rank.backward(l, activation, grad, weight)
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, weight, rank.opt_states[l])
        rank.weights[l, "disk"] = await rank.offload(rank.weights.pop(l), "disk")


async def sums_away(rank: Rank) -> None:
    """Gradients of single microbatches that are added up in the host's memory, where the optimizer clips by them."""
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, place="host")
    for m in rank.share():
        rank.activations[0] = rank.load_batch([m])
        for l in rank.layers:
            weight = await rank.reload(rank.weights[l])
            rank.activations[l + 1] = rank.forward(l, rank.activations[l], weight)
        grad = rank.loss(rank.activations.pop(len(rank.layers)))
        for l in reversed(rank.layers):
            weight = await rank.reload(rank.weights[l])
            grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, weight)
            sums = await rank.offload(await rank.all_reduce(grad_weight))
            rank.grad_weights[l] = rank.grad_weights[l] + sums if l in rank.grad_weights else sums
    for l in rank.layers:
        squares = rank.norm(l, rank.grad_weights[l])
        rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"])
        rank.weights[l], rank.opt_states[l] = update


async def state_goes_to_weight(rank: Rank) -> None:
    """Optimizer states that lie on the device or the disk, and go to the host's memory, where the weights lie."""
    places = {l: ("", "disk")[l % 2] for l in rank.layers}
    for l in rank.layers:
        rank.weights[l] = rank.load_weight(l, place="host")
        rank.opt_states[l] = rank.load_opt_state(l, place=places[l])
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        weight = await rank.reload(rank.weights[l])
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], weight)
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        weight = await rank.reload(rank.weights[l])
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, weight)
        total = await rank.offload(await rank.all_reduce(grad_weight))
        if places[l]:
            rank.opt_states[l] = await rank.reload(rank.opt_states.pop(l))
        state = await rank.offload(rank.opt_states.pop(l))
        rank.weights[l], state = rank.update(l, total, rank.weights[l], state)
        rank.opt_states[l] = await rank.reload(state)
        if places[l]:
            rank.opt_states[l] = await rank.offload(rank.opt_states.pop(l), places[l])


async def clipped_here(rank: Rank) -> None:
    """Weights that lie in the host's memory, and are updated on the device by a gradient that is clipped."""
    for l in rank.layers:
        weight = rank.load_weight(l, place="host")
        rank.weights[l], rank.opt_states[l] = await rank.reload(weight), rank.load_opt_state(l)
    for l, grad_weight in gradients(rank):
        rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        squares = rank.norm(l, rank.grad_weights[l])
        rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"])
        rank.weights[l], rank.opt_states[l] = update
        rank.weights[l] = await rank.offload(rank.weights[l])


async def slice_outlives_the_update(rank: Rank) -> None:
    """Weights kept on the host; a slice of the copy that is stepped, which nobody reads, still lives then."""
    for l in rank.layers:
        weight = rank.load_weight(l, place="host")
        rank.weights[l], rank.opt_states[l] = await rank.reload(weight), rank.load_opt_state(l)
        rank.weights["half", l] = rank.slice(rank.weights[l], 0, 2)
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        del rank.weights["half", l]
        rank.weights[l] = await rank.offload(rank.weights[l])


async def slices_are_stepped_one_by_one(rank: Rank) -> None:
    """Weights kept on the host; the copy is gone before slices of it are stepped, of the first also a new slice."""
    for l in rank.layers:
        rank.weights[l, "host"] = rank.load_weight(l, place="host")
        for half in range(2):
            rank.opt_states[l, half] = rank.load_opt_state(l, half, 2)
        rank.weights[l] = await rank.reload(rank.weights[l, "host"])
    for l, grad_weight in gradients(rank):
        total = rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        for half in range(2):
            rank.weights[l, half] = rank.slice(rank.weights[l], half, 2)
        del rank.weights[l]
        for half in range(2):
            update = rank.update(l, total, rank.weights[l, half], rank.opt_states[l, half])
            rank.weights[l, half], rank.opt_states[l, half] = update
            quarters = [rank.slice(rank.weights[l, half], i, 2) for i in range(2)]
            rank.weights[l, half] = rank.concatenate(quarters) if half else quarters[0]
            if not half:
                rank.weights[l, half, "rest"] = quarters[1]
        del rank.grad_weights[l], rank.weights[l, "host"]
        pieces = [rank.weights.pop(key) for key in [(l, 0), (l, 0, "rest"), (l, 1)]]
        rank.weights[l, "host"] = await rank.offload(rank.concatenate(pieces))


async def two_copies_are_stepped(rank: Rank) -> None:
    """Weights kept on the disk that are loaded twice; each copy is stepped in a half, and the other one is read on."""
    for l in rank.layers:
        rank.weights[l, "disk"] = rank.load_weight(l, place="disk")
        for half in range(2):
            rank.opt_states[l, half] = rank.load_opt_state(l, half, 2)
        rank.weights[l] = await rank.reload(rank.weights[l, "disk"])
    for l, grad_weight in gradients(rank):
        total = rank.grad_weights[l] = await rank.all_reduce(grad_weight)
        rank.weights[l, "copy"] = await rank.reload(rank.weights.pop((l, "disk")))
        new = rank.update(l, total, rank.weights.pop(l), rank.opt_states[l, 0])
        rank.weights[l, 0], rank.opt_states[l, 0] = new
        await rank.all_gather(rank.slice(rank.weights[l, "copy"], rank.index, rank.world))
        new = rank.update(l, total, rank.weights.pop((l, "copy")), rank.opt_states[l, 1])
        rank.weights[l, 1], rank.opt_states[l, 1] = new
        del rank.grad_weights[l]
        whole = rank.concatenate(rank.weights.pop((l, half)) for half in range(2))
        rank.weights[l, "disk"] = await rank.offload(whole, "disk")


async def rounded_on_its_way(rank: Rank) -> None:
    """Weights kept on the host; the copy that is stepped came in bfloat16, so it is renewed before."""
    for l in rank.layers:
        weight = await rank.reload(rank.load_weight(l, place="host"))
        rank.weights[l], rank.opt_states[l] = rank.cast(rank.cast(weight, "bfloat16")), rank.load_opt_state(l)
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])
        rank.weights[l] = await rank.offload(rank.weights[l])


CARRIED = [slice_outlives_the_update, slices_are_stepped_one_by_one, two_copies_are_stepped, rounded_on_its_way]
"""Programs whose updates write copies of weights that are kept elsewhere."""

RIGHT = [offloaded, state_away, weights_away, sums_away, state_goes_to_weight, clipped_here, *CARRIED]

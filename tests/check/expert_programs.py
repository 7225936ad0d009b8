"""A right program that combines parts of the experts which lie apart: quarters 0 and 2, and quarters 1 and 3."""

from __future__ import annotations

from shardlab.language import Mesh, Rank, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF


def combined_apart_mesh(ranks: int) -> Mesh:
    return Mesh(cp=2, ep=ranks // 2)


async def combined_apart(rank: Rank) -> None:
    """Four ranks have a quarter of the experts and of the microbatches each.

    Buffers go there over cp, then over ep. What comes back over cp alone is two quarters of the experts, for the tokens
    of two ranks; two ranks of ep have the two terms of each result.
    """
    layers = rank.sizes.signatures
    xs, dxs = rank.activations, rank.grad_activations
    for l, layer in enumerate(layers):
        cut = (rank.index, rank.world) if "expert" in layer.cut else (0, 1)
        rank.weights[l] = rank.load_weight(l, *cut)
        if rank.sizes.weights[l]:
            rank.opt_states[l] = rank.load_opt_state(l, *cut)
    xs[0] = rank.load_batch(rank.share())
    for l, layer in enumerate(layers):
        if "expert" in layer.cut:
            for axis in ("cp", "ep"):
                xs[l] = await rank.all_to_all(xs[l], axis=axis)
            xs["made"] = rank.forward(l, xs[l], rank.weights[l])
            xs[l + 1] = await rank.all_to_all(xs.pop("made"), axis="cp")
            continue
        combines = layer.routes and not layer.deals
        if combines:
            rank.routing[l] = await of_both(rank, rank.routing[l])
        inputs = tuple(rank.store(port.kind)[port.layer] for port in layer.inputs)
        for port, output in zip(layer.outputs, rank.forward(l, inputs, rank.weights[l]), strict=True):
            rank.store(port.kind)[port.layer] = await own_of(rank, output) if combines else output
        if layer.projects:
            xs[l + 1] = rank.attend(l, rank.queries[l], rank.keys_values[l])
    dxs[len(layers)] = rank.loss(xs[len(layers)])
    for l, layer in reversed(list(enumerate(layers))):
        combines = layer.routes and not layer.deals
        if "expert" in layer.cut:
            dxs[l + 1] = await rank.all_to_all(dxs[l + 1], axis="cp")
        if combines:
            dxs[l + 1] = await of_both(rank, dxs[l + 1])
        if layer.projects:
            met = rank.attend_backward(l, rank.queries[l], rank.keys_values[l], xs[l + 1], dxs[l + 1])
            rank.grad_queries[l], rank.grad_keys_values[l] = met
        gradients = tuple(rank.store(GRADIENT_OF[port.kind])[port.layer] for port in layer.outputs)
        rank.grad_weights[l], dxs[l], *carried = rank.backward(l, xs[l], gradients, rank.weights[l])
        for port, gradient in zip(layer.inputs[1:], carried, strict=True):
            back = await own_of(rank, gradient) if combines else gradient
            rank.store(GRADIENT_OF[port.kind])[port.layer] = back
        if "expert" in layer.cut:
            for axis in ("ep", "cp"):
                dxs[l] = await rank.all_to_all(dxs[l], axis=axis)
    for l, layer in enumerate(layers):
        if rank.sizes.weights[l]:
            grad = rank.grad_weights[l]
            total = grad if "expert" in layer.cut else await rank.all_reduce(grad)
            rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def of_both(rank: Rank, mine: Value) -> Value:
    """Return the tokens of the two ranks whose tokens are combined here."""
    store = rank.store(mine.spec.kind)
    for axis in ("cp", "ep"):
        mine = store["all"] = await rank.all_gather(mine, axis=axis)
    return rank.slice(mine, rank.coordinate("cp"), 2)


async def own_of(rank: Rank, term: Value) -> Value:
    """Return this rank's tokens of the sum of terms."""
    store = rank.store(term.spec.kind)
    store["sum"] = await rank.all_reduce(term, axis="ep")
    store["all"] = await rank.all_gather(store["sum"], axis="cp")
    store["two"] = rank.slice(store["all"], rank.coordinate("ep"), 2)
    return rank.slice(store["two"], rank.coordinate("cp"), 2)

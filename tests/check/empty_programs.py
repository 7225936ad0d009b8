"""Right programs with layers that have no parameters, or with a rank that has nothing to do."""

from __future__ import annotations

from shardlab.language import Kind, Mesh, Rank, Value
from shardlab.language.rules.layer_rules import GRADIENT_OF
from tests.support.passing import gradients


def layers_without_parameters_mesh(ranks: int) -> Mesh:
    return Mesh(tp=ranks)


async def layers_without_parameters(rank: Rank) -> None:
    """A mixture on a mesh with tp: layers that combine experts' results have no parameters, and are treated as others.

    They are loaded in slices, gathered, averaged, scattered by a root and stepped, all of which moves no byte.
    """
    layers, last = rank.sizes.signatures, rank.layers[-1]
    xs, carried = rank.activations, dict[Kind, Value]()
    empty = [l for l in rank.weighted_layers if not rank.sizes.weights[l]]
    for l in rank.weighted_layers:
        cut = (rank.index, rank.world) if l in empty or layers[l].sliced else (0, 1)
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l, *cut)
    for l in empty:
        rank.weights["full", l] = await rank.all_gather(rank.weights[l])
    weights = {l: rank.weights["full", l] if l in empty else rank.weights[rank.weight_of(l)] for l in rank.layers}
    xs[0] = rank.load_batch(rank.microbatches)
    for l, layer in enumerate(layers):
        outputs = rank.forward(l, (xs[l], *[carried.pop(port.kind) for port in layer.inputs[1:]]), weights[l])
        for port, value in zip(layer.outputs[1:], outputs[1:], strict=True):
            carried[port.kind] = rank.store(port.kind)["x"] = value
        xs[l + 1] = await rank.all_reduce(outputs[0]) if layer.sliced and l < last else outputs[0]
    stats = await rank.all_gather(rank.loss_stats(xs[last + 1]))
    gradient = rank.loss(xs.pop(last + 1), stats)
    for l, layer in reversed([*enumerate(layers)]):
        gradients = (gradient, *[carried.pop(port.kind) for port in layer.outputs[1:]])
        rank.grad_weights[l], gradient, *rest = rank.backward(l, xs.pop(l), gradients, weights[l])
        for port, value in zip(layer.inputs[1:], rest, strict=True):
            carried[port.kind] = rank.store(GRADIENT_OF[port.kind])["g"] = value
        if layer.sliced and l:
            gradient = await rank.all_reduce(gradient)
    for l in empty:
        rank.grad_weights[l] = await rank.all_reduce(rank.grad_weights[l], reduction="mean")
        rank.grad_weights[l] = await rank.scatter(None if rank.index else rank.grad_weights[l], root=0)
        del rank.weights["full", l]
    for l in rank.weighted_layers:
        total = rank.grad_weights.pop(l)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def last_rank_is_idle(rank: Rank) -> None:
    """Data parallelism, in which the last rank takes no part."""
    others = rank.world - 1
    if rank.index == others:
        return
    for l, grad_weight in gradients(rank, rank.microbatches[rank.index :: others]):
        total = await rank.all_reduce(grad_weight, among=range(others))
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


async def first_rank_is_idle(rank: Rank) -> None:
    """One rank does all the work, and clips by the gradient's norm; it is not the first."""
    if rank.index != 1:
        return
    for l, grad_weight in gradients(rank, rank.microbatches):
        rank.grad_weights[l] = grad_weight
        squares = rank.norm(l, grad_weight)
        rank.scalars["norm"] = rank.scalars["norm"] + squares if "norm" in rank.scalars else squares
    for l in rank.layers:
        update = rank.update(l, rank.grad_weights.pop(l), rank.weights[l], rank.opt_states[l], rank.scalars["norm"])
        rank.weights[l], rank.opt_states[l] = update

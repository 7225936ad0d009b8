"""Both passes of a mixture of experts."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardlab.models.mixture import Combine, Dispatch, ExpertLinear, Place, Route
from shardlab.models.tensors import mixture
from shardlab.models.tensors.backward.dense import add_product
from shardlab.models.tensors.backward.workspace import BothPasses, TensorPlaces, Weights, Workspace, passes


@passes.register
def _(primitive: Route, at: TensorPlaces) -> BothPasses:
    weight, router = at.weights["mlp.router.weight"], primitive.router
    x, gates, choices, probabilities = at.tensors["x"], at.make("gates"), at.make("choices"), at.make()

    def forward(its: Workspace) -> None:
        tensors = its.tensors
        scores = mixture.scores_of(tensors[x], its.weights[weight])
        tensors[gates], tensors[choices], tensors[probabilities] = mixture.chosen(scores, router.top_k)

    def add(rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        add_product(rooms[weight], gradient.t(), read.to(gradient.dtype))

    def backward(its: Workspace) -> None:
        read, kept = its.tensors[x], (its.tensors[probabilities], its.tensors[choices])
        gradient = mixture.scores_gradient(router, its.share, its.taken(gates), *kept)
        its.give(x, (gradient @ its.weights[weight].to(gradient.dtype)).to(read.dtype))
        its.take(add, gradient, read)

    return BothPasses(forward, backward, (x, probabilities, choices))


@passes.register
def _(primitive: Place, at: TensorPlaces) -> BothPasses:
    """Numbers of numbers, which have no gradient."""
    choices, slots = at.tensors["choices"], at.make("slots")

    def forward(its: Workspace) -> None:
        its.tensors[slots] = mixture.slots_of(primitive.router, its.tensors[choices], its.share)

    def backward(its: Workspace) -> None:
        pass

    return BothPasses(forward, backward)


@passes.register
def _(primitive: Dispatch, at: TensorPlaces) -> BothPasses:
    x, slots, made = at.tensors["x"], at.tensors["slots"], at.make("x")

    def forward(its: Workspace) -> None:
        its.tensors[made] = mixture.dispatch(primitive.router, its.tensors[x], its.tensors[slots], its.share)

    def backward(its: Workspace) -> None:
        its.give(x, mixture.gathered(its.taken(made), its.tensors[slots]).sum(-2))

    return BothPasses(forward, backward, (slots,))


@passes.register
def _(primitive: ExpertLinear, at: TensorPlaces) -> BothPasses:
    """A linear map for each expert, on one microbatch after the other; what it read is made again if it is not kept."""
    weight, bias = at.weights_of(primitive.name, primitive.bias)
    x, made = at.tensors["x"], at.make("x")
    again, sums = at.again.get(x), primitive.in_index == "ffn"

    def forward(its: Workspace) -> None:
        shift = its.weights[bias] if bias >= 0 else None
        if shift is not None and sums:
            shift = mixture.padded_bias(shift, its.share)
        its.tensors[made] = mixture.expert_linear(its.tensors[x], its.weights[weight], shift)

    def add(number: int, rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        experts = len(rooms[weight])
        for part, its in zip(torch.split(gradient, experts), torch.split(read, experts), strict=True):
            add_product(rooms[weight], part.transpose(1, 2), its)
        if bias >= 0:
            features = rooms[bias].shape[1]
            its_own = gradient.narrow(-1, number * features, features) if sums else gradient
            rooms[bias].add_(its_own.view(-1, experts, *its_own.shape[1:]).sum((0, 2)))

    def backward(its: Workspace) -> None:
        if again is not None:
            again(its)
        gradient, matrix = its.taken(made), its.weights[weight]
        its.take(partial(add, its.share.piece("ffn")[0]), gradient, its.tensors[x])
        if again is not None:
            its.tensors[x] = None
        its.give(x, torch.cat([torch.bmm(part, matrix) for part in torch.split(gradient, len(matrix))]))

    return BothPasses(forward, backward, () if again else (x,))


@passes.register
def _(primitive: Combine, at: TensorPlaces) -> BothPasses:
    x, gates, slots = (at.tensors[name] for name in ("x", "gates", "slots"))
    made = at.make("x")

    def forward(its: Workspace) -> None:
        its.tensors[made] = mixture.combine(its.tensors[x], its.tensors[gates], its.tensors[slots])

    def backward(its: Workspace) -> None:
        gradient, (buffers, weights, where) = its.taken(made), (its.tensors[place] for place in (x, gates, slots))
        weighted = gradient[..., None, :] * weights[..., None].to(gradient.dtype)
        of_gates = (mixture.gathered(buffers, where) * gradient[..., None, :]).sum(-1).to(weights.dtype)
        its.give(gates, of_gates)
        its.give(x, mixture.scattered(weighted.flatten(0, -2), where, buffers.shape[:2]))

    return BothPasses(forward, backward, (x, gates, slots))

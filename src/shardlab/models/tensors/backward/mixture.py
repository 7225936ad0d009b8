"""Passes of the primitives of a mixture of experts: route, place, dispatch, expert products and combine.

The arithmetic itself is in `shardlab.models.tensors.mixture`.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from shardlab.models.mixture import Combine, Dispatch, ExpertLinear, Place, Route
from shardlab.models.tensors import mixture
from shardlab.models.tensors.backward.dense import add_product
from shardlab.models.tensors.backward.workspace import BothPasses, Context, TensorPlaces, Weights, make_passes


@make_passes.register
def _(primitive: Route, places: TensorPlaces) -> BothPasses:
    weight, router = places.weights["mlp.router.weight"], primitive.router
    x, gates, choices, probabilities = places.tensors["x"], places.make("gates"), places.make("choices"), places.make()

    def forward(ctx: Context) -> None:
        tensors = ctx.tensors
        scores = mixture.router_scores(tensors[x], ctx.weights[weight])
        tensors[gates], tensors[choices], tensors[probabilities] = mixture.choose_experts(scores, router.top_k)

    def add(totals: Weights, gradient: Tensor, read: Tensor) -> None:
        add_product(totals[weight], gradient.t(), read.to(gradient.dtype))

    def backward(ctx: Context) -> None:
        read, routing = ctx.tensors[x], (ctx.tensors[probabilities], ctx.tensors[choices])
        gradient = mixture.scores_gradient(router, ctx.share, ctx.pop_gradient(gates), *routing)
        ctx.add_gradient(x, (gradient @ ctx.weights[weight].to(gradient.dtype)).to(read.dtype))
        ctx.accumulate(add, gradient, read)

    return BothPasses(forward, backward, (x, probabilities, choices))


@make_passes.register
def _(primitive: Place, places: TensorPlaces) -> BothPasses:
    """Slots are integers and have no gradient."""
    choices, slots = places.tensors["choices"], places.make("slots")

    def forward(ctx: Context) -> None:
        ctx.tensors[slots] = mixture.assign_slots(primitive.router, ctx.tensors[choices], ctx.share)

    def backward(ctx: Context) -> None:
        pass

    return BothPasses(forward, backward)


@make_passes.register
def _(primitive: Dispatch, places: TensorPlaces) -> BothPasses:
    x, slots, result = places.tensors["x"], places.tensors["slots"], places.make("x")

    def forward(ctx: Context) -> None:
        ctx.tensors[result] = mixture.dispatch(primitive.router, ctx.tensors[x], ctx.tensors[slots], ctx.share)

    def backward(ctx: Context) -> None:
        ctx.add_gradient(x, mixture.gather_slots(ctx.pop_gradient(result), ctx.tensors[slots]).sum(-2))

    return BothPasses(forward, backward, (slots,))


@make_passes.register
def _(primitive: ExpertLinear, places: TensorPlaces) -> BothPasses:
    """A linear map for each expert, one microbatch at a time. The input is recomputed if it is not kept."""
    weight, bias = places.weights_of(primitive.name, primitive.bias)
    x, result = places.tensors["x"], places.make("x")
    recompute, sums = places.recompute.get(x), primitive.in_index == "ffn"

    def forward(ctx: Context) -> None:
        shift = ctx.weights[bias] if bias >= 0 else None
        if shift is not None and sums:
            shift = mixture.pad_bias(shift, ctx.share)
        ctx.tensors[result] = mixture.expert_linear(ctx.tensors[x], ctx.weights[weight], shift)

    def add(number: int, totals: Weights, gradient: Tensor, read: Tensor) -> None:
        experts = len(totals[weight])
        for part, x_part in zip(torch.split(gradient, experts), torch.split(read, experts), strict=True):
            add_product(totals[weight], part.transpose(1, 2), x_part)
        if bias >= 0:
            features = totals[bias].shape[1]
            own_features = gradient.narrow(-1, number * features, features) if sums else gradient
            totals[bias].add_(own_features.view(-1, experts, *own_features.shape[1:]).sum((0, 2)))

    def backward(ctx: Context) -> None:
        if recompute is not None:
            recompute(ctx)
        gradient, matrix = ctx.pop_gradient(result), ctx.weights[weight]
        ctx.accumulate(partial(add, ctx.share.piece("ffn")[0]), gradient, ctx.tensors[x])
        if recompute is not None:
            ctx.tensors[x] = None
        ctx.add_gradient(x, torch.cat([torch.bmm(part, matrix) for part in torch.split(gradient, len(matrix))]))

    return BothPasses(forward, backward, () if recompute else (x,))


@make_passes.register
def _(primitive: Combine, places: TensorPlaces) -> BothPasses:
    x, gates, slots = (places.tensors[name] for name in ("x", "gates", "slots"))
    result = places.make("x")

    def forward(ctx: Context) -> None:
        ctx.tensors[result] = mixture.combine(ctx.tensors[x], ctx.tensors[gates], ctx.tensors[slots])

    def backward(ctx: Context) -> None:
        gradient = ctx.pop_gradient(result)
        buffers, weights, slot_numbers = (ctx.tensors[place] for place in (x, gates, slots))
        weighted = gradient[..., None, :] * weights[..., None].to(gradient.dtype)
        of_gates = (mixture.gather_slots(buffers, slot_numbers) * gradient[..., None, :]).sum(-1).to(weights.dtype)
        ctx.add_gradient(gates, of_gates)
        ctx.add_gradient(x, mixture.scatter_to_slots(weighted.flatten(0, -2), slot_numbers, buffers.shape[:2]))

    return BothPasses(forward, backward, (x, gates, slots))

"""Both passes of a normalisation."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
from torch import Tensor

from shardlab.models.primitives import Norm
from shardlab.models.tensors.both_passes.primitive import BothPasses, TensorPlaces, Weights, Workspace, passes
from shardlab.models.tensors.rms_norm import scaled


@passes.register
def _(primitive: Norm, at: TensorPlaces) -> BothPasses | None:
    if primitive.rms:
        return None if at.device == "cuda" else _rms(primitive, at)  # where torch has a kernel for it
    return _layer_norm(primitive, at)


def _layer_norm(primitive: Norm, at: TensorPlaces) -> BothPasses:
    weight, bias = at.weights_of(primitive.name, primitive.bias)
    s, made, mean, scale = at.tensors["s"], at.make("x"), at.make(), at.make()
    eps, wanted = primitive.eps, [True, True, bias >= 0]
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

    def forward(its: Workspace) -> None:
        x, weights = its.tensors[s], its.weights
        found = torch.native_layer_norm(x, x.shape[-1:], weights[weight], weights[bias] if bias >= 0 else None, eps)
        its.tensors[made], its.tensors[mean], its.tensors[scale] = found

    def add(rooms: Weights, of_weight: Tensor, of_bias: Tensor) -> None:
        rooms[weight].add_(of_weight)
        if bias >= 0:
            rooms[bias].add_(of_bias)

    def backward(its: Workspace) -> None:
        kept, weights = its.tensors, its.weights
        x, shift = kept[s], weights[bias] if bias >= 0 else None
        of_x, of_weight, of_bias = layer_norm_backward(
            its.taken(made), x, x.shape[-1:], kept[mean], kept[scale], weights[weight], shift, wanted
        )
        its.give(s, of_x)
        its.take(add, of_weight, of_bias if bias >= 0 else of_weight)

    return BothPasses(forward, backward, (s, mean, scale))


def _rms(primitive: Norm, at: TensorPlaces) -> BothPasses:
    """Keeps 1/deviation of each token: autograd would keep the normalised input as well as the input."""
    weight = at.weights[f"{primitive.name}.weight"]
    s, made, scale = at.tensors["s"], at.make("x"), at.make()

    def forward(its: Workspace) -> None:
        normalised, its.tensors[scale] = scaled(its.tensors[s], primitive.eps)
        its.tensors[made] = normalised * its.weights[weight]

    def add(rooms: Weights, of_weight: Tensor, _: Tensor) -> None:
        rooms[weight].add_(of_weight)

    def backward(its: Workspace) -> None:
        gradient = its.taken(made)
        normalised = its.tensors[s] * its.tensors[scale]
        given = gradient * its.weights[weight]
        of_weight = (gradient * normalised).sum(0)
        its.give(s, (given - normalised * (given * normalised).mean(-1, keepdim=True)) * its.tensors[scale])
        its.take(add, of_weight, of_weight)

    return BothPasses(forward, backward, (s, scale))

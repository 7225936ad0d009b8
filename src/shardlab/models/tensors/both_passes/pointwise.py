"""Both passes of activation functions, and of the sum of a branch and the residual stream."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.mixture import ExpertActivate
from shardlab.models.primitives import Activate, Activation, Add
from shardlab.models.tensors.activations import activated
from shardlab.models.tensors.both_passes.primitive import BothPasses, TensorPlaces, Weights, Workspace, passes


@passes.register
def _(primitive: Activate, at: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, primitive.tensor, at)


@passes.register
def _(primitive: ExpertActivate, at: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, "x", at)


def _activate(activation: Activation, name: str, at: TensorPlaces) -> BothPasses:
    x, made = at.tensors[name], at.make(name)

    def forward(its: Workspace) -> None:
        its.tensors[made] = activated(activation, its.tensors[x])

    def backward(its: Workspace) -> None:
        its.give(x, _activated_backward(activation, its.taken(made), its.tensors[x]))

    return BothPasses(forward, backward, (x,))


def _activated_backward(activation: Activation, gradient: Tensor, x: Tensor) -> Tensor:
    """Turn the gradient of what an activation function makes into that of the features `x` that it was given."""
    if activation == "gelu" or activation == "gelu_tanh":
        how = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward.default(gradient, x, approximate=how)
    if activation == "squared_relu":
        return F.relu(x).mul_(gradient).mul_(2)
    gate, up = x.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward.default(gradient * up, gate), gradient * F.silu(gate)], -1)


@passes.register
def _(primitive: Add, at: TensorPlaces) -> BothPasses:
    bias = at.weights[primitive.bias] if primitive.bias else -1
    x, s, total, mask, block = at.tensors[primitive.branch], at.tensors["s"], at.make("s"), at.make(), at.block

    def forward(its: Workspace) -> None:
        tensors = its.tensors
        branch = tensors[x] + its.weights[bias] if bias >= 0 else tensors[x]
        dropped = its.factor(primitive, block) if primitive.drops else None
        if dropped is None:
            tensors[total] = tensors[s] + branch
        else:
            tensors[mask] = dropped.flatten(0, 1)
            tensors[total] = torch.addcmul(tensors[s], branch, tensors[mask])

    def add(rooms: Weights, of_bias: Tensor, _: Tensor) -> None:
        rooms[bias].add_(of_bias)

    def backward(its: Workspace) -> None:
        gradient = its.taken(total)
        of_branch = gradient if its.tensors[mask] is None else gradient * its.tensors[mask]
        its.hand_on(x, of_branch)
        its.hand_on(s, gradient)
        if bias >= 0:
            of_bias = of_branch.sum(0)
            its.take(add, of_bias, of_bias)

    return BothPasses(forward, backward, (mask,))

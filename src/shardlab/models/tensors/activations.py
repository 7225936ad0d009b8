"""What lies between the two linear maps of an MLP."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitives import Activation


def activated(activation: Activation, x: Tensor) -> Tensor:
    """Features of the first map (..., features) to those that the second one takes, (..., hidden)."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "squared_relu":
        return cast(Tensor, _SquaredReLU.apply(x))
    return cast(Tensor, _SwiGLU.apply(x))


class _SquaredReLU(torch.autograd.Function):
    """max(x, 0)^2; keeps its input, of which it can be made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        return F.relu(x).mul_(gradient).mul_(2)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, gates in the first half of the features; keeps these alone, as a fused kernel would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        of_gate = gradient * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat([of_gate, gradient * silu], -1)

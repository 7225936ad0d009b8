"""What lies between the two linear maps of an MLP."""

from __future__ import annotations

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
        return F.relu(x).square()
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up

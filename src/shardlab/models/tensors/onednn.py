"""Products by oneDNN, which torch has beside MKL: on CPUs like those on which we measured it takes less time.

`benchmarks/products.py` has the two side by side. Torch's own linear maps call MKL in float32; torch.compile calls what
is called here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitive import LARGE

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd goes through it to `x` alone. A large one is oneDNN's in float32 on a CPU, unless
    `torch.backends.mkldnn.enabled` is turned off; others are torch's own.
    """
    if _takes(x, weight):
        return cast("Tensor", _Linear.apply(x, weight.detach(), bias))
    return F.linear(x, weight.detach(), None if bias is None else bias.detach())


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map as `linear` makes it, but one that autograd is not to go through."""
    return _product(x, weight, bias) if _takes(x, weight) else F.linear(x, weight, bias)


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what a linear map read, of that of what it made."""
    return _product(gradient, weight.T) if _takes(gradient, weight) else gradient @ weight


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)  # and so handed to who has a hand in what autograd saves
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _product(gradients[0], ctx.saved_tensors[0].T), None, None


def _takes(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == torch.float32
        and weight.numel() >= LARGE
        and x.device.type == "cpu"
        and AVAILABLE
        and bool(torch.backends.mkldnn.enabled)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

"""Products by oneDNN, which torch has beside MKL: on CPUs like those on which we measured it takes less time.

`benchmarks/products.py` has the two side by side. Torch's own linear maps call MKL in float32; torch.compile calls what
is called here.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitive import LARGE

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both."""


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd does not go through it. A large one is oneDNN's in float32 on a CPU, unless
    `torch.backends.mkldnn.enabled` is turned off; others are torch's own.
    """
    return _product(x, weight, bias) if _takes(x, weight) else F.linear(x, weight, bias)


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of what a linear map read, of that of what it made."""
    return _product(gradient, weight.T) if _takes(gradient, weight) else gradient @ weight


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

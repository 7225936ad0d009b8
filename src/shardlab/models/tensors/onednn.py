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

AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd goes through it to `x` alone. It is oneDNN's in float32 on a CPU, where `torch.backends.mkldnn.enabled` is
    not turned off; elsewhere torch's own.
    """
    if AVAILABLE and torch.backends.mkldnn.enabled and x.dtype == torch.float32 and x.device.type == "cpu":
        return cast("Tensor", _Linear.apply(x, weight.detach(), bias))
    return F.linear(x, weight.detach(), None if bias is None else bias.detach())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)  # and so handed to who has a hand in what autograd saves
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _product(gradients[0], ctx.saved_tensors[0].T), None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

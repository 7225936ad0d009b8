"""Root mean square layer normalisation."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if x.is_cuda:  # where torch has a fused kernel
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return cast(Tensor, _RMSNorm.apply(x, weight, eps))


class _RMSNorm(torch.autograd.Function):
    """Written out, since autograd would keep the normalised input as well as the input; keeps 1/deviation of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = exact.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale.to(x.dtype))
        return (exact * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient,), (x, weight, scale) = gradients, ctx.saved_tensors
        normalised, of_x, of_weight = x * scale, None, None
        if ctx.needs_input_grad[0]:
            given = gradient * weight
            of_x = (given - normalised * (given * normalised).mean(-1, keepdim=True)) * scale
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normalised).flatten(0, -2).sum(0)
        return of_x, of_weight, None

"""Root mean square layer normalisation."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if x.is_cuda:  # where torch has a fused kernel
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return scaled(x, eps)[0] * weight


def scaled(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps), and what x is multiplied by, (..., 1); computed in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype), scale.to(x.dtype)

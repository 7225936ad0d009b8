"""Attention step by step, for dropout."""

from __future__ import annotations

import torch
from torch import Tensor


def attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention step by step, since the fused op draws masks of its own; shapes (rows, heads, T, size)."""
    rows, heads, tokens, size = q.shape
    future = q.new_full((tokens, tokens), float("-inf")).triu_(1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1) * mask.flatten(0, 1), v).view(rows, heads, tokens, size)

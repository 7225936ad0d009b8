"""Cross-entropy, whole or over slices of the vocabulary.

Each slice reduces its logits to three numbers a token: their maximum, the sum of exp(logit - maximum), and the
target's logit. From these numbers of all slices together follow the loss, and each slice's own gradient
(Megatron-LM's vocabulary-parallel cross-entropy; Shoeybi et al. 2019, arXiv 1909.08053, section 3). Targets of -1 do
not count. All numbers are float32 at least.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.tensors.lookup import indices_in


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens; logits (rows, T, vocabulary), targets (rows, T), -1: not counted."""
    logits = _exact(logits).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


def loss_stats(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """What the loss needs of one slice: (rows, T, 3) with maximum, sum of exp(logit - maximum), target's logit.

    The last is 0 where the target lies in another slice, so that it can be summed over slices. A slice of padding
    alone (every logit -inf) gives (-inf, 0, 0).

    Args:
        logits: (rows, T, tokens of the slice); -inf for padding.
        targets: (rows, T) in the whole vocabulary.
        first: the slice's first token.
    """
    logits = _exact(logits.detach())
    maximum = logits.amax(-1)
    shift = maximum.masked_fill(maximum.isneginf(), 0)
    total = (logits - shift[..., None]).exp_().sum(-1)
    indices, elsewhere = indices_in(targets, first, logits.shape[-1])
    target = logits.gather(-1, indices[..., None])[..., 0].masked_fill(elsewhere, 0)
    return torch.stack([maximum, total, target], -1)


def combined_loss(stats: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens, from all slices' `loss_stats` (slices, rows, T, 3)."""
    maximum, total = _combined(stats)
    losses = total.log() + maximum - stats[..., 2].sum(0)
    return losses.masked_fill(targets == -1, 0).sum()


def loss_gradient(logits: Tensor, stats: Tensor, targets: Tensor, first: int, weight: float | Tensor = 1.0) -> Tensor:
    """The gradient of `combined_loss` with respect to one slice's logits: softmax less 1 at the target.

    Args:
        logits, targets, first: as for `loss_stats`; the gradient has the logits' shape and dtype.
        stats: of all slices, (slices, rows, T, 3).
        weight: of the loss; it is multiplied before anything is rounded.
    """
    maximum, total = _combined(stats)
    gradient = (_exact(logits.detach()) - maximum[..., None]).exp_().div_(total[..., None])
    indices, elsewhere = indices_in(targets, first, logits.shape[-1])
    gradient.scatter_add_(-1, indices[..., None], (elsewhere.to(gradient.dtype) - 1)[..., None])
    return gradient.masked_fill_((targets == -1)[..., None], 0).mul_(weight).to(logits.dtype)


def _combined(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over all slices, and the sum of exp(logit - maximum)."""
    maximum = stats[..., 0].amax(0)
    return maximum, (stats[..., 1] * (stats[..., 0] - maximum).exp()).sum(0)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

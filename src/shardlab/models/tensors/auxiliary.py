"""Auxiliary losses: what a primitive of yours adds to the model's loss."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from shardlab.models.tensors.share import Share


def with_auxiliary_loss(x: Tensor, loss: Tensor, share: Share) -> Tensor:
    """Return `x`, whose backward pass also takes a loss back (as Megatron-LM's MoEAuxLossAutoScaler).

    A primitive that calls it says `affine`. The reported loss does not have the auxiliary one in it.

    Args:
        x: a tensor that the primitive makes.
        loss: (), the sum over the microbatches that are here; the step's mean over microbatches is added to its loss.
        share: the primitive's.
    """
    return cast(Tensor, _WithLoss.apply(x, loss, share))


class _WithLoss(torch.autograd.Function):
    """The first of two tensors; the second one's gradient is what the gradients of the pass are multiplied by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.like = share, loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.like * (ctx.share.gradient_scale / ctx.share.of_step), None

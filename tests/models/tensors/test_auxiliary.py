"""An auxiliary loss of a primitive that a user writes."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch

from shardlab.models.tensors import Share
from shardlab.models.tensors.auxiliary import with_auxiliary_loss
from tests.models.tensors.comparing import error


def test_an_auxiliary_loss_goes_back_at_the_scale_of_the_gradients_with_its_share_of_the_step() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    made = with_auxiliary_loss(2 * x, (x**2).sum(), Share(of_step=4, gradient_scale=8))
    above = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(made, x, above)
    assert torch.equal(made, 2 * x)
    assert error(gradient, 2 * above + 8 / 4 * 2 * x.detach()) <= 1e-15

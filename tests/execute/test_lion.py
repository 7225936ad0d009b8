"""Lion is program 1 of its paper."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import torch

from shardlab.execute.lion import Lion


def test_it_steps_by_the_sign_of_what_it_mixes() -> None:
    torch.manual_seed(0)
    rate, (by, kept), decay = 0.1, (0.9, 0.99), 0.5
    weight = torch.randn(7, dtype=torch.float64)
    expected, moment = weight.clone(), torch.zeros(7, dtype=torch.float64)
    lion = Lion([{"params": [weight], "weight_decay": decay}], rate, (by, kept))
    for _ in range(4):
        weight.grad = torch.randn(7, dtype=torch.float64)
        mixed = by * moment + (1 - by) * weight.grad
        expected = expected - rate * (mixed.sign() + decay * expected)
        moment = kept * moment + (1 - kept) * weight.grad
        lion.step()
    assert torch.allclose(weight, expected, rtol=0, atol=1e-14)

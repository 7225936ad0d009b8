"""AdamW and SGD by torch's functions are torch's own, to the bit, and need no compiler."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.optimizers.algorithms import SGD, AdamW, Lion, Muon, TensorOptimizer, orthogonal


def groups_of(weights: list[Tensor]) -> list[dict[str, Any]]:
    """One group that decays, and one that does not."""
    return [{"params": weights[:2], "weight_decay": 0.1}, {"params": weights[2:], "weight_decay": 0.0}]


@given(
    kind=st.sampled_from(["adamw", "sgd", "sgd without momentum"]),
    fused=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_steps_equal_those_of_torchs_classes(kind: str, fused: bool, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    start = [torch.randn(5, dtype=dtype) for _ in range(3)]
    ours, theirs = ([tensor.clone() for tensor in start] for _ in range(2))
    mine: TensorOptimizer
    reference: torch.optim.Optimizer
    if kind == "adamw":
        mine = AdamW(groups_of(ours), 0.1, (0.9, 0.95), 1e-8, fused=fused)
        reference = torch.optim.AdamW(groups_of(theirs), lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    else:
        momentum = 0.9 if kind == "sgd" else 0.0
        mine = SGD(groups_of(ours), 0.1, momentum, fused=fused)
        reference = torch.optim.SGD(groups_of(theirs), lr=0.1, momentum=momentum, fused=fused)
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(5, dtype=dtype) if step != 1 or a is not ours[1] else None  # one has none in a step
            b.grad = None if a.grad is None else a.grad.clone()
        for optimizer in (mine, reference):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        state, expected = mine.state[a], reference.state[b]
        assert state.keys() == expected.keys()
        for name, value in state.items():
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name])


def test_an_update_imports_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    for optimizer in (
        AdamW([{"params": [torch.ones(3)]}], 0.1, (0.9, 0.95), 1e-8, fused=True),
        SGD([{"params": [torch.ones(3)]}], 0.1, 0.9, fused=True),
    ):
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.ones(3)
        optimizer.step()
        assert not torch.equal(weight, torch.ones(3))


# Lion is program 1 of its paper.


def test_it_steps_by_the_sign_of_what_it_mixes() -> None:
    torch.manual_seed(0)
    rate, (beta1, beta2), decay = 0.1, (0.9, 0.99), 0.5
    weight = torch.randn(7, dtype=torch.float64)
    expected, moment = weight.clone(), torch.zeros(7, dtype=torch.float64)
    lion = Lion([{"params": [weight], "weight_decay": decay}], rate, (beta1, beta2))
    for _ in range(4):
        weight.grad = torch.randn(7, dtype=torch.float64)
        mixed = beta1 * moment + (1 - beta1) * weight.grad
        expected = expected - rate * (mixed.sign() + decay * expected)
        moment = beta2 * moment + (1 - beta2) * weight.grad
        lion.step()
    assert torch.allclose(weight, expected, rtol=0, atol=1e-14)


# Muon is torch's, on whole matrices.


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_torch_s_muon_to_the_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.ones(shape, dtype=dtype) for _ in range(2))
    mine = Muon([{"params": [ours], "weight_decay": 0.1}], 0.01, 0.95)
    torchs = torch.optim.Muon(
        [theirs.requires_grad_()], lr=0.01, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        ours.grad = torch.randn(shape).to(dtype)
        theirs.grad = ours.grad.clone()
        mine.step()
        torchs.step()
    assert torch.equal(ours, theirs)


def test_float64_is_not_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 9, dtype=torch.float64)
    result = orthogonal(matrix)
    assert result.dtype is torch.float64
    assert torch.allclose(result, orthogonal(matrix.float()).double(), rtol=0, atol=0.05)
    values: torch.Tensor = torch.linalg.svdvals(result)
    assert values.min() > 0.6
    assert values.max() < 1.3

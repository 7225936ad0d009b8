"""AdamW and SGD by torch's functions are torch's own, to the bit, and need no compiler."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.functional import SGD, AdamW, TensorOptimizer


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
    its: torch.optim.Optimizer
    if kind == "adamw":
        mine = AdamW(groups_of(ours), 0.1, (0.9, 0.95), 1e-8, fused=fused)
        its = torch.optim.AdamW(groups_of(theirs), lr=0.1, betas=(0.9, 0.95), eps=1e-8, fused=fused)
    else:
        momentum = 0.9 if kind == "sgd" else 0.0
        mine = SGD(groups_of(ours), 0.1, momentum, fused=fused)
        its = torch.optim.SGD(groups_of(theirs), lr=0.1, momentum=momentum, fused=fused)
    for step in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(5, dtype=dtype) if step != 1 or a is not ours[1] else None  # one has none in a step
            b.grad = None if a.grad is None else a.grad.clone()
        for optimizer in (mine, its):
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (step + 1)
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)
        kept, expected = mine.state[a], its.state[b]
        assert kept.keys() == expected.keys()
        for name, value in kept.items():
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

"""Muon is torch's, on whole matrices."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import pytest
import torch

from shardlab.execute.muon import Muon, orthogonal


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
    found = orthogonal(matrix)
    assert found.dtype is torch.float64
    assert torch.allclose(found, orthogonal(matrix.float()).double(), rtol=0, atol=0.05)
    values: torch.Tensor = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3

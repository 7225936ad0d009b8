"""The norm of a gradient."""

from __future__ import annotations

import pytest
import torch

from shardlab.execute.update_ops import sum_of_squares


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("length", [0, 3, (1 << 20) + 5])
def test_squares_are_summed_in_float64_and_the_gradient_stays(length: int, dtype: torch.dtype) -> None:
    gradient = torch.arange(length, dtype=dtype) / 1024
    before = gradient.clone()
    found = sum_of_squares(gradient)
    assert (found.shape, found.dtype) == ((1,), torch.float64)
    assert float(found) == pytest.approx(float((before.double() ** 2).sum()))
    assert torch.equal(gradient, before)

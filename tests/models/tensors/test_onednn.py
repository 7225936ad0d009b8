"""Products by oneDNN are torch's own, up to rounding."""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false
# torch leaves some of its annotations out.

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.models.tensors import onednn

needs_onednn = pytest.mark.skipif(not onednn.AVAILABLE, reason="this torch has no oneDNN, or no MKL")


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 199), st.integers(1, 199), st.booleans(), st.booleans())
def test_any_shape_has_the_result_of_torchs_own(
    rows: list[int], inputs: int, outputs: int, has_bias: bool, apart: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, inputs, 2)[..., 0] if apart else torch.randn(*rows, inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    assert torch.allclose(onednn.linear_forward(x, weight, bias), F.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    gradient = torch.randn(*rows, outputs)
    assert torch.allclose(onednn.linear_backward(gradient, weight), gradient @ weight, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_it_computes_large_products_in_float32_on_cpus_and_leaves_the_rest_to_torch() -> None:
    called = patch.object(onednn, "_product", wraps=onednn._product)
    for dtype, device, width, calls in (
        (torch.float32, "cpu", 128, 2),
        (torch.float32, "cpu", 127, 0),
        (torch.float64, "cpu", 128, 0),
        (torch.bfloat16, "cpu", 128, 0),
        (torch.float32, "meta", 128, 0),
    ):
        x, weight = (torch.ones(128, width, dtype=dtype, device=device) for _ in range(2))
        with called as product:
            made = onednn.linear_forward(x, weight, None)
            onednn.linear_backward(made, weight)
            assert product.call_count == calls, (dtype, device)


@needs_onednn
def test_it_is_turned_off_as_torch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    x, weight, bias = torch.randn(64, 128), torch.randn(128, 128), torch.randn(128)
    with patch.object(onednn, "_product") as product:
        assert torch.equal(onednn.linear_forward(x, weight, bias), F.linear(x, weight, bias))
    product.assert_not_called()

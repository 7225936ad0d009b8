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
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from shardlab.models.tensors import onednn

needs_onednn = pytest.mark.skipif(not onednn.AVAILABLE, reason="this torch has no oneDNN, or no MKL")


def both(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """What is made, and the gradient of `x`: ours and torch's."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for linear in (onednn.linear, F.linear):
        leaf = x.detach().requires_grad_()
        made = linear(leaf, weight, bias)
        torch.manual_seed(1)
        (gradient,) = torch.autograd.grad(made, leaf, torch.randn_like(made))
        pairs.append((made, gradient))
    return list(zip(*pairs, strict=True))


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 199), st.integers(1, 199), st.booleans(), st.booleans())
def test_any_shape_has_the_result_of_torchs_own(
    rows: list[int], inputs: int, outputs: int, has_bias: bool, apart: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, inputs, 2)[..., 0] if apart else torch.randn(*rows, inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    for ours, torchs in both(x, weight, bias):
        assert ours.shape == torchs.shape
        assert torch.allclose(ours, torchs, rtol=1e-4, atol=1e-4)
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
            onednn.linear(x.requires_grad_(), weight, None).sum().backward()
            assert product.call_count == calls, (dtype, device)
            made = onednn.linear_forward(x.detach(), weight, None)
            onednn.linear_backward(made, weight)
            assert product.call_count == 2 * calls, (dtype, device)


@needs_onednn
def test_it_is_turned_off_as_torch_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    x, weight, bias = torch.randn(64, 128), torch.randn(128, 128), torch.randn(128)
    with patch.object(onednn, "_product") as product:
        assert torch.equal(onednn.linear(x, weight, bias), F.linear(x, weight, bias))
    product.assert_not_called()


def test_autograd_keeps_the_weight_alone_and_hands_it_over() -> None:
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        kept.append(tensor)
        return len(kept) - 1

    x, weight = torch.randn(5, 128).requires_grad_(), torch.randn(128, 128)

    def unpack(number: int) -> Tensor:
        return torch.zeros_like(kept[number])

    with saved_tensors_hooks(pack, unpack):
        made = onednn.linear(x, weight.requires_grad_(), torch.randn(128))
    made.sum().backward()
    assert [tensor.data_ptr() for tensor in kept] == [weight.data_ptr()]
    assert x.grad is not None
    assert not x.grad.any()  # by the weight that was handed back
    assert weight.grad is None

"""Products by oneDNN are torch's own, up to rounding, and computed where that was chosen."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.models.tensors import compute
from shardlab.models.tensors.compute import KERNEL_CHOICES, Product, kernel_choices, linear_backward, linear_forward

needs_onednn = pytest.mark.skipif(not compute.AVAILABLE, reason="this torch has no oneDNN, or no MKL")


@pytest.fixture(autouse=True)
def nothing_chosen() -> Iterator[None]:
    with kernel_choices({}):
        yield


@needs_onednn
@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=3), st.integers(1, 199), st.integers(1, 199), st.booleans(), st.booleans())
def test_any_shape_has_the_result_of_torchs_own(
    rows: list[int], inputs: int, outputs: int, has_bias: bool, apart: bool
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*rows, inputs, 2)[..., 0] if apart else torch.randn(*rows, inputs)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs) if has_bias else None
    gradient = torch.randn(*rows, outputs)
    forward, backward = F.linear(x, weight, bias), gradient @ weight
    assert torch.allclose(compute.onednn_linear(x, weight, bias), forward, rtol=1e-4, atol=1e-4)
    assert torch.allclose(compute.onednn_linear(gradient, weight.T), backward, rtol=1e-4, atol=1e-4)
    assert torch.equal(linear_forward(x, weight, bias), forward), "nothing was chosen"
    assert torch.equal(linear_backward(gradient, weight), backward), "nothing was chosen"


@needs_onednn
def test_only_large_products_in_float32_on_cpus_have_a_choice() -> None:
    for dtype, device, width, noted in (
        (torch.float32, "cpu", 128, [Product(6, 128, 128, True, False), Product(6, 128, 128, False, True)]),
        (torch.float32, "cpu", 127, []),
        (torch.float64, "cpu", 128, []),
        (torch.bfloat16, "cpu", 128, []),
        (torch.float32, "meta", 128, []),
    ):
        x = torch.ones(2, 3, width, dtype=dtype, device=device)
        weight, bias = (torch.ones(*size, dtype=dtype, device=device) for size in ((128, width), (128,)))
        with kernel_choices({}), patch.object(compute, "onednn_linear", wraps=compute.onednn_linear) as product:
            linear_backward(linear_forward(x, weight, bias), weight)
            assert list(KERNEL_CHOICES.items()) == [(noted_product, None) for noted_product in noted], (dtype, device)
            KERNEL_CHOICES.update(dict.fromkeys(noted, True))
            linear_backward(linear_forward(x, weight, bias), weight)
            assert product.call_count == len(noted), (dtype, device)


@needs_onednn
def test_each_shape_and_direction_has_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(64, 128), torch.randn(256, 128)
    with kernel_choices({Product(64, 128, 256, False, False): True, Product(64, 128, 256, False, True): False}):
        with patch.object(compute, "onednn_linear", wraps=compute.onednn_linear) as product:
            linear_backward(linear_forward(x, weight, None), weight)
            linear_forward(x[:63], weight, None)
        product.assert_called_once_with(x, weight, None)
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
        with patch.object(compute, "onednn_linear") as product:
            assert torch.equal(linear_forward(x, weight, None), F.linear(x, weight))
        product.assert_not_called()


@needs_onednn
def test_choices_end_with_what_they_were_made_for() -> None:
    outer = {Product(1, 2, 3, False, True): True}
    with kernel_choices(outer):
        with kernel_choices({}):
            KERNEL_CHOICES[Product(4, 5, 6, True, False)] = True
        assert outer == KERNEL_CHOICES


@needs_onednn
@pytest.mark.parametrize(("onednn_takes", "expected"), [(0.5, True), (0.98, False), (2.0, False)])
def test_the_faster_kernel_is_chosen_by_the_median_of_turns(
    onednn_takes: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [(onednn_takes, 1.0)] * 3 + [(100.0, 1.0), (0.01, 1.0)]

    def fake_times(*_: object) -> list[tuple[float, float]]:
        return turns

    monkeypatch.setattr(compute, "time_kernels", fake_times)
    product = Product(64, 128, 256, False, True)
    assert compute.is_onednn_faster(product) is expected
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert not compute.is_onednn_faster(product), "torch was told to do without"


@needs_onednn
@pytest.mark.parametrize("backward", [False, True])
def test_both_kernels_are_timed_on_the_product_that_came_up(backward: bool) -> None:
    product = Product(5, 128, 256, not backward, backward)
    with (
        patch.object(compute, "onednn_linear", wraps=compute.onednn_linear) as ours,
        patch.object(torch, "matmul", wraps=torch.matmul) as matmul,
        patch.object(F, "linear", wraps=F.linear) as linear,
    ):
        turns = compute.time_kernels(product, range(3, 5), 0.0)
    assert len(turns) == 3, "the fewest, as there is no time"
    assert all(seconds > 0 for turn in turns for seconds in turn)
    torch_kernel, other = (matmul, linear) if backward else (linear, matmul)
    assert ours.call_count == torch_kernel.call_count == 1 + 3
    other.assert_not_called()
    x, weight, *_ = ours.call_args.args
    assert x.shape == (5, 256 if backward else 128)
    assert weight.shape == ((128, 256) if backward else (256, 128))

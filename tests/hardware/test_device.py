"""A device's roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.hardware import DEVICES, find_device
from shardlab.hardware.device import Device
from shardlab.models.kernels import FusedAttention, Kernel, Matmul, Pointwise
from shardlab.program import UserError
from shardlab.rules.dtype import bytes_of

DEVICE = st.sampled_from(list(DEVICES.values()))
SIZE = st.integers(1, 40_000)


@given(DEVICE, SIZE, SIZE, SIZE, st.integers(1, 64))
def test_no_product_is_faster_than_the_data_sheet(device: Device, m: int, n: int, k: int, batch: int) -> None:
    kernel = Matmul(m, n, k, batch)
    dtype = "bfloat16" if "bfloat16" in device.flops else "float16"
    seconds = device.seconds(kernel, dtype)
    assert seconds >= kernel.flops / device.flops[dtype]
    assert seconds >= 2 * kernel.elements / device.bandwidth


@given(DEVICE, st.floats(1, 1e10))
def test_no_pointwise_kernel_is_faster_than_the_memory(device: Device, elements: float) -> None:
    dtype = next(iter(device.flops))
    assert device.seconds(Pointwise("gelu", elements, elements), dtype) >= bytes_of(dtype) * elements / device.bandwidth


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (Matmul(256, 256, 256), Matmul(8192, 8192, 8192)),
        (Matmul(8192, 8192, 64), Matmul(8192, 8192, 4096)),
        (FusedAttention(1, 8, 8, 256, 256, 128, 0.5), FusedAttention(4, 32, 32, 4096, 4096, 128, 0.5)),
    ],
)
def test_a_larger_kernel_reaches_more_flops(small: Kernel, large: Kernel) -> None:
    device = find_device("a100")
    assert small.flops / device.seconds(small, "bfloat16") < large.flops / device.seconds(large, "bfloat16")


def test_one_row_more_than_a_wave_of_tiles_costs_more_than_its_share() -> None:
    """On 108 SMs 108 tiles fill one wave and 109 need two, or smaller tiles (NVIDIA, "Matrix multiplication")."""
    device = find_device("a100")
    wave = Matmul(256 * 108, 128, 4096)
    assert device.seconds(wave._replace(m=256 * 108 + 1), "float16") > 1.1 * device.seconds(wave, "float16")


def test_rows_of_odd_width_are_slow() -> None:
    """BLOOM's steps with heads of 108 features took 40 % longer (bigscience, chronicles-prequel.md)."""
    device = find_device("a100")
    odd, even = Matmul(2048, 2048, 108, 64), Matmul(2048, 2048, 112, 64)
    assert device.seconds(odd, "float16") > 1.3 * device.seconds(even, "float16")


def test_attention_backward_takes_longer_than_forward() -> None:
    forward = FusedAttention(2, 32, 32, 2048, 2048, 128, 0.5)
    (backward,) = forward.backward_input()
    device = find_device("h100")
    assert device.seconds(backward, "bfloat16") > 2 * device.seconds(forward, "bfloat16")


def test_in_float8_only_products_with_parameters_are_faster() -> None:
    device = find_device("h100")
    assert device.seconds(Matmul(8192, 8192, 8192), "float8") < 0.75 * device.seconds(
        Matmul(8192, 8192, 8192), "bfloat16"
    )
    scores = Matmul(2048, 2048, 128, 64, learned=False)
    for kernel in (scores, Pointwise("gelu", 1e8, 1e8), FusedAttention(4, 32, 32, 2048, 2048, 128, 0.5)):
        assert device.seconds(kernel, "float8") == device.seconds(kernel, "bfloat16")


def test_a_dtype_takes_a_peak_and_a_share_of_it() -> None:
    """Its name says how long it is; all but products with parameters is in bfloat16 if that is less than two bytes."""
    h100 = find_device("h100")
    efficiency = replace(h100.efficiency, matmul={**h100.efficiency.matmul, "float4": h100.efficiency.matmul["float8"]})
    device = replace(h100, flops={**h100.flops, "float4": 2 * h100.flops["float8"]}, efficiency=efficiency)
    product = Matmul(8192, 8192, 8192)
    assert device.seconds(product, "float4") < 0.75 * device.seconds(product, "float8")
    assert device.seconds(Pointwise("gelu", 1e8, 1e8), "float4") == h100.seconds(
        Pointwise("gelu", 1e8, 1e8), "bfloat16"
    )


def test_each_generation_of_attention_kernels_has_its_own_speed() -> None:
    kernel = FusedAttention(4, 32, 32, 4096, 4096, 128, 0.5)
    device = find_device("h100")
    seconds = [replace(device, attention=name).seconds(kernel, "bfloat16") for name in ("flash1", "flash2", "cudnn")]
    assert seconds == sorted(seconds, reverse=True)


def test_a_dtype_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UserError, match="p100 does not compute in bfloat16; it does in float64, float32, float16"):
        find_device("p100").seconds(Matmul(64, 64, 64), "bfloat16")
    with pytest.raises(UserError, match="a100-80gb does not compute in float8"):
        find_device("a100").seconds(Pointwise("gelu", 1.0, 1.0), "float8")


def test_an_unknown_device_suggests_the_nearest() -> None:
    with pytest.raises(UserError, match=r"there is no device 'a100-80'; did you mean a100-80gb"):
        find_device("a100-80")


def test_a100_is_the_one_of_80_gb() -> None:
    assert find_device("A100") is find_device("a100-80gb")

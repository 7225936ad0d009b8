"""Devices as data. Peaks are dense (a data sheet's figure "with sparsity" is twice that); memory is in units of 2^30.

"float32" is without TF32, as torch multiplies unless told otherwise.
"""

from __future__ import annotations

from shardlab.hardware.device import Device, Efficiency
from shardlab.hardware.names import find

TERA = 1e12
GIB = 2.0**30
NVIDIA = "www.nvidia.com/en-us/data-center"


def _flops(float64: float, float32: float, float16: float, bfloat16: float = 0, float8: float = 0) -> dict[str, float]:
    table = {"float64": float64, "float32": float32, "float16": float16, "bfloat16": bfloat16, "float8": float8}
    return {dtype: tera * TERA for dtype, tera in table.items() if tera}


def _efficiency(
    half: float, float8: float, attention: float, backward: float, memory: float, source: str
) -> Efficiency:
    matmul = {"float64": 0.85, "float32": 0.85, "float16": half, "bfloat16": half, "float8": float8}
    return Efficiency(matmul, attention, backward, memory, launch=4e-6, inner=64.0, small=2e6, source=source)


OLDER = _efficiency(0.75, 0.0, 0.3, 0.25, 0.8, "not fitted: no published run of ours is on it")
AMPERE = _efficiency(0.85, 0.0, 0.6, 0.5, 0.8, "to be fitted")
HOPPER = _efficiency(0.75, 0.65, 0.55, 0.45, 0.8, "to be fitted")
BLACKWELL = _efficiency(0.75, 0.65, 0.45, 0.35, 0.8, "not fitted")

DEVICES = {
    device.name: device
    for device in (
        Device("p100", _flops(5.3, 10.6, 21.2), 16 * GIB, 732e9, 56, OLDER, "NVIDIA Tesla P100 data sheet, SXM2"),
        Device("v100", _flops(7.8, 15.7, 125), 16 * GIB, 900e9, 80, OLDER, "NVIDIA V100 data sheet, SXM2"),
        Device("v100-32gb", _flops(7.8, 15.7, 125), 32 * GIB, 900e9, 80, OLDER, "NVIDIA V100 data sheet, SXM2"),
        Device("a100-40gb", _flops(19.5, 19.5, 312, 312), 40 * GIB, 1555e9, 108, AMPERE, f"{NVIDIA}/a100, SXM4 40 GB"),
        Device("a100-80gb", _flops(19.5, 19.5, 312, 312), 80 * GIB, 2039e9, 108, AMPERE, f"{NVIDIA}/a100, SXM4 80 GB"),
        Device("a100-pcie", _flops(19.5, 19.5, 312, 312), 80 * GIB, 1935e9, 108, AMPERE, f"{NVIDIA}/a100, PCIe 80 GB"),
        Device("h100", _flops(67, 67, 989.4, 989.4, 1978.9), 80 * GIB, 3350e9, 132, HOPPER, f"{NVIDIA}/h100, SXM5"),
        Device("h100-pcie", _flops(51, 51, 756, 756, 1513), 80 * GIB, 2000e9, 114, HOPPER, f"{NVIDIA}/h100, PCIe"),
        Device(
            "h100-96gb",
            _flops(67, 67, 989.4, 989.4, 1978.9),
            96 * GIB,
            2400e9,
            132,
            HOPPER,
            "torchtitan benchmarks/llama3_h100_202412_torchtitan.md: HBM2e, 2.4 TB/s, 500 W; the peak is H100's",
        ),
        Device("h200", _flops(67, 67, 989.4, 989.4, 1978.9), 141 * GIB, 4800e9, 132, HOPPER, f"{NVIDIA}/h200, SXM"),
        Device(
            "b200", _flops(40, 80, 2250, 2250, 4500), 180 * GIB, 8000e9, 148, BLACKWELL, "Blackwell brief, HGX 1000 W"
        ),
        Device(
            "gb200",
            _flops(45, 90, 2500, 2500, 5000),
            186 * GIB,
            8000e9,
            148,
            BLACKWELL,
            "Blackwell brief, GB200 1200 W",
        ),
        Device(
            "mi300x",
            _flops(163.4, 163.4, 1307.4, 1307.4, 2614.9),
            192 * GIB,
            5300e9,
            304,
            HOPPER,
            "AMD Instinct MI300X data sheet",
        ),
        Device(
            "tpu-v5p",
            {"bfloat16": 459e12, "float8": 459e12},
            95 * GIB,
            2765e9,
            8,
            HOPPER,
            "cloud.google.com/tpu/docs/v5p",
        ),
    )
}
"""Every device by name."""

ALIASES = {
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "v100-16gb": "v100",
    "v5p": "tpu-v5p",
}


def find_device(name: str) -> Device:
    """The device of that name, in any case; "a100" is the one of 80 GB.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    name = name.strip().lower()
    return find(DEVICES, ALIASES.get(name, name), "device")

"""Devices as data. Peaks are dense (a data sheet's figure "with sparsity" is twice that); memory is in units of 2^30.

"float32" is without TF32, as torch multiplies unless told otherwise.
"""

from __future__ import annotations

from dataclasses import replace

from shardlab.hardware.device import Device, Efficiency
from shardlab.hardware.names import find

TERA = 1e12
GIB = 2.0**30
NVIDIA = "www.nvidia.com/en-us/data-center"


def _flops(float64: float, float32: float, float16: float, bfloat16: float = 0, float8: float = 0) -> dict[str, float]:
    table = {"float64": float64, "float32": float32, "float16": float16, "bfloat16": bfloat16, "float8": float8}
    return {dtype: tera * TERA for dtype, tera in table.items() if tera}


def _matmul(half: float, float8: float = 0.0) -> dict[str, float]:
    """Shares of the peak; those of float32 and float64 are not fitted."""
    return {"float64": 0.85, "float32": 0.85, "float16": half, "bfloat16": half, "float8": float8}


AMPERE = Efficiency(
    _matmul(0.78),
    {"flash1": (0.52, 0.26), "flash2": (0.66, 0.60), "cudnn": (0.66, 0.60)},
    memory=0.74,
    launch=3e-6,
    inner=145.0,
    small=7e6,
    source="fitted to published runs (docs/validation.md: Megatron-LM and -DeepSpeed, llm-foundry; flash2 to nanoGPT)",
)
HOPPER = Efficiency(
    _matmul(0.66, 0.57),
    {"flash1": (0.25, 0.16), "flash2": (0.36, 0.28), "cudnn": (0.70, 0.57)},
    memory=0.68,
    launch=4e-6,
    inner=185.0,
    small=8e6,
    source="fitted to published runs on H100 of 700 W (llm-foundry, NeMo); flash2 a guess below its paper's best",
)
HOPPER_500_W = replace(
    HOPPER,
    matmul=_matmul(0.50, 0.57),
    attention={"flash1": (0.20, 0.15), "flash2": (0.35, 0.26), "cudnn": (0.50, 0.42)},
    source="fitted to torchtitan's 10 runs; the rest is H100's",
)
BLACKWELL = replace(
    HOPPER,
    matmul=_matmul(0.515, 0.44),
    attention={"flash1": (0.20, 0.15), "flash2": (0.30, 0.25), "cudnn": (0.42, 0.38)},
    source="fitted to NeMo's 9 runs on GB200, with cudnn; the rest is H100's",
)
VOLTA = replace(AMPERE, source="not fitted: A100's")
MI300 = replace(HOPPER, source="not fitted: H100's")
TPU = replace(HOPPER, matmul=_matmul(0.75, 0.75), source="not fitted")

DEVICES = {
    device.name: device
    for device in (
        Device("p100", _flops(5.3, 10.6, 21.2), 16 * GIB, 732e9, 56, VOLTA, "NVIDIA Tesla P100 data sheet, SXM2"),
        Device("v100", _flops(7.8, 15.7, 125), 16 * GIB, 900e9, 80, VOLTA, "NVIDIA V100 data sheet, SXM2"),
        Device("v100-32gb", _flops(7.8, 15.7, 125), 32 * GIB, 900e9, 80, VOLTA, "NVIDIA V100 data sheet, SXM2"),
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
            HOPPER_500_W,
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
            MI300,
            "AMD Instinct MI300X data sheet",
        ),
        Device(
            "tpu-v5p",
            {"bfloat16": 459e12, "float8": 459e12},
            95 * GIB,
            2765e9,
            8,
            TPU,
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

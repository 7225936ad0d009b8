"""Devices as data. Peaks are dense (a data sheet's figure "with sparsity" is twice that); memory is in units of 2^30.

"float32" is without TF32, as torch multiplies unless told otherwise; "float64" is on tensor cores where there are any.
A row leaves out dtypes that the device lacks, or of which no figure was found. A TPU's `sms` are its matrix units.
"""

from __future__ import annotations

from dataclasses import replace

from shardlab.errors import find
from shardlab.hardware import sources
from shardlab.hardware.device import Device, Efficiency

TERA = 1e12
GIB = 2.0**30


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
    k_half=145.0,
    bytes_half=7e6,
    source="fitted to published runs (docs/validation.md: Megatron-LM and -DeepSpeed, llm-foundry; flash2 to nanoGPT)",
)
HOPPER = Efficiency(
    _matmul(0.66, 0.57),
    {"flash1": (0.25, 0.16), "flash2": (0.36, 0.28), "cudnn": (0.70, 0.57)},
    memory=0.68,
    launch=4e-6,
    k_half=185.0,
    bytes_half=8e6,
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
TPU = replace(HOPPER, matmul=_matmul(0.75, 0.75), source="not fitted")
UNFITTED_AMPERE = replace(AMPERE, source="not fitted: A100's")
UNFITTED_HOPPER = replace(HOPPER, source="not fitted: H100's")
UNFITTED_BLACKWELL = replace(BLACKWELL, source="not fitted: B200's")

DEVICES = {
    device.name: device
    for device in (
        Device("p100", _flops(5.3, 10.6, 21.2), 16 * GIB, 732e9, 56, UNFITTED_AMPERE, sources.P100),
        Device("v100", _flops(7.8, 15.7, 125), 16 * GIB, 900e9, 80, UNFITTED_AMPERE, sources.V100),
        Device("v100-32gb", _flops(7.8, 15.7, 125), 32 * GIB, 900e9, 80, UNFITTED_AMPERE, sources.V100),
        Device("t4", _flops(0, 8.1, 65), 16 * GIB, 320e9, 40, UNFITTED_AMPERE, sources.T4),
        Device("a100-40gb", _flops(19.5, 19.5, 312, 312), 40 * GIB, 1555e9, 108, AMPERE, sources.A100),
        Device("a100-80gb", _flops(19.5, 19.5, 312, 312), 80 * GIB, 2039e9, 108, AMPERE, sources.A100),
        Device("a100-pcie", _flops(19.5, 19.5, 312, 312), 80 * GIB, 1935e9, 108, AMPERE, sources.A100_PCIE),
        Device("a10", _flops(0, 31.2, 125, 125), 24 * GIB, 600e9, 72, UNFITTED_AMPERE, sources.A10),
        Device("l4", _flops(0, 30.3, 121, 121, 242), 24 * GIB, 300e9, 58, UNFITTED_HOPPER, sources.L4),
        Device("l40s", _flops(0, 91.6, 362, 362, 733), 48 * GIB, 864e9, 142, UNFITTED_HOPPER, sources.L40S),
        Device(
            "rtx-4090", _flops(0, 82.6, 165.2, 165.2, 330.3), 24 * GIB, 1008e9, 128, UNFITTED_HOPPER, sources.RTX_4090
        ),
        Device("h100", _flops(67, 67, 989.4, 989.4, 1978.9), 80 * GIB, 3350e9, 132, HOPPER, sources.H100),
        Device("h100-pcie", _flops(51, 51, 756, 756, 1513), 80 * GIB, 2000e9, 114, HOPPER, sources.H100_PCIE),
        Device(
            "h100-96gb", _flops(67, 67, 989.4, 989.4, 1978.9), 96 * GIB, 2400e9, 132, HOPPER_500_W, sources.H100_96GB
        ),
        Device("h200", _flops(67, 67, 989.4, 989.4, 1978.9), 141 * GIB, 4800e9, 132, HOPPER, sources.H200),
        Device("h800", _flops(1, 67, 989.4, 989.4, 1978.9), 80 * GIB, 3350e9, 132, UNFITTED_HOPPER, sources.H800),
        Device("h20", _flops(1, 44, 148, 148, 296), 96 * GIB, 4000e9, 78, UNFITTED_HOPPER, sources.H20),
        Device("b200", _flops(37, 75, 2250, 2250, 4500), 180 * GIB, 8000e9, 148, BLACKWELL, sources.B200),
        Device("gb200", _flops(40, 80, 2500, 2500, 5000), 186 * GIB, 8000e9, 148, BLACKWELL, sources.GB200),
        Device("b300", _flops(1.25, 75, 2250, 2250, 4500), 270 * GIB, 8000e9, 148, UNFITTED_BLACKWELL, sources.B300),
        Device(
            "mi300x",
            _flops(163.4, 163.4, 1307.4, 1307.4, 2614.9),
            192 * GIB,
            5300e9,
            304,
            UNFITTED_HOPPER,
            sources.MI300X,
        ),
        Device(
            "mi325x",
            _flops(163.4, 163.4, 1307.4, 1307.4, 2614.9),
            256 * GIB,
            6000e9,
            304,
            UNFITTED_HOPPER,
            sources.MI325X,
        ),
        Device("mi355x", _flops(0, 157.3, 2500, 2500, 5000), 288 * GIB, 8000e9, 256, UNFITTED_HOPPER, sources.MI355X),
        Device("tpu-v4", _flops(0, 0, 0, 275), 32 * GIB, 1200e9, 8, TPU, sources.TPU_V4),
        Device("tpu-v5e", _flops(0, 0, 0, 197), 16 * GIB, 819e9, 4, TPU, sources.TPU_V5E),
        Device("tpu-v5p", _flops(0, 0, 0, 459, 459), 95 * GIB, 2765e9, 8, TPU, sources.TPU_V5P),
        Device("tpu-v6e", _flops(0, 0, 0, 918), 32 * GIB, 1638e9, 2, TPU, sources.TPU_V6E),
    )
}
"""Every device by name."""

ALIASES = {
    "a100": "a100-80gb",
    "a100-sxm": "a100-80gb",
    "h100-sxm": "h100",
    "h100-80gb": "h100",
    "v100-16gb": "v100",
    "4090": "rtx-4090",
    "v4": "tpu-v4",
    "v5e": "tpu-v5e",
    "v5p": "tpu-v5p",
    "v6e": "tpu-v6e",
    "trillium": "tpu-v6e",
}


def find_device(name: str) -> Device:
    """The device of that name, in any case; "a100" is the one of 80 GB.

    Raises:
        UserError: there is none; the nearest names are suggested.
    """
    name = name.strip().lower()
    return find(DEVICES, ALIASES.get(name, name), "device")

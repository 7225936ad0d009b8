"""GPUs of this machine."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress
from pathlib import Path


def gpu_count() -> int:
    """How many GPUs torch finds here; where there is no driver it is not asked, since its import takes seconds."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def has_driver() -> bool:
    """Whether NVIDIA's driver is here, or AMD's."""
    with suppress(OSError):
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        return True
    return Path("/dev/kfd").exists()

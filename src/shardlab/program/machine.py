"""What tells this machine from others, and where measurements of it lie."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor_name() -> str:
    """Return the CPU's name, as Linux knows it; elsewhere as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Return the folder of measurements: $XDG_CACHE_HOME or ~/.cache, then shardlab."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shardlab"

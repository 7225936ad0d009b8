"""The heap of a rank on a CPU: memory that was freed waits for what comes next.

A training step takes and frees the same memory again and again. By default glibc gives the end of the heap back to the
system as soon as it is free (mallopt(3), M_TRIM_THRESHOLD) and asks for large blocks one by one (M_MMAP_THRESHOLD), so
that every step touches pages for the first time, and the system has to fill each of them with zeros.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
_LARGEST = 32 * 2**20  # the most that glibc takes: HEAP_MAX_SIZE / 2 of its malloc/arena.c on 64 bits


def keep_freed_memory() -> None:
    """Have this process keep what it frees; elsewhere than on glibc nothing changes."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)

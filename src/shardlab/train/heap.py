"""The heap of a rank on a CPU: memory that was freed waits for what comes next.

A training step takes and frees the same memory again and again. By default glibc gives the end of the heap back to the
system as soon as it is free (mallopt(3), M_TRIM_THRESHOLD) and asks for large blocks one by one (M_MMAP_THRESHOLD), so
that every step touches pages for the first time, and the system has to fill each of them with zeros.

Freed memory that waits is not always of use: torch asks for aligned blocks, and glibc before 2.38 seldom gives one out
again where it was freed, so that a heap can grow to several times what lives in it. A process that has a limit
(`ulimit -d` or `-v`) rather takes its time.
"""

from __future__ import annotations

import ctypes
import resource
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = 2**31 - 1
_SMALL = 2**18
_LARGEST = 32 * 2**20  # the most that glibc takes: HEAP_MAX_SIZE / 2 of its malloc/arena.c on 64 bits


def memory_limit() -> int | None:
    """Bytes of private memory that this process may take, as `ulimit -d` and `-v` limit it; None without a limit."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS))
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def set_heap() -> None:
    """Have this process keep what it frees, or if its memory is limited give back each block that is not small.

    Elsewhere than on glibc nothing changes.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if memory_limit() is None:
        mallopt(_TRIM_THRESHOLD, _NEVER)
        mallopt(_MMAP_THRESHOLD, _LARGEST)
    else:
        mallopt(_MMAP_THRESHOLD, _SMALL)

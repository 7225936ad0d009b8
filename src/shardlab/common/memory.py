"""Memory of this machine and of this process, as Linux reports it, and a limit for the programs of users."""

from __future__ import annotations

import mmap
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

try:
    import resource
except ImportError:  # on Windows
    resource = None

LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, in the two versions of Linux's control groups."""

MINIMUM_BYTES = 2**30
"""Bytes that `memory_limit` always leaves: libraries reserve more than they use (torch: 0.2 GiB)."""


def available_memory() -> int | None:
    """Return the bytes that this process can still allocate and use; None if unknown, as on other systems."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    free = [int(line.split()[1]) * 1024 for line in path.read_text().splitlines() if line.startswith("MemAvailable:")]
    limits = [file.read_text().strip() for file in LIMITS if file.exists()]
    return min(free + [max(0, int(limit) - resident_memory()) for limit in limits if limit.isdecimal()], default=None)


def resident_memory() -> int:
    """Return the bytes of this process that are in memory; 0 if unknown."""
    return _statm(1)


def peak_memory() -> int:
    """Return the most bytes that this process has had in memory at any time (Linux only; 0 on Windows).

    The call does not release Python's global interpreter lock.
    """
    if resource is None:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def memory_limit() -> Generator[None]:
    """Make allocations beyond the available memory fail in the block, so that the system does not kill the process.

    The limit is for the whole process, so this is for commands, and not for a notebook. Processes that the block starts
    inherit it.
    """
    if resource is None or (available := available_memory()) is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    new_limit = min(
        limit for limit in (_statm(5) + max(available, MINIMUM_BYTES), soft, hard) if limit != resource.RLIM_INFINITY
    )
    resource.setrlimit(resource.RLIMIT_DATA, (new_limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _statm(field: int) -> int:
    path = Path("/proc/self/statm")
    return int(path.read_text().split()[field]) * mmap.PAGESIZE if path.exists() else 0

"""A disk that is full."""

from __future__ import annotations

import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Generator[None, None, None]:
    """A longer file is refused by the system, as by a full disk; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

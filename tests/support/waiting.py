"""Waiting for what another process or thread does, for as long as a busy machine may take over it."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 600.0
"""Seconds that a test waits for what surely happens. A test that passes takes a few; one that fails takes them all."""


def until(happens: Callable[[], object], said: Callable[[], object] = lambda: "it has not happened") -> None:
    """Wait for something to happen; fail with what `said` gives if it does not."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, said()
        time.sleep(0.01)

"""How a rank's threads share a core: one that wakes up waits until the core is free.

gloo's own thread wakes when a message comes, often while the thread that computes holds the lock of that message's
connection: it has just written there. Where the one that wakes takes the core, it finds the lock held and looks again
and again (`Pair::handleEvents` of gloo's `transport/tcp/pair.cc`) until its slice of time is over, some milliseconds
for a message of microseconds. Under SCHED_BATCH (sched(7)) a thread that wakes takes the core from nobody.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def set_wakeups() -> bool:
    """Have this thread, and those that it starts from now on, take no core from another thread when they wake up.

    A policy that somebody has chosen stands. Elsewhere than on Linux nothing changes.

    Returns:
        Whether the policy was changed.
    """
    return _change("SCHED_OTHER", "SCHED_BATCH")


def restore_wakeups() -> None:
    """Have this thread, and those that it starts from now on, take a core when they wake up, as Linux has it.

    Threads that compute an op together wait for each other at its end. Where one of them, which has slept, has to wait
    for a core as long as another process takes it, all do. Threads that were started before stay as they are.
    """
    _change("SCHED_BATCH", "SCHED_OTHER")


def _change(before: str, after: str) -> bool:
    """Put another policy of sched(7) in the place of one, if this thread has that one; says whether it did."""
    if sys.platform == "linux":
        with suppress(OSError):  # a sandbox may not allow it
            if os.sched_getscheduler(0) == getattr(os, before):
                os.sched_setscheduler(0, getattr(os, after), os.sched_param(0))
                return True
    return False

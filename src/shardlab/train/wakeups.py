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


def set_wakeups() -> None:
    """Have this thread, and those that it starts from now on, take no core from another thread when they wake up.

    A policy that somebody has chosen stands. Elsewhere than on Linux nothing changes.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError):  # a sandbox may not allow it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

"""Processes that end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time


def end_with_starter(at_once: bool = False) -> None:
    """Start a thread that sends SIGTERM to this process when the process that started it ends or is killed.

    Args:
        at_once: send SIGKILL instead, for ranks that a launcher restarts. After SIGTERM they would save, and stop the
            ranks of the other hosts.
    """
    number = signal.SIGKILL if at_once else signal.SIGTERM
    threading.Thread(target=_follow, args=(os.getppid(), number), daemon=True).start()


def orphaned() -> bool:
    """Return whether the process that started this one by multiprocessing has ended."""
    starter = multiprocessing.parent_process()
    return starter is not None and not starter.is_alive()


def _follow(parent: int, number: int) -> None:
    starter = multiprocessing.parent_process()  # not this process's own parent, which is multiprocessing's server
    wait = time.sleep if starter is None else starter.join
    while os.getppid() == parent and not orphaned():
        wait(0.5)
    os.kill(os.getpid(), number)

"""Ctrl-C while the command is still being loaded, which takes half a second: one line, as later."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""The exit code that shells give what SIGINT ended."""


def leave(number: int, frame: FrameType | None) -> None:
    """Say that the command was interrupted, and end the process."""
    os.write(2, b"shardlab: interrupted\n")
    os._exit(INTERRUPTED)


def leave_when_interrupted() -> None:
    """Handle Ctrl-C so, if it is the command that is loaded and nobody has asked for something else."""
    word = os.path.basename(sys.argv[0]) if sys.argv else ""
    is_command = word in ("shardlab", "-m") and "multiprocessing.spawn" not in sys.modules  # no child of it
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def loaded() -> None:
    """Make Ctrl-C an exception again, which the command itself catches."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)

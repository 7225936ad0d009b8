"""Handling of Ctrl-C while the command is still being loaded, which takes half a second: it prints one line."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130
"""Exit code that a shell reports for a process that SIGINT has ended."""


def leave(number: int, frame: FrameType | None) -> None:
    """Print that the command was interrupted, and end the process."""
    os.write(2, b"shardlab: interrupted\n")
    os._exit(INTERRUPTED)


def leave_when_interrupted() -> None:
    """Call `leave` on Ctrl-C, if this process runs the command and no other handler is set."""
    word = os.path.basename(sys.argv[0]) if sys.argv else ""
    is_command = word in ("shardlab", "-m") and "multiprocessing.spawn" not in sys.modules  # no child of it
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def loaded() -> None:
    """Restore Python's handler, which raises KeyboardInterrupt. From now on, the command catches it."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""Ctrl-C and messages while the command is being loaded, and after its end.

Loading takes half a second, or many seconds on a busy machine. Ctrl-C prints one line and ends the process. In a
terminal, a line says after one second that the command is being loaded. It is erased when the command starts.

Python takes up to two seconds to end a process that has imported torch. Ctrl-C ends it at once, and is ignored while
Python frees memory.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType

INTERRUPTED = 130
"""Exit code that a shell reports for a process that SIGINT has ended."""

NOTICE_SECONDS = 1.0
"""Seconds after which a line in the terminal says that the command is being loaded."""


def show_notice() -> None:
    """Show that the command is being loaded, in a line that `finish_loading` erases."""
    os.write(2, b"shardlab: loading\r")
    _notice_shown.set()


_notice_shown = threading.Event()
_notice = threading.Timer(NOTICE_SECONDS, show_notice)
_notice.daemon = True


def leave(number: int, frame: FrameType | None) -> None:
    """Print that the command was interrupted, and end the process."""
    os.write(2, b"shardlab: interrupted\n")
    os._exit(INTERRUPTED)


def is_command() -> bool:
    """Return whether this process runs the command, rather than a script, a notebook or a child of the command."""
    word = os.path.basename(sys.argv[0]) if sys.argv else ""
    return word in ("shardlab", "-m") and "multiprocessing.spawn" not in sys.modules


_runs_command = is_command()  # while shardlab is imported, since `python -m` changes sys.argv[0] after that
if _runs_command:  # the last function at exit; after it, Python would restore SIGINT's default, another status
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def leave_when_interrupted() -> None:
    """Call `leave` on Ctrl-C, if this process runs the command and no other handler is set."""
    if is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
        if os.isatty(2) and "JPY_PARENT_PID" not in os.environ:  # a cell of a notebook is no terminal
            _notice.start()


def finish_loading() -> None:
    """Restore Python's handler of Ctrl-C, which raises KeyboardInterrupt, and erase the line about loading."""
    _notice.cancel()
    if _notice_shown.is_set():
        os.write(2, b"\x1b[2K")
        _notice_shown.clear()
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_on_interrupt(status: int) -> None:
    """Let Ctrl-C end this process at once with a status, if it runs the command and no other handler is set.

    Otherwise, Python would print a traceback if Ctrl-C is pressed while it ends the process.
    """
    if _runs_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(status))

"""Run a student's program in a thread of its own, so that it can be stopped: by Ctrl-C, or when it takes too long."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import TIMEOUT_MAX, Thread
from typing import TypeVar

from shardlab.puzzles.lines import Line, line_of, own_part
from shardlab.puzzles.refusal import PuzzleRefused

T = TypeVar("T")

STOPPING_SECONDS = 3.0
"""How long a program is told to stop, before its thread is left to itself: a call into C does not listen."""

AGAIN_SECONDS, CLOSING_SECONDS = 0.05, 0.5
"""After what time it is told again: while its own lines run, and while none does."""


class Stopped(KeyboardInterrupt):
    """Raised in the program where it stands; asyncio lets it out at once, before another rank runs."""


def run_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns, or raises, with the frames of the student's program alone.

    Raises:
        PuzzleRefused: when it has not ended after so many seconds; it names the line that ran.
        KeyboardInterrupt: at once after Ctrl-C, whatever the program does.
    """
    outcome: Future[T] = Future()

    def body() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=body, daemon=True)
    thread.start()
    try:
        thread.join(min(seconds, TIMEOUT_MAX))
        if not thread.is_alive():
            error = outcome.exception()
            if error is None:
                return outcome.result()
            raise error.with_traceback(own_part(error.__traceback__))
        line = _line(thread)
        where = f", and was at {line}" if line else ""
        raise PuzzleRefused(
            f"the solution had not ended after {seconds:g} s{where}. Make its loops end, or give it more time: "
            f"grade(..., seconds={10 * seconds:g})."
        )
    finally:
        _stop(thread)


def _stop(thread: Thread) -> None:
    """End a thread where it stands, again and again in case that it catches everything."""
    if not thread.is_alive():
        return
    deadline = time.monotonic() + STOPPING_SECONDS
    show = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if lost.exc_type is Stopped else show(lost)  # in a callback of the collector
    try:
        while thread.is_alive() and time.monotonic() < deadline:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stopped))
            thread.join(AGAIN_SECONDS)
            if _line(thread) is None:  # the event loop is closing, which is not to be disturbed
                thread.join(CLOSING_SECONDS)
    finally:
        sys.unraisablehook = show


def _line(thread: Thread) -> Line | None:
    """The student's line that a thread runs."""
    return line_of(sys._current_frames().get(thread.ident or 0))  # pyright: ignore[reportPrivateUsage]

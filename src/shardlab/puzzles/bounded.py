"""Run a student's program in a thread of its own, so that it can be stopped: by Ctrl-C, or when it takes too long."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from concurrent.futures import Future
from threading import TIMEOUT_MAX, Thread
from typing import TypeVar

from shardlab.puzzles.lines import line_of, own_part
from shardlab.puzzles.refusal import PuzzleRefused

T = TypeVar("T")

STOPPING_SECONDS = 2.0
"""How long a program is told to stop, before its thread is left to itself: a call into C does not listen."""


class _Stopped(BaseException):
    """Raised in the program where it stands."""


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
        line = line_of(sys._current_frames().get(thread.ident or 0))  # pyright: ignore[reportPrivateUsage]
        where = f", and was at {line}" if line else ""
        raise PuzzleRefused(
            f"the solution had not ended after {seconds:g} s{where}. Make its loops end, or give it more time: "
            f"grade(..., seconds={10 * seconds:g})."
        )
    finally:
        _stop(thread)


def _stop(thread: Thread) -> None:
    """End a thread where it stands, again and again in case that it catches everything."""
    pause = 0.02
    for _ in range(round(STOPPING_SECONDS / pause)):
        if not thread.is_alive():
            return
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Stopped))
        thread.join(pause)

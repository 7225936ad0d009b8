"""Run a user's program in a thread of its own, so that it can be stopped: by Ctrl-C, or when it does not get on."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from threading import TIMEOUT_MAX, Thread, current_thread, get_ident
from types import FrameType
from typing import Any, TypeVar

from shardlab.errors import Refused
from shardlab.program.bounds import max_seconds
from shardlab.program.lines import is_importing, line_of, own_part

T = TypeVar("T")

STOPPING_SECONDS = 3.0
"""How long a program is told to stop, before its thread is left to itself: a call into C does not listen."""

AGAIN_SECONDS, CLOSING_SECONDS = 0.05, 0.5
"""Seconds after which it is told again: while its own lines run, and while none does."""

LOOK_SECONDS = 0.1
"""How often it is seen whether a program gets on."""


class Stopped(KeyboardInterrupt):
    """Raised in the program where it stands; asyncio lets it out at once, before another rank runs."""


class Stalled(Refused):
    """A program has run for long without writing an op; the message names the line where it stood."""


class Stoppable(Thread):
    """A thread that runs a user's program, in the context of the thread that made it.

    Attributes:
        outcome: what it returned or raised, once it has ended.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.outcome: Future[Any] = Future()
        self._work, self._context = work, copy_context()
        self._clock: int | None = None

    def run(self) -> None:
        if hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(get_ident())
        try:
            self.outcome.set_result(self._context.run(self._work))
        except BaseException as error:
            self.outcome.set_exception(error)

    def frame(self) -> FrameType | None:
        """The innermost frame that runs now."""
        return sys._current_frames().get(self.ident or 0)  # pyright: ignore[reportPrivateUsage]

    def cpu_seconds(self) -> float:
        """CPU time that it has taken, and 0 once it has ended, when its clock is gone.

        The whole process's, where a thread has no clock of its own (macOS, Windows).
        """
        if self._clock is None:
            return time.process_time()
        with suppress(OSError):
            return time.clock_gettime(self._clock)
        return 0.0

    def stop(self) -> None:
        """End it where it stands, again and again in case that it catches everything."""
        if not self.is_alive():
            return
        deadline = time.monotonic() + STOPPING_SECONDS
        show = sys.unraisablehook
        sys.unraisablehook = lambda lost: None if lost.exc_type is Stopped else show(lost)  # a collector's callback
        try:
            while self.is_alive() and time.monotonic() < deadline:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Stopped))
                self.join(AGAIN_SECONDS)
                if line_of(self.frame()) is None:  # the event loop is closing, which is not to be disturbed
                    self.join(CLOSING_SECONDS)
        finally:
            sys.unraisablehook = show


def run_stoppable(work: Callable[[], T], every: float, refusal: Callable[[Stoppable], Exception | None]) -> T:
    """What `work` returns, or raises, with the frames of the user's program alone.

    Args:
        work: what calls the program; within another stoppable program it is only called, and that one's bounds hold.
        every: seconds after which `refusal` is asked, again and again: an exception stops the program and is raised.

    Raises:
        KeyboardInterrupt: at once after Ctrl-C, whatever the program does.
    """
    if isinstance(current_thread(), Stoppable):
        return work()
    program = Stoppable(work)
    program.start()
    try:
        while True:
            program.join(min(every, TIMEOUT_MAX))
            if not program.is_alive():
                break
            if (refused := refusal(program)) is not None:
                raise refused
        error = program.outcome.exception()
        if error is None:
            return program.outcome.result()
        raise error.with_traceback(own_part(error.__traceback__))
    finally:
        program.stop()


def run_stepwise(work: Callable[[], T], steps: Callable[[], int], next_step: Callable[[], str]) -> T:
    """What `work` returns, or raises, as long as the user's program in it gets on.

    Only CPU time in the user's own lines counts, and no import: Shardlab's own programs may take any time.

    Args:
        steps: a number that grows whenever the program gets on.
        next_step: what is then waited for, such as "rank 0, op 12".

    Raises:
        Stalled: when it has not grown for `bounds.max_seconds()` of CPU time, with the line that runs.
    """
    most, seen, since = max_seconds(), -1, 0.0

    def refusal(program: Stoppable) -> Stalled | None:
        nonlocal seen, since
        frame, now, before = program.frame(), program.cpu_seconds(), seen
        seen, line = steps(), line_of(frame)
        if seen != before or line is None or is_importing(frame):
            since = now
        elif now - since > most:
            given = f"{next_step()} has not come within {most:g} s of CPU time"
            remedy = "let the loop end, or raise --max-seconds-per-op if the program is only slow"
            stalled = Stalled("stalled", "", given, remedy)
            stalled.line = str(line)
            return stalled
        return None

    return run_stoppable(work, LOOK_SECONDS, refusal)

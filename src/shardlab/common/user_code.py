"""Python files that users name on the command line, as path/to/file.py:NAME."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from threading import TIMEOUT_MAX, Thread, current_thread, get_ident
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, TypeVar

from shardlab.common.errors import Refused, UserError, closest_name


def file_and_name(name: str) -> tuple[Path | None, str]:
    """Split `path/to/file.py:NAME`; a built-in name has no file."""
    path, colon, member = name.rpartition(":")
    if colon:
        return Path(path), member
    return (Path(name), "") if name.endswith(".py") else (None, name)


def find_member(module: ModuleType, path: Path, name: str, what: tuple[str, str], is_one: Callable[[Any], bool]) -> Any:
    """Get what a file has under a name.

    Args:
        what: the kind of thing that is wanted, and all that a file has of it; `is_one` knows it.

    Raises:
        UserError: if there is no such name; the nearest one is suggested.
    """
    found = getattr(module, name, None) if name else None
    if found is None:
        have = [key for key, value in vars(module).items() if is_one(value)]
        one, several = what
        missing = f"{path} has no {one} {name!r}" if name else f"say which {one} of {path}: {path}:NAME"
        near = closest_name(name, have)
        hint = f"did you mean {near}?" if near else f"its {several} are: {', '.join(have) or 'none'}"
        raise UserError(f"{missing}; {hint}")
    return found


def load_module(path: Path) -> ModuleType:
    """Run a file as a module; nothing is written beside it, and places in it are named as the user named it.

    Raises:
        UserError: if there is no such file, or it cannot be run.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give path/to/file.py:NAME")
    module = ModuleType(f"shardlab_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look it up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    with reporting_errors_of(path):
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    return module


@contextlib.contextmanager
def reporting_errors_of(path: Path) -> Generator[None]:
    """While a file's code runs, what it prints goes to stderr: a command's stdout is its own.

    Raises:
        UserError: for whatever the code raises, with its line.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error}") from error
        raise UserError(f"{place} cannot be run: {type(error).__name__}: {error}") from error


# Lines of the user's own program, by which messages are found again in it.


_PATHS = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}

INSTALLED = (*_PATHS, "<frozen ")
"""How names of files begin that are the standard library's, or a package's that pip installed."""

IMPORTING = "<frozen importlib._bootstrap>"
"""The file of a frame that imports a module."""


class SourceLine(NamedTuple):
    """A line of a file, or of a notebook's cell."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{display_path(self.file)}:{self.number}"


def at_line(line: SourceLine | None) -> str:
    """Where somebody waits, to be put after it; empty if that is not known."""
    return "" if line is None else f" ({line})"


def line_now() -> SourceLine | None:
    """Return the innermost line of the user that runs now; None if there is none."""
    return user_line_of(sys._getframe())  # pyright: ignore[reportPrivateUsage]


def user_line_of(frame: FrameType | None) -> SourceLine | None:
    """Return the innermost line of the user among a frame and its callers; None if there is none."""
    while frame is not None and is_library_frame(frame):
        frame = frame.f_back
    return None if frame is None else SourceLine(frame.f_code.co_filename, frame.f_lineno)


def source_line(refusal: Refused) -> list[str]:
    """Return the source line at fault with its place: the refusal's, or else the user's innermost in the traceback.

    The list is empty if there is no such line, or if the message names the lines of several ranks.
    """
    file, _, number = refusal.line.rpartition(":")
    frames = traceback.walk_tb(None if file or refusal.trail else (refusal.__cause__ or refusal).__traceback__)
    lines = [SourceLine(frame.f_code.co_filename, at) for frame, at in frames if not is_library_frame(frame)]
    line = SourceLine(file, int(number)) if file else lines[-1] if lines else None
    text = linecache.getline(*line).strip() if line else ""
    return [f"{line}:  {text}"] if text else []


@contextmanager
def short_paths() -> Generator[None]:
    """Name the file of a refusal in this context by `display_path`."""
    try:
        yield
    except Refused as refusal:
        file, _, number = refusal.line.rpartition(":")
        refusal.line = f"{display_path(file)}:{number}" if file else ""
        raise


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame, or one of its callers, imports a module."""
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    return frame is not None


def user_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames by which Shardlab came to the user's program."""
    while traceback is not None and traceback.tb_next is not None and is_library_frame(traceback.tb_frame):
        traceback = traceback.tb_next
    return traceback


def is_library_frame(frame: FrameType) -> bool:
    """Return whether a frame belongs to Shardlab, to a package or to the standard library (named tuples included)."""
    ours = str(frame.f_globals.get("__name__")).startswith(("shardlab.", "namedtuple_"))
    return ours or frame.f_code.co_filename.startswith(INSTALLED)


def display_path(file: str) -> str:
    """Return a file's path relative to the working directory, or the name of a notebook's cell, such as `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(file) if shell else None
    if cell:
        return str(cell[1])
    inside = file.startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if inside else file


# Run a user's program in a thread of its own, so that it can be stopped: by Ctrl-C, or when it does not get on.


T = TypeVar("T")

STOPPING_SECONDS = 3.0
"""How long a program is told to stop, before its thread is left to itself: a call into C does not listen."""

REPEAT_SECONDS, CLOSING_SECONDS = 0.05, 0.5
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
        """Return the innermost frame that runs now."""
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
                self.join(REPEAT_SECONDS)
                if user_line_of(self.frame()) is None:  # the event loop is closing, which is not to be disturbed
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
        raise error.with_traceback(user_traceback(error.__traceback__))
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
        seen, line = steps(), user_line_of(frame)
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


# How many ops are traced, and how long one may take: a program may never end, and an input of a few digits may ask
# for more than memory holds.


MAX_OPS = 500_000
"""Ops on all tapes, if nobody says: two seconds, and some hundred megabytes."""

MAX_FOLDED_OPS = 4_000_000
"""Ops on the tapes of a plan whose alike ranks are folded, if nobody says: a plan ends, so these may be more."""

MAX_SECONDS = 2.0
"""CPU seconds that a user's program may take until its next op, if nobody says."""

VALUES_PER_COUNT = 256
"""A rank counts its ops whenever it has made so many more values, or issued so many more communications."""

_limits: ContextVar[tuple[int | None, float | None]] = ContextVar("bounds", default=(None, None))


class Endless(Refused):
    """A program has written more ops than are traced."""


@contextmanager
def trace_limits(ops: int | None = None, seconds: float | None = None) -> Generator[None, None, None]:
    """Let programs have so many ops, and so many CPU seconds for each (None: as if nobody said).

    Raises:
        UserError: for no time at all.
    """
    if seconds is not None and not seconds > 0:
        raise UserError(f"--max-seconds-per-op: {seconds:g} is too little; give more than 0")
    token = _limits.set((ops, seconds))
    try:
        yield
    finally:
        _limits.reset(token)


def max_ops(default: int = MAX_OPS) -> int:
    """Return how many ops a traced program may have on all its tapes."""
    return _limits.get()[0] or default


def max_seconds() -> float:
    """Return how many CPU seconds a user's program may take until its next op."""
    return _limits.get()[1] or MAX_SECONDS


def require_ops(least: int, what: str, default: int = MAX_OPS) -> None:
    """Refuse what is sure to have too many ops before any is traced.

    Args:
        least: how many ops there will be, or more.
        what: what they are for, in the plural.
        default: how many there may be, if nobody said.

    Raises:
        UserError: with both numbers.
    """
    if least > (most := max_ops(default)):
        raise UserError(
            f"{what} come to {least:,} ops or more, and at most {most:,} are traced; take fewer, or raise --max-ops if "
            "there is the time and the memory"
        )


class OpCount:
    """The ops that all ranks of a world have written.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._ops = 0

    def add(self, ops: int) -> None:
        """Count some more.

        Raises:
            Endless: if these are too many.
        """
        self._ops += ops
        if self._ops > self.most:
            given = f"the step has more than {self.most:,} ops here, and no more are traced"
            remedy = (
                "if this goes on for ever, let the loops end whatever the numbers are; otherwise raise --max-ops, or "
                "take fewer microbatches"
            )
            raise Endless("endless", "", given, remedy)

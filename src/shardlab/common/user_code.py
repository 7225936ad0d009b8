"""Python files of users, named as path/to/file.py:NAME: loading them, finding lines in them, and stopping them.

Read in this order: `load_module` and `find_member` (import a file as a module), `SourceLine` and `user_line_of` (the
line of the user's file that a message names), `Stoppable` and `run_stoppable` (a user's program in its own thread, so
that Ctrl-C or a time limit can stop it), and `trace_limits` (limits of ops and of CPU time, for programs that never end
or need too much memory).
"""

from __future__ import annotations

import ctypes
import linecache
import os
import re
import sys
import sysconfig
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX, Thread, current_thread, get_ident
from types import FrameType, ModuleType, TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from shardlab.common.errors import Refused, UserError, closest_name, error_text
from shardlab.common.files import path_from_here
from shardlab.common.memory import available_memory, peak_memory, resident_memory
from shardlab.common.text import bytes_text


def file_and_name(name: str) -> tuple[Path | None, str]:
    """Split `path/to/file.py:NAME` into file and name. A built-in name has no file."""
    path, colon, member = name.rpartition(":")
    if colon:
        return Path(path), member
    return (Path(name), "") if name.endswith(".py") else (None, name)


def file_from_here(name: str, folder: str | None) -> str:
    """Return the name of a strategy, a schedule or a model for use in this working directory.

    Args:
        name: a built-in name, `path/to/file.py:NAME`, or a TOML or CSV file.
        folder: the working directory of the command that used the name; None if it is unknown.
    """
    is_path = file_and_name(name)[0] is not None or name.endswith((".toml", ".csv"))
    return path_from_here(name, folder) if is_path else name


def find_member(
    module: ModuleType, path: Path, name: str, nouns: tuple[str, str], is_one: Callable[[Any], bool]
) -> tuple[str, Any]:
    """Return the name of an object in a user's file, and the object.

    Args:
        name: name of the object. If it is empty, the object that has the file's name is returned, or else the only one;
            objects that the file imports do not count.
        nouns: noun for such objects, in the singular and in the plural.
        is_one: function that tells whether an object is one of them.

    Raises:
        UserError: if there is no such name. The message suggests the nearest one.
    """
    names = [key for key, value in vars(module).items() if is_one(value)]
    if not name:
        own_names = [key for key in names if getattr(vars(module)[key], "__module__", None) == module.__name__]
        name = path.stem if path.stem in own_names else own_names[0] if len(own_names) == 1 else ""
    member = getattr(module, name, None) if name else None
    if member is None:
        singular, plural = nouns
        missing = f"{path} has no {singular} {name!r}" if name else f"say which {singular} of {path}: {path}:NAME"
        nearest = closest_name(name, names)
        hint = f"did you mean {nearest}?" if nearest else f"its {plural} are: {', '.join(names) or 'none'}"
        raise UserError(f"{missing}; {hint}")
    return name, member


def load_module(path: Path) -> ModuleType:
    """Run a file as a module, without writing bytecode. Tracebacks name the file as the user did.

    Raises:
        UserError: if there is no such file, or it cannot be run.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give path/to/file.py:NAME")
    module = ModuleType(f"shardlab_user_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look the module up
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    with reporting_errors_of(path):
        exec(compile(path.read_bytes(), str(path), "exec", dont_inherit=True), vars(module))
    return module


@contextmanager
def reporting_errors_of(path: Path) -> Generator[None]:
    """Run a block of a user's code with its prints on stderr, since stdout belongs to the command.

    Errors of the code become a UserError.

    Raises:
        UserError: for any exception of the code, with its line.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = lines[-1] if lines else getattr(error, "lineno", None)
        place = f"{path}:{line}" if line else str(path)
        if isinstance(error, UserError):
            raise UserError(f"{place}: {error}") from error
        message = error.msg if isinstance(error, SyntaxError) else ""  # without the line, which is in `place`
        remedy = "; write `async def`" if "outside async function" in message else ""
        raise UserError(f"{place} cannot be run: {error_text(error, message)}{remedy}") from error


_PATHS = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}

INSTALLED = (*_PATHS, "<frozen ")
"""Prefixes of file names of the standard library and of installed packages."""

IMPORTING = "<frozen importlib._bootstrap>"
"""File name of a frame that imports a module."""


class SourceLine(NamedTuple):
    """Line of a file, or of a notebook's cell."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{display_path(self.file)}:{self.number}"


def at_line(line: SourceLine | None) -> str:
    """Return a line in parentheses, to be put after a sentence; empty if the line is unknown."""
    return "" if line is None else f" ({line})"


def line_now() -> SourceLine | None:
    """Return the innermost line of the user's code that runs now; None if there is none."""
    return user_line_of(sys._getframe())  # pyright: ignore[reportPrivateUsage]


def user_line_of(frame: FrameType | None) -> SourceLine | None:
    """Return the innermost line of the user's code in a frame or its callers; None if there is none."""
    while frame is not None and is_library_frame(frame):
        frame = frame.f_back
    if frame is None:
        return None
    line = cast(int | None, frame.f_lineno)  # None between two lines, as at the end of a `for`
    return SourceLine(frame.f_code.co_filename, frame.f_code.co_firstlineno if line is None else line)


def line_of_error(error: BaseException) -> SourceLine | None:
    """Return the innermost line of the user's code in an error's traceback; None if there is none."""
    frames = traceback.walk_tb(error.__traceback__)
    lines = [SourceLine(frame.f_code.co_filename, line) for frame, line in frames if not is_library_frame(frame)]
    return lines[-1] if lines else None


def source_line(refusal: Refused) -> list[str]:
    """Return `file:line:  text` of the line at fault: the refusal's `line`, or else the innermost line of the user's
    code in its traceback.

    The list is empty if there is no such line, or if the message names the lines of several ranks.
    """
    if refusal.source:
        return [f"{refusal.line}:  {refusal.source}"]
    file, _, number = refusal.line.rpartition(":")
    cause = None if refusal.trail else line_of_error(refusal.__cause__ or refusal)
    line = SourceLine(file, int(number)) if file else cause
    text = linecache.getline(*line).strip() if line else ""
    return [f"{line}:  {text}"] if text else []


@contextmanager
def short_paths() -> Generator[None]:
    """Shorten the file name of refusals raised in the block with `display_path`."""
    try:
        yield
    except Refused as refusal:
        file, _, number = refusal.line.rpartition(":")
        if file:
            refusal.line = f"{display_path(file)}:{number}"
            refusal.source = refusal.source or linecache.getline(file, int(number)).strip()
        raise


_NEVER_AWAITED = re.compile("coroutine '(.*)' was never awaited")


class DroppedCoroutine(NamedTuple):
    """Coroutine that was never awaited: its name, its line, and a function that shows Python's warning."""

    name: str
    line: SourceLine
    warn: Callable[[], None]


@contextmanager
def never_awaited() -> Generator[list[DroppedCoroutine]]:
    """Collect the coroutines that are never awaited in this context. Other warnings are shown as usual."""
    coroutines: list[DroppedCoroutine] = []
    with warnings.catch_warnings():
        warnings.filterwarnings("always", _NEVER_AWAITED.pattern, RuntimeWarning)
        show = warnings.showwarning

        def collect(message: Warning | str, category: type[Warning], file: str, number: int, *rest: Any) -> None:
            warn = partial(show, message, category, file, number, *rest)
            if match := _NEVER_AWAITED.match(str(message)):
                coroutines.append(DroppedCoroutine(match[1].rpartition(".")[2], SourceLine(file, number), warn))
            else:
                warn()

        warnings.showwarning = collect
        yield coroutines


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame, or one of its callers, imports a module."""
    while frame is not None and frame.f_code.co_filename != IMPORTING:
        frame = frame.f_back
    return frame is not None


def user_traceback(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the outer frames that belong to Shardlab."""
    while traceback is not None and traceback.tb_next is not None and is_library_frame(traceback.tb_frame):
        traceback = traceback.tb_next
    return traceback


def is_library_frame(frame: FrameType) -> bool:
    """Return whether a frame belongs to Shardlab, to a package or to the standard library (named tuples included)."""
    is_shardlab = str(frame.f_globals.get("__name__")).startswith(("shardlab.", "namedtuple_"))
    return is_shardlab or frame.f_code.co_filename.startswith(INSTALLED)


def display_path(file: str) -> str:
    """Return a file's path relative to the working directory, or the name of a notebook's cell, such as `In[3]`."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    cell = shell.compile.format_code_name(file) if shell else None
    if cell:
        return str(cell[1])
    is_inside = file.startswith(os.getcwd() + os.sep)
    return os.path.relpath(file) if is_inside else file


T = TypeVar("T")

STOPPING_SECONDS = 3.0
"""Seconds during which a program is asked to stop. Its thread is then abandoned, since a call into C cannot be stopped.
"""

REPEAT_SECONDS, CLOSING_SECONDS = 0.05, 0.5
"""Seconds between two requests to stop: the first while the user's lines run, both together while only the event loop
runs."""

LOOK_SECONDS = 0.1
"""Seconds between two checks of a program's progress."""


def in_notebook_cell() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook, or was started by one, as by a cell with `!`.

    The output of such a process looks like that of a terminal, but what has been printed stays as it is: nothing can be
    redrawn, and nobody can press a key. Jupyter sets JPY_PARENT_PID for a kernel, and processes that the kernel starts
    inherit it (jupyter_client's `launcher.py`).
    """
    return "JPY_PARENT_PID" in os.environ


class Stopped(KeyboardInterrupt):
    """Exception that is raised in a program to stop it. asyncio passes it on at once, before another rank runs."""


class Stalled(Refused):
    """Refusal of a program that has been stopped: it has not written an op for a long time, or takes too much memory.

    The message names its current line.
    """


class Stoppable(Thread):
    """Thread that runs a user's program, in the context of the thread that made it.

    Attributes:
        outcome: result or exception of the program, once it has ended.
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
        """Return the CPU time of the thread, or 0 after its end.

        On systems without a clock for each thread (macOS, Windows), this is the CPU time of the process.
        """
        if self._clock is None:
            return time.process_time()
        with suppress(OSError):
            return time.clock_gettime(self._clock)
        return 0.0

    def stop(self) -> None:
        """Stop the program where it is. The exception is raised repeatedly, since the program may catch it."""
        if not self.is_alive():
            return
        deadline = time.monotonic() + STOPPING_SECONDS
        show = sys.unraisablehook
        sys.unraisablehook = lambda args: None if args.exc_type is Stopped else show(args)  # in a collector's callback
        try:
            while self.is_alive() and time.monotonic() < deadline:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.ident or 0), ctypes.py_object(Stopped))
                self.join(REPEAT_SECONDS)
                if user_line_of(self.frame()) is None:  # the event loop is closing and must not be disturbed
                    self.join(CLOSING_SECONDS)
        finally:
            sys.unraisablehook = show


def run_stoppable(work: Callable[[], T], interval: float, refusal: Callable[[Stoppable], Exception | None]) -> T:
    """Run `work` in a thread that can be stopped, and return its result or raise its error.

    The traceback of an error has only frames of the user's program.

    Args:
        work: function that calls the program. Inside another stoppable program it is called directly, under the limits
            of that program.
        interval: seconds between two calls of `refusal`. An exception that it returns stops the program and is raised.

    Raises:
        KeyboardInterrupt: immediately after Ctrl-C, whatever the program does.
    """
    if isinstance(current_thread(), Stoppable):
        return work()
    program = Stoppable(work)
    program.start()
    try:
        while True:
            program.join(min(interval, TIMEOUT_MAX))
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
    """Run `work` while the user's program in it makes progress, and return its result or raise its error.

    Only time in the user's lines counts, without imports and debuggers. Programs of Shardlab have no limit of time.

    Args:
        steps: function that returns a number, which grows as the program makes progress.
        next_step: function that returns the name of the next step, such as "rank 0, op 12".

    Raises:
        Stalled: if `steps` has not grown for `max_seconds()` of CPU time, or for `WAIT_FACTOR` times as many seconds
            in which the program only waited; or if the program has taken `MOST_GROWTH` of the available memory. The
            message names the current line.
    """
    limit, step_count, cpu_start, wall_start = max_seconds(), -1, 0.0, 0.0
    available, start_bytes = available_memory(), resident_memory()
    max_bytes = max(peak_memory(), start_bytes + MOST_GROWTH * (available or 0))

    def refusal(program: Stoppable) -> Stalled | None:
        nonlocal step_count, cpu_start, wall_start
        frame, cpu_time, now, previous_count = program.frame(), program.cpu_seconds(), time.monotonic(), step_count
        step_count, line = steps(), user_line_of(frame)
        if line is not None and available is not None and (peak := peak_memory()) > max_bytes:
            reason = (
                f"the program has taken {bytes_text(peak - start_bytes)} of the {bytes_text(available)} of memory left"
            )
            return _stalled(line, reason, "let its loops end, or keep less")
        if step_count != previous_count or line is None or is_importing(frame) or _is_debugging(frame):
            cpu_start, wall_start = cpu_time, now
        elif cpu_time - cpu_start > limit:
            reason = f"{next_step()} has not come within {limit:g} s of CPU time"
            return _stalled(line, reason, "let the loop end, or raise --max-seconds-per-op if the program is only slow")
        elif now - wall_start > WAIT_FACTOR * limit and cpu_time - cpu_start < IDLE_SHARE * (now - wall_start):
            reason = f"{next_step()} has not come, since the program has waited for {WAIT_FACTOR * limit:g} s"
            return _stalled(line, reason, "leave out what waits (time.sleep, input), or raise --max-seconds-per-op")
        return None

    return run_stoppable(work, LOOK_SECONDS, refusal)


def _stalled(line: SourceLine, reason: str, remedy: str) -> Stalled:
    stalled = Stalled("stalled", "", reason, remedy)
    stalled.line = str(line)
    return stalled


def _is_debugging(frame: FrameType | None) -> bool:
    """Return whether a debugger has stopped a frame, or one of its callers."""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith(DEBUGGERS):
        frame = frame.f_back
    return frame is not None


DEBUGGERS = ("bdb", "pdb", "ipdb", "IPython.core.debugger", "pydevd", "_pydevd", "debugpy")
"""Prefixes of the names of modules of debuggers, including the debuggers of VS Code and PyCharm."""

WAIT_FACTOR = 5
"""Limit of seconds in which a program only waits, as a multiple of its limit of CPU seconds between two ops."""

MOST_GROWTH = 0.9
"""Limit of the memory that a program takes, as a share of the memory that was available before."""

IDLE_SHARE = 0.01
"""Share of a core below which a program counts as waiting. A program that computes gets more, even on a busy
machine."""

MAX_OPS = 500_000
"""Default limit of the ops on all tapes: about two seconds of tracing and some hundred megabytes."""

MAX_FOLDED_OPS = 4_000_000
"""Default limit for a plan with folded ranks. It is higher, since the program of a plan always ends."""

MAX_SECONDS = 2.0
"""Default limit of a user's program in CPU seconds between two ops."""

VALUES_PER_COUNT = 256
"""Number of new values, or of new communications, after which a rank adds its ops to `OpCount`."""

_limits: ContextVar[tuple[int | None, float | None]] = ContextVar("bounds", default=(None, None))


class Endless(Refused):
    """Refusal of a program that has written more ops than the limit."""


@contextmanager
def trace_limits(ops: int | None = None, seconds: float | None = None) -> Generator[None, None, None]:
    """Set the limits of ops, and of CPU seconds per op, during the block. None keeps a default.

    Raises:
        UserError: if `seconds` is not above 0.
    """
    if seconds is not None and not seconds > 0:
        raise UserError(f"--max-seconds-per-op: {seconds:g} is too little; give more than 0")
    token = _limits.set((ops, seconds))
    try:
        yield
    finally:
        _limits.reset(token)


def max_ops(default: int = MAX_OPS) -> int:
    """Return the limit of the ops on all tapes of a traced program."""
    return _limits.get()[0] or default


def max_seconds() -> float:
    """Return the limit of a user's program in CPU seconds between two ops."""
    return _limits.get()[1] or MAX_SECONDS


def require_ops(lower_bound: int, subject: str, default: int = MAX_OPS) -> None:
    """Refuse a program before tracing if it is certain to have too many ops.

    Args:
        lower_bound: lower bound of the number of ops.
        subject: noun for the message, in the plural.
        default: the limit, if the user has set none.

    Raises:
        UserError: with both numbers.
    """
    if lower_bound > (limit := max_ops(default)):
        raise UserError(
            f"{subject} come to {lower_bound:,} ops or more, and at most {limit:,} are traced; take fewer, or raise "
            "--max-ops if there is the time and the memory"
        )


class OpCount:
    """Count of the ops that all ranks of a world have written.

    Args:
        limit: largest number of ops.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._ops = 0

    def add(self, ops: int) -> None:
        """Add to the count.

        Raises:
            Endless: if the count is above the limit.
        """
        self._ops += ops
        if self._ops > self.limit:
            reason = f"the step has more than {self.limit:,} ops here, and no more are traced"
            remedy = (
                "if this goes on for ever, let the loops end whatever the numbers are; otherwise raise --max-ops, or "
                "take fewer microbatches"
            )
            raise Endless("endless", "", reason, remedy)

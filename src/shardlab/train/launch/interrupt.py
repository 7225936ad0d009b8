"""Requests to stop: by a signal, or because the process that started this one has ended.

`catch_signals` turns signals into bytes of a socket, and `StopRequest` turns these into a request to stop after
the current step. `TolerantStream` survives a terminal or pipe that closes. `Heartbeat` prints a line after each long
silence.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType, TracebackType
from typing import Any, ClassVar, TextIO, cast

from shardlab.common.processes import orphaned
from shardlab.common.text import wrap_words

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that ask a run to stop: Ctrl-C; schedulers and torchrun; a closed terminal; a scheduler's warning."""

KILL_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that end a run at once if they arrive a second time."""

GRACE = 7
"""Seconds from a request to stop until the run is killed: less than the 10 s of `docker stop`."""

WARNED_GRACE = 100
"""Seconds from a scheduler's warning until the run is killed: fewer than the `job_script.WARNING` that then remain."""


def grace_of(number: int) -> int:
    """Return the number of seconds from a signal until the run is killed."""
    return WARNED_GRACE if number == signal.SIGUSR1 else GRACE


@contextmanager
def catch_signals() -> Generator[socket.socket]:
    """Turn signals that ask this process to stop into bytes of a socket, each the number of the signal.

    The bytes arrive at once, even while the main thread waits in a collective, in which Python runs no handlers. A
    signal that is ignored (after nohup, or in the background of a script) stays ignored. Outside of the main thread no
    bytes arrive, because signals go to the main thread.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        if threading.current_thread() is not threading.main_thread():
            yield reader
            return
        writer.setblocking(False)
        caught = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        old_handlers = {number: signal.signal(number, _ignore_signal) or signal.SIG_DFL for number in caught}
        woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            yield reader
        finally:
            signal.set_wakeup_fd(woken)
            for number, handler in old_handlers.items():
                signal.signal(number, handler)


class StopRequest:
    """Context manager that receives requests to stop this rank after the current step.

    Attributes:
        is_requested: whether there was a request. If the rank still runs some seconds later (`grace_of`), it is killed.
    """

    starter: Connection | None = None
    """Connection on which a rank passes a request on to the process that started it, and so to all other ranks."""

    def __init__(self, describe_saved: Callable[[], str] | None) -> None:
        """Create the request; signals are caught inside of `with`.

        Args:
            describe_saved: function that returns a sentence about what has been saved so far. None on ranks that
                print nothing about requests.
        """
        self.is_requested = False
        self._grace = 0
        self._describe_saved = describe_saved
        self._end_event = threading.Event()
        self._catching = catch_signals()

    @property
    def warned(self) -> bool:
        """Whether the request was a scheduler's warning."""
        return self._grace == WARNED_GRACE

    def __enter__(self) -> StopRequest:
        # The thread gets a copy of the socket, which it may still read after `with` has ended.
        signals = self._catching.__enter__().dup()
        threading.Thread(target=self._listen, args=(signals,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_event.set()
        if self.is_requested:
            signal.alarm(0)
            if orphaned():
                self._say("the process that started the ranks has gone")
        self._catching.__exit__(kind, error, trace)

    def ask(self, grace: int = GRACE) -> None:
        """Ask this rank to stop, and all other ranks through the process that started it.

        A later request replaces an earlier one if it leaves more time.

        Args:
            grace: seconds until the rank is killed.
        """
        if grace <= self._grace:
            return
        self.is_requested, self._grace = True, grace
        signal.alarm(grace)  # the kernel ends this process, even in a collective that never returns
        if StopRequest.starter is not None:
            with suppress(BrokenPipeError):
                StopRequest.starter.send_bytes(str(grace).encode())
        if self._describe_saved:
            say(f"shardlab: ending after this step, in at most {grace} s")

    def _listen(self, signals: socket.socket) -> None:
        with signals:
            number = signals.recv(1)
            if not number:  # the socket was closed when `with` ended
                return
            self.ask(grace_of(number[0]))
        # If the process that started this one still runs, it reports a step that does not end.
        alone = multiprocessing.parent_process() is None or orphaned()
        if not self._end_event.wait(self._grace - 0.5) and alone:
            self._say(f"the step did not end within {self._grace} s")
            signal.raise_signal(signal.SIGALRM)  # at once, so that the message stays true

    def _say(self, reason: str) -> None:
        if self._describe_saved:
            say(f"shardlab: interrupted: {reason}; {self._describe_saved()}")


ESCAPE = "\x1b"
"""First character of commands to a terminal. A line that contains it is from a display, which breaks its own lines."""

FEWEST_COLUMNS = 20
"""Number of characters that fit into a line of every terminal."""


class TolerantStream:
    """Text stream that drops its output if its reader is gone: a closed terminal, or a `tee` that Ctrl-C ended.

    In a terminal, it breaks long lines between words. The terminal would break them inside of paths and options.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            self._file.write(self._fitted(text))
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _fitted(self, text: str) -> str:
        if len(text) < FEWEST_COLUMNS or not self._file.isatty():
            return text
        from rich.console import Console

        width = Console(file=self._file).width
        return "\n".join(line if ESCAPE in line else wrap_words(line, width) for line in text.split("\n"))

    def _drop(self) -> None:
        """Discard all output from now on, including what is still in the buffer."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)


def ignore_errors(file: TextIO) -> TextIO:
    """Return a stream that does not raise if its reader is gone."""
    return cast(TextIO, TolerantStream(file))


SILENCE = 9.0
"""Seconds of silence after which a line reports the current activity."""


class Heartbeat:
    """Context manager that, after each silence, prints the current activity and its duration on stderr.

    Args:
        silence: seconds without output before a line is printed (None: SILENCE).

    Attributes:
        doing: current activity. Setting it restarts the clock.
        until: function that returns whether another display has taken over. No more lines are printed then.
    """

    def __init__(self, doing: str, silence: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
        self.until = until
        self._silence = SILENCE if silence is None else silence
        self._changed = threading.Condition()
        self._has_ended = False
        self._printed = time.monotonic()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.doing = doing

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, activity: str) -> None:
        self._doing, self._since = activity, time.monotonic()

    def say(self, line: str) -> None:
        """Print a line."""
        with self._changed:
            self._print(line)

    active: ClassVar[Heartbeat | None] = None
    """Heartbeat whose `with` block is active (None: there is none)."""

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        Heartbeat.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Heartbeat.active = None
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        self._thread.join()

    def _beat(self) -> None:
        with self._changed:
            while not self._has_ended:
                if time.monotonic() - self._printed >= self._silence:
                    if self.until():
                        return
                    self._print(f"{self._doing}  under way for {time.monotonic() - self._since:.0f} s")
                self._changed.wait(max(0.0, self._printed + self._silence - time.monotonic()))

    def _print(self, line: str) -> None:
        say(line)
        self._printed = time.monotonic()


def say_waiting(line: str) -> None:
    """Print a line about what this process waits for. The active heartbeat's silence then begins again."""
    (say if Heartbeat.active is None else Heartbeat.active.say)(line)


def say(line: str) -> None:
    """Print a line on stderr. If it cannot be written, as on a full disk, training continues."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def stop_signals(signals: socket.socket, limit: int) -> list[int] | None:
    """Read up to `limit` signals, and return those that ask to stop (None: the socket is closed).

    Python writes every signal that it handles into the socket, such as those of timers that other code has set.
    """
    numbers = signals.recv(limit)
    return [number for number in numbers if number in STOP_SIGNALS] if numbers else None


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore the signal in Python: its number is already in the socket."""

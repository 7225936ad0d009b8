"""A sign of life where no line can be drawn over: never ten seconds without a line."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar

SILENCE = 9.0
"""Seconds without a line after which one says what is under way."""


class Heartbeat:
    """Prints lines on stderr; after each silence, also what is under way and for how long. Use it as a context.

    Args:
        silence: seconds, by default SILENCE.

    Attributes:
        doing: what is under way; setting it starts its clock.
        until: whether somebody else gives signs of life from now on.
    """

    def __init__(self, doing: str, silence: float | None = None, until: Callable[[], bool] = lambda: False) -> None:
        self.until = until
        self._silence = SILENCE if silence is None else silence
        self._changed = threading.Condition()
        self._ended = False
        self._printed = time.monotonic()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self.doing = doing

    @property
    def doing(self) -> str:
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing, self._since = what, time.monotonic()

    def say(self, line: str) -> None:
        """Print a line."""
        with self._changed:
            self._print(line)

    active: ClassVar[Heartbeat | None] = None
    """The one that is inside `with`, which is silent for a while after each line of `say_waiting`."""

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        Heartbeat.active = self
        return self

    def __exit__(self, *_: object) -> None:
        Heartbeat.active = None
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def _beat(self) -> None:
        with self._changed:
            while not self._ended:
                if time.monotonic() - self._printed >= self._silence:
                    if self.until():
                        return
                    self._print(f"{self._doing}  under way for {time.monotonic() - self._since:.0f} s")
                self._changed.wait(max(0.0, self._printed + self._silence - time.monotonic()))

    def _print(self, line: str) -> None:
        say(line)
        self._printed = time.monotonic()


def say_waiting(line: str) -> None:
    """Print a line on what this process waits for, which is a sign of life as well."""
    (say if Heartbeat.active is None else Heartbeat.active.say)(line)


def say(line: str) -> None:
    """Print a line on stderr, if it can be written: a log on a full disk ends no training."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)

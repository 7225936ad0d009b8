"""Ctrl-C and SIGTERM, turned into a wish that training ends after a whole step and keeps what it has."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


class StopRequest:
    """Handles both signals from when it is made; `asked` tells whether one has come."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def leave_if_asked() -> None:
    """End this process now if a StopRequest was asked: the agent that started it no longer reads its result.

    From now on SIGTERM ends it: the agent sends it where another rank fails at the end, and waits for half a minute.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if isinstance(handler, StopRequest):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if handler.asked:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

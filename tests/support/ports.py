"""Ports that nobody else takes before they are used."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

_numbers = count(os.getpid() * 101)


def free_port() -> int:
    """A free port of 127.0.0.1, another one each time.

    The system gives ports from 32768 on to whoever asks for any, and could give away a free one before it is used; this
    one is below. Processes that test at the same time begin at places of their own.
    """
    while True:
        port = 10_000 + next(_numbers) % 20_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port

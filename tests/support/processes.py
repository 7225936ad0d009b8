"""Processes that tests start: they can be interrupted, they end with their test, and none outlives the session."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

MARK = "SHARDLAB_TESTS"
"""Variable by which a process of the tests is found, also after its parent has ended. Its value is the path of pytest
processes that led to it: `/CONTROLLER/WORKER`."""


def stop_ignoring_signals() -> None:
    """Let the processes that tests start be interrupted and hung up, even if this process ignores both signals.

    Shells start a background job with SIGINT ignored, and nohup with SIGHUP ignored. Whatever the job starts would
    inherit that. A signal that has a handler is at its default in a new program. This process raises KeyboardInterrupt
    on SIGINT, as in the foreground, and still outlives SIGHUP, as nohup promises.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


def mark_processes() -> str:
    """Mark all processes that this one starts from now on.

    Returns:
        The mark, for `left_processes`.
    """
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{os.getpid()}"
    return os.environ[MARK]


@contextmanager
def started(
    words: Sequence[str], start: Callable[..., subprocess.Popen[str]] = subprocess.Popen, **options: Any
) -> Generator[subprocess.Popen[str]]:
    """Start a program in a session of its own with pipes for its output, and kill the session when the block ends.

    Args:
        start: `subprocess.Popen`, or `WarmStarts.start` for arguments of Python.
        options: further arguments of `subprocess.Popen`.
    """
    pipe = subprocess.PIPE
    process = start(words, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@dataclass(frozen=True)
class LeftProcess:
    """Process that still runs although the test that started it is over.

    Attributes:
        pid: number of the process.
        command: command line.
        test: the test that started it, or "" if it was started between tests.
    """

    pid: int
    command: str
    test: str

    def __str__(self) -> str:
        return f"{self.test or 'a fixture'} left process {self.pid}: {self.command}"


def left_processes(mark: str, patience: float) -> list[LeftProcess]:
    """Return the processes with a mark, or a longer one, that have not ended within `patience` seconds."""
    deadline = time.monotonic() + patience
    while (processes := list(_marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def _marked(mark: str) -> Iterator[LeftProcess]:
    """Yield the marked processes but this one and multiprocessing's servers, which end with it."""
    servers: tuple[Any, Any] = (forkserver._forkserver, resource_tracker._resource_tracker)  # pyright: ignore
    own_processes = {os.getpid(), servers[0]._forkserver_pid, servers[1]._pid}
    for folder in Path("/proc").glob("[0-9]*"):  # none where the system has no such folder
        variables = dict(entry.split("=", 1) for entry in _strings(folder / "environ") if "=" in entry)
        value = variables.get(MARK, "")
        if int(folder.name) not in own_processes and (value == mark or value.startswith(f"{mark}/")):
            test = variables.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
            yield LeftProcess(int(folder.name), " ".join(_strings(folder / "cmdline")), test)


def _strings(file: Path) -> list[str]:
    """Return the strings in a file of /proc; none if the process has ended, or belongs to another user."""
    try:
        return file.read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


# Waiting for what another process or thread does, for as long as a busy machine may take over it.


PATIENCE = 600.0
"""Seconds that a test waits for an expected event. A test that passes takes a few; one that fails takes them all."""


def until(happens: Callable[[], object], message: Callable[[], object] = lambda: "it has not happened") -> None:
    """Wait for an event; if it does not happen, fail with the message of `message`."""
    deadline = time.monotonic() + PATIENCE
    while not happens():
        assert time.monotonic() < deadline, message()
        time.sleep(0.01)


# Ports that nobody else takes before they are used.


_numbers = count(os.getpid() * 101)


def free_port() -> int:
    """A free port of 127.0.0.1, another one each time.

    The system assigns ports from 32768 on to any process, perhaps before the test uses a free one; this port is below.
    Processes that test at the same time begin their search at different ports.
    """
    while True:
        port = 10_000 + next(_numbers) % 20_000
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# A disk that is full.


@contextmanager
def files_of_at_most(size: int) -> Generator[None, None, None]:
    """Let the system refuse longer files, as a full disk would; Python ignores the signal that comes with it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

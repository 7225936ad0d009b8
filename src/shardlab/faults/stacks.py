"""Python stacks of other processes: a signal has each write its own, also one that is deep in a library."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from traceback import StackSummary

from shardlab.execute.progress import RankProgress

WRITE_STACK = signal.SIGUSR2
"""Has a rank write its main thread's stack; Python's own handler does it, wherever the thread is."""

PATIENCE = 1.0
"""Seconds in which a process that runs has written its stack."""

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_ENTERED = re.compile(r'executor\.py", line \d+ in _run$')
"""The frame that runs a tape: which rank called it from where tells nothing of what it waits in."""


def write_when_asked(progress: RankProgress) -> None:
    """Write this process's stack behind its words, whenever it is asked to."""
    faulthandler.register(WRITE_STACK, file=progress.file, all_threads=False)


def stack_text(frames: StackSummary) -> str:
    """A traceback's frames as a stack is written here."""
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n' for frame in reversed(frames)]
    return "".join(["Current thread when it failed\n", *lines])


def ask_for_stacks(progresses: Iterable[RankProgress]) -> None:
    """Ask processes that run; one that is stopped, or has not taken its words yet, gives none."""
    for progress in progresses:
        if progress.pid == os.getpid():
            signal.pthread_kill(threading.main_thread().ident or 0, WRITE_STACK)  # a kernel prefers who asks
        elif progress.pid:
            with suppress(ProcessLookupError):
                os.kill(progress.pid, WRITE_STACK)


def stacks_of(progresses: Mapping[int, RankProgress], awaited: Iterable[int]) -> dict[int, list[str]]:
    """What ranks have written, innermost call last; waits a little for those that are awaited."""
    deadline, found = time.monotonic() + PATIENCE, dict.fromkeys(awaited, "")
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        now = {rank: progresses[rank].text for rank in found}
        found = {rank: text for rank, text in now.items() if not text or text != found[rank]}  # it still writes
    return {rank: frames_of(progress.text) for rank, progress in progresses.items()}


def frames_of(text: str) -> list[str]:
    """The frames of the last stack in a text, outermost first; of a rank on its tape, those that run the op."""
    last = re.split(r"^Current thread .*$", text, flags=re.MULTILINE)[-1]
    frames = [f'File "{file}", line {line} in {name}' for file, line, name in _FRAME.findall(last)][::-1]
    entered = [place for place, frame in enumerate(frames) if _ENTERED.search(frame)]
    return frames[entered[-1] :] if entered else frames

"""State of a process of this host, as its kernel tells it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path


class ProcessState(Enum):
    """What a process can do now: the words stand in a report."""

    RUNS = "runs"
    STOPPED = "stopped"
    STUCK = "stuck in the kernel"
    GONE = "gone"


_LETTERS = {
    "T": ProcessState.STOPPED,
    "t": ProcessState.STOPPED,
    "D": ProcessState.STUCK,
    "Z": ProcessState.GONE,
    "X": ProcessState.GONE,
}


def state_of(pid: int) -> ProcessState:
    """Look a process up, without asking it anything."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except OSError:  # gone, or a system that has no /proc
        try:
            os.kill(pid, 0)
        except OSError:
            return ProcessState.GONE
        return ProcessState.RUNS
    return _LETTERS.get(letter, ProcessState.RUNS)

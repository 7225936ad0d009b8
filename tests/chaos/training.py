"""A training run as a tester sees it: its processes, its files, and how it is disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.warm import WarmStarts

ROOT = Path(__file__).parents[2]
POLL = 0.0005
"""Seconds between two looks: less than a small checkpoint takes to be written."""


MARK = "SHARDLAB_CHAOS"
"""A variable by which all processes of a run are found, also those that a launcher has given sessions of their own."""


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of a run."""
    return {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1", **(more or {})}


class Training:
    """`shardlab train` in a session of its own, so that none of its processes can hide.

    Args:
        words: after `shardlab train`.
        out: the run's folder.
        more: variables beside those of this process.
        launcher: words of a program that starts the ranks, after Python's; none where the command does.
        warm: starts it without its imports.
    """

    def __init__(
        self,
        words: Sequence[str],
        out: Path,
        *,
        more: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
        warm: WarmStarts | None = None,
    ) -> None:
        self.out = out
        self.log = out.with_name(out.name + ".log")
        self._before = self.log.stat().st_size if self.log.exists() else 0
        self._launched = bool(launcher)
        self._mark = str(uuid.uuid4())
        command = [*launcher, "-m", "shardlab", "train", *words, "--out", str(out), "--json"]
        with self.log.open("ab") as log:
            options: dict[str, Any] = {
                "env": environment({**(more or {}), MARK: self._mark}),
                "stdout": log,
                "stderr": log,
                "stdin": subprocess.DEVNULL,
                "start_new_session": True,
            }
            self.process: subprocess.Popen[Any] = (
                subprocess.Popen([sys.executable, *command], **options)
                if warm is None
                else warm.start(command, **options)
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self.log.read_bytes()[self._before :].decode(errors="replace")

    def processes(self) -> list[int]:
        """Its processes that have not ended, by number."""
        mark = f"{MARK}={self._mark}".encode()
        return sorted(
            pid
            for pid, _, session, state in _processes()
            if state != "Z" and (session == self.process.pid or mark in _read(pid, "environ"))
        )

    def ranks(self) -> list[int]:
        """The processes of its ranks, in the order in which they were started."""
        parents = {pid: parent for pid, parent, _, _ in _processes()}
        if not self._launched:  # a server forks them
            return sorted(pid for pid, parent in parents.items() if parents.get(parent) == self.process.pid)
        return sorted(pid for pid, parent in parents.items() if parent == self.process.pid)

    def reads_a_checkpoint(self) -> bool:
        """Whether a rank has a file of a checkpoint open, or mapped."""
        return any("/checkpoints/step-" in text for pid in self.ranks() for text in _open_files(pid))

    def saving(self) -> Path | None:
        """The folder of a checkpoint that is being written, if there is one."""
        return next((self.out / "checkpoints").glob("*.part"), None)

    def committing(self) -> bool:
        """Whether a checkpoint is all written, and has not its name yet."""
        part = self.saving()
        return part is not None and (part / "manifest.json").exists()

    def steps(self) -> int:
        """Lines of its metrics."""
        metrics = self.out / "metrics.jsonl"
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def signal(self, pids: Sequence[int], number: int) -> int:
        """Send a signal to some of its processes that are still there; how many got it."""
        reached = 0
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
            reached += 1
        return reached

    def ended(self, limit: float) -> list[int]:
        """Wait for its end; the processes that it has left behind, which are then killed."""
        deadline = time.monotonic() + limit
        while self.running and time.monotonic() < deadline:
            time.sleep(0.01)
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = self.processes()
        self.signal(left, signal.SIGKILL)
        self.process.wait()
        return left


def _processes() -> Iterator[tuple[int, int, int, str]]:
    """(number, parent, session, state) of every process."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            yield int(folder.name), int(fields[1]), int(fields[3]), fields[0]


def _read(pid: int, name: str) -> bytes:
    """What the kernel says of a process; nothing if it has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _open_files(pid: int) -> Iterator[str]:
    try:
        yield Path(f"/proc/{pid}/maps").read_text()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            yield str(link.readlink())
    except OSError:
        return

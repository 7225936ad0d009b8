"""A training run as a tester sees it: its processes, its files, and how it is disturbed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
POLL = 0.0005
"""Seconds between two looks: less than a small checkpoint takes to be written."""


class Training:
    """`shardlab train` in a session of its own, so that none of its processes can hide.

    Args:
        words: after `shardlab train`.
        out: the run's folder.
        environment: beside that of this process.
    """

    def __init__(self, words: Sequence[str], out: Path, environment: Mapping[str, str] | None = None) -> None:
        self.out = out
        self.log = out.with_name(out.name + ".log")
        begun = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **(environment or {})}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardlab", "train", *words, "--out", str(out), "--json"],
                env={**os.environ, **begun},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def processes(self) -> list[int]:
        """Processes of its session that have not ended, by number."""
        return sorted(pid for pid, _, session, state in _processes() if session == self.process.pid and state != "Z")

    def ranks(self) -> list[int]:
        """The processes of its ranks, in the order in which they were started."""
        ours = [(pid, parent) for pid, parent, session, _ in _processes() if session == self.process.pid]
        servers = {pid for pid, parent in ours if parent == self.process.pid and "forkserver" in _command(pid)}
        return sorted(pid for pid, parent in ours if parent in servers)

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
            time.sleep(0.01)
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


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def _open_files(pid: int) -> Iterator[str]:
    try:
        yield Path(f"/proc/{pid}/maps").read_text()
        for link in Path(f"/proc/{pid}/fd").iterdir():
            yield str(link.readlink())
    except OSError:
        return

"""Any command on processes of this machine, each a rank: started, prefixed, watched, and ended together."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO

import torch.distributed as dist

from shardlab.train.interrupt import ASKING
from shardlab.train.launch_environment import LaunchEnvironment
from shardlab.train.processes import AT_ONCE, LAST_WORDS, sounds_lost

ENDING = 30.0
"""Seconds from being asked to end to being killed: as SLURM's KillWait, since a script may save for a while."""

LAST_LINES = 40
"""Lines of the first failing rank that are told again, last."""


def _few() -> deque[bytes]:
    return deque(maxlen=LAST_LINES)


@dataclass
class _CommandRank:
    """A rank's process, and the last lines that it wrote to stdout and to stderr."""

    number: int
    process: asyncio.subprocess.Process
    lines: tuple[deque[bytes], deque[bytes]] = field(default_factory=lambda: (_few(), _few()))
    ended: float = 0.0

    @property
    def output(self) -> str:
        return b"\n".join(self.lines[1] or self.lines[0]).decode(errors="replace")

    async def run(self) -> None:
        """Print what the process says, until it has ended."""
        streams = zip((self.process.stdout, self.process.stderr), (sys.stdout, sys.stderr), self.lines, strict=True)
        readers = [asyncio.ensure_future(self._read(ours, to.buffer, last)) for ours, to, last in streams if ours]
        await self.process.wait()
        self.ended = time.monotonic()
        await asyncio.wait(readers, timeout=1)  # what it left running may hold its pipes
        for reader in readers:
            reader.cancel()

    async def _read(self, stream: asyncio.StreamReader, to: BinaryIO, last: deque[bytes]) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            self._print(lines, to, last)
        self._print([rest] if rest else [], to, last)

    def _print(self, lines: Sequence[bytes], to: BinaryIO, last: deque[bytes]) -> None:
        last.extend(lines)
        with suppress(OSError):  # nobody reads any more: the ranks go on
            to.write(b"".join(b"[%d] %s\n" % (self.number, line) for line in lines))
            to.flush()

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Ending:
    """How an attempt ended.

    Attributes:
        asked: the signal by which this process was asked to end; 0 if it was not.
        rank: the one that failed first; None if none did.
        code: its exit code, or minus the signal that ended it.
        output: its last lines.
    """

    asked: int = 0
    rank: int | None = None
    code: int = 0
    output: str = ""


def run_command(command: Sequence[str], ranks: int, *, bound: bool, restarts: int = 0) -> Ending:
    """Run a command on so many processes of this machine, whose lines are prefixed by the rank.

    When one fails, all end, after some seconds in which the others may say what they saw. SIGINT, SIGTERM, SIGHUP and
    SIGUSR1 are sent on to all; a second SIGINT or SIGTERM kills them.

    Args:
        command: the program and its arguments.
        bound: give each rank CPUs of its own.
        restarts: how often all are started again after a failure, at most.
    """
    for attempt in range(restarts + 1):
        ending = asyncio.run(_attempt(command, ranks, bound, attempt, restarts))
        if ending.asked or ending.rank is None or attempt == restarts:
            return ending
        print(f"shardlab: rank {ending.rank} failed; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns")


async def _attempt(command: Sequence[str], count: int, bound: bool, attempt: int, restarts: int) -> Ending:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives every rank
    words = [sys.executable, "-m", "shardlab.train.worker", *["--bind"] * bound, *command]
    pipe = subprocess.PIPE
    ranks: list[_CommandRank] = []
    try:
        for rank in range(count):
            place = LaunchEnvironment(rank, count, rank, "127.0.0.1", store.port, count)
            variables = {**os.environ, **place.variables(), **_as_torchrun(attempt, restarts)}
            process = await asyncio.create_subprocess_exec(
                *words,
                env=variables,
                stdout=pipe,
                stderr=pipe,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
            ranks.append(_CommandRank(rank, process))
        return await _watched(ranks)
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)  # also what a command left running


def _as_torchrun(attempt: int, restarts: int) -> dict[str, str]:
    """What tells torch that the launcher holds the store, and a program which restart this is."""
    return {
        "TORCHELASTIC_RUN_ID": "shardlab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
    }


async def _watched(ranks: Sequence[_CommandRank]) -> Ending:
    asked: list[tuple[int, float]] = []  # the signal by which this process was asked to end, and when
    loop = asyncio.get_running_loop()

    def send(number: int) -> None:
        for rank in ranks:
            rank.send(number)

    def pass_on(number: int) -> None:
        now = loop.time()
        if not asked:
            asked.append((number, now))
            loop.call_later(ENDING, send, signal.SIGKILL)
            send(number)
        elif number != signal.SIGHUP and now - asked[0][1] > AT_ONCE:
            send(signal.SIGKILL)

    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, pass_on, number)
    loop.add_signal_handler(signal.SIGUSR1, send, signal.SIGUSR1)
    running = {asyncio.ensure_future(rank.run()) for rank in ranks}
    while running and not _failed(ranks):
        _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    if running:
        await asyncio.wait(running, timeout=ENDING if asked else LAST_WORDS)
    failed = _failed(ranks)
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = {task for task in running if not task.done()}
        if running:
            send(number)
            await asyncio.wait(running, timeout=ENDING)
    own = [rank for rank in failed if not sounds_lost(rank.output)] or failed
    first = min(own, key=lambda rank: rank.ended, default=None)
    why = asked[0][0] if asked else 0
    if first is None:
        return Ending(why)
    return Ending(why, first.number, first.process.returncode or 0, first.output)


def _failed(ranks: Sequence[_CommandRank]) -> list[_CommandRank]:
    return [rank for rank in ranks if rank.ended and rank.process.returncode]

"""Ranks of any command on this machine, and the store through which the ranks of a launcher find each other.

`run_command` is `shardlab launch`: it starts a command once per rank, prefixes the output of each rank, and ends all
ranks when one fails. `store_of` finds the torch `Store` of a launcher's world. With `RankExchange`, the ranks of this
world agree on settings before they compute.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# torch does not mark its stores as exported, and leaves some of its annotations out.

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from typing import BinaryIO, TypeVar

import torch.distributed as dist

from shardlab.language import UserError
from shardlab.train.faults import rank_names, sounds_lost
from shardlab.train.launch.environment import LaunchEnvironment, may_restart, port_in_use, restarts
from shardlab.train.launch.interrupt import SILENCE, STOP_SIGNALS, say_waiting
from shardlab.train.launch.processes import REPEAT_SECONDS, REPORT_SECONDS

KILL_SECONDS = 30.0
"""Seconds from a request to stop until ranks are killed: SLURM's default of KillWait, so that a script can save."""

LAST_LINES = 40
"""Number of last lines of the first failing rank that are repeated at the end."""


@dataclass
class _CommandRank:
    """Process of a rank, with the last lines that it wrote to stdout and to stderr."""

    number: int
    process: asyncio.subprocess.Process
    lines: tuple[deque[bytes], deque[bytes]] = field(
        default_factory=lambda: (deque(maxlen=LAST_LINES), deque(maxlen=LAST_LINES))
    )
    end_time: float = 0.0

    @property
    def output(self) -> str:
        return b"\n".join(self.lines[1] or self.lines[0]).decode(errors="replace")

    async def run(self) -> None:
        """Print the lines of the process until it has ended."""
        streams = zip((self.process.stdout, self.process.stderr), (sys.stdout, sys.stderr), self.lines, strict=True)
        readers = [asyncio.ensure_future(self._read(pipe, out.buffer, last)) for pipe, out, last in streams if pipe]
        await self.process.wait()
        self.end_time = time.monotonic()
        await asyncio.wait(readers, timeout=1)  # children that are still running may hold its pipes
        for reader in readers:
            reader.cancel()

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    async def _read(self, stream: asyncio.StreamReader, out: BinaryIO, last: deque[bytes]) -> None:
        rest = b""
        while chunk := await stream.read(1 << 16):
            *lines, rest = (rest + chunk).split(b"\n")
            self._print(lines, out, last)
        self._print([rest] if rest else [], out, last)

    def _print(self, lines: Sequence[bytes], out: BinaryIO, last: deque[bytes]) -> None:
        last.extend(lines)
        with suppress(OSError):  # the output has no reader any more; the ranks continue
            out.write(b"".join(b"[%d] %s\n" % (self.number, line) for line in lines))
            out.flush()


@dataclass(frozen=True)
class Outcome:
    """Outcome of an attempt to run a command.

    Attributes:
        signal: number of the signal that asked this process to stop; 0 if there was none.
        rank: rank that failed first; None if none did.
        code: exit code of this rank, or the negative number of the signal that ended it.
        output: last lines that this rank wrote to stderr, or to stdout if it wrote nothing to stderr.
    """

    signal: int = 0
    rank: int | None = None
    code: int = 0
    output: str = ""


def run_command(command: Sequence[str], ranks: int, *, bound: bool, restarts: int = 0) -> Outcome:
    """Run a command in several processes of this machine, and return the outcome of the last attempt.

    Each line of output is prefixed with its rank. If one process fails, all are ended, after some seconds in which the
    others may report. SIGINT, SIGTERM, SIGHUP and SIGUSR1 are forwarded to all. A second SIGINT or SIGTERM kills them.

    Args:
        command: the program and its arguments.
        bound: bind each rank to separate CPUs.
        restarts: largest number of restarts of all ranks after failures.
    """
    for attempt in range(restarts + 1):
        outcome = asyncio.run(_attempt(command, ranks, bound, attempt, restarts))
        if outcome.signal or outcome.rank is None or attempt == restarts:
            return outcome
        print(f"shardlab: rank {outcome.rank} failed; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
    raise AssertionError("the last attempt returns")


Result = TypeVar("Result")

ANSWER_SECONDS = 5.0
"""Seconds in which rank 0's store must answer. If another program has the port, torch itself would wait for ever."""

PAUSE, LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two queries of a store: at first, and later."""

CLOSE_SECONDS = 0.05
"""Seconds within which a mere test of the port (`require_port`) closes a connection, unlike a store."""

SAY_SECONDS = SILENCE - 1
"""Seconds of waiting after which the missing ranks are reported: fewer than the heartbeat's, whose line says less."""

_STORES: dict[LaunchEnvironment, tuple[dist.Store, Iterator[int]]] = {}


def store_of(environment: LaunchEnvironment, timeout: timedelta = dist.default_pg_timeout) -> dist.Store:
    """Return the store of this world: torchrun's, or one of rank 0. Every call returns a new namespace of the store.

    All ranks must call this equally often.

    Raises:
        UserError: if the port for the store is in use, or ranks do not connect in time.
    """
    if environment not in _STORES:
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        base = (_agent_store if agents else _rank_0_store)(environment, timeout.total_seconds())
        _STORES[environment] = base, count()
    store, uses = _STORES[environment]
    return dist.PrefixStore(str(next(uses)), store)


class RankExchange:
    """Exchange of strings between the ranks of a launcher's world. All ranks must call its methods equally often.

    Args:
        environment: the world (None: this process is alone).
        timeout: time after which a rank stops waiting for the others.
    """

    def __init__(
        self, environment: LaunchEnvironment | None = None, timeout: timedelta = dist.default_pg_timeout
    ) -> None:
        self._environment = environment or LaunchEnvironment(0, 1, 0, "", 0)
        self.rank, self.world = self._environment.rank, self._environment.world
        self._limit = timeout.total_seconds()
        self._store: dist.Store = dist.HashStore() if environment is None else store_of(environment, timeout)
        self._round = 0

    def exchange(self, text: str) -> list[str]:
        """Send the string of this rank, wait for the strings of all ranks, and return them by rank.

        Raises:
            UserError: if other ranks do not send theirs in time, or have ended.
        """
        self._round += 1
        store = dist.PrefixStore(str(self._round), self._store)
        try:
            store.set(str(self.rank), text)
            if self.rank:
                self._wait(store, ["words"], "")
                words: list[str] = json.loads(store.get("words"))
                store.set(f"heard {self.rank}", "")
                return words
            keys = [str(rank) for rank in range(self.world)]
            self._wait(store, keys, "")
            words = [store.get(other).decode() for other in keys]
            store.set("words", json.dumps(words))
            # Rank 0 waits until the others have read the strings, because its store is closed when it ends.
            self._wait(store, [f"heard {other}" for other in keys[1:]], "heard ")
            return words
        except dist.DistError as error:
            others = "the others" if self.rank == 0 else "rank 0"
            raise UserError(
                f"rank {self.rank} of {self.world} has lost {others} at the start ({str(error).splitlines()[0]}); "
                "read their output"
            ) from None

    def all(self, act: Callable[[], Result]) -> Result:
        """Call a function on every rank, and return this rank's result once all ranks have succeeded.

        Raises:
            UserError: on every rank, if the function raised one on any rank. The message is that of the first such
                rank.
        """
        results: list[Result] = []
        wrong = ""
        try:
            results.append(act())
        except UserError as error:
            wrong = str(error)
        for mistake in self.exchange(wrong):
            if mistake:
                raise UserError(mistake)
        return results[0]

    def _wait(self, store: dist.Store, keys: list[str], prefix: str) -> None:
        """Wait for keys of a store. Ranks whose key `prefix` + rank is absent are reported as missing."""

        def missing() -> list[int]:
            others = [rank for rank in range(self.world) if rank != self.rank]
            return [rank for rank in others if not store.check([f"{prefix}{rank}"])] or [0]

        _wait(self._environment, self._limit, lambda: store.check(keys), missing)


def restarts_in(environment: LaunchEnvironment | None, timeout: timedelta = dist.default_pg_timeout) -> int:
    """Return how often torchrun has restarted the ranks.

    This is the largest count of all hosts, because a host that joins later counts from 0.
    """
    local_restarts = restarts(os.environ)
    if environment is None or not may_restart(os.environ):
        return local_restarts
    return max(map(int, RankExchange(environment, timeout).exchange(str(local_restarts))))


@contextmanager
def default_ctrl_c() -> Generator[None]:
    """Let Ctrl-C end this process while it waits in torch for other ranks, where Python does not handle signals."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


async def _attempt(command: Sequence[str], count: int, bound: bool, attempt: int, restarts: int) -> Outcome:
    ranks: list[_CommandRank] = []
    requests = _forward_signals(ranks)  # before ranks start, since a signal that ends this process leaves them running
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it exists longer than any rank
    words = [sys.executable, "-m", "shardlab.train.launch.worker", *["--bind"] * bound, *command]
    pipe = subprocess.PIPE
    try:
        for rank in range(count):
            environment = LaunchEnvironment(rank, count, rank, "127.0.0.1", store.port, count)
            variables = {**os.environ, **environment.variables(), **_as_torchrun(attempt, restarts)}
            process = await asyncio.create_subprocess_exec(
                *words, env=variables, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, start_new_session=True
            )
            ranks.append(_CommandRank(rank, process))
            for number, _ in requests:  # this rank had not started when the signal came
                ranks[-1].send(number)
        return await _watch(ranks, requests)
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)  # including children that a command left running


def _as_torchrun(attempt: int, restarts: int) -> dict[str, str]:
    """Return variables as torchrun sets them. They say that the launcher has a store, and count the restarts."""
    return {
        "TORCHELASTIC_RUN_ID": "shardlab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_MAX_RESTARTS": str(restarts),
    }


def _forward_signals(ranks: Sequence[_CommandRank]) -> list[tuple[int, float]]:
    """Forward signals to all ranks that have started.

    Returns:
        List to which the first signal that asks this process to end is added, with its time.
    """
    requests: list[tuple[int, float]] = []
    loop = asyncio.get_running_loop()

    def send(number: int) -> None:
        for rank in ranks:
            rank.send(number)

    def pass_on(number: int) -> None:
        now = loop.time()
        if not requests:
            requests.append((number, now))
            loop.call_later(KILL_SECONDS, send, signal.SIGKILL)
            send(number)
        elif number != signal.SIGHUP and now - requests[0][1] > REPEAT_SECONDS:
            send(signal.SIGKILL)

    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, pass_on, number)
    loop.add_signal_handler(signal.SIGUSR1, send, signal.SIGUSR1)
    return requests


async def _watch(ranks: Sequence[_CommandRank], requests: Sequence[tuple[int, float]]) -> Outcome:
    tasks = {asyncio.ensure_future(rank.run()) for rank in ranks}
    while tasks and not _failed(ranks):
        _, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    if tasks:
        await asyncio.wait(tasks, timeout=KILL_SECONDS if requests else REPORT_SECONDS)
    failed = _failed(ranks)
    for number in (signal.SIGTERM, signal.SIGKILL):
        tasks = {task for task in tasks if not task.done()}
        if tasks:
            for rank in ranks:
                rank.send(number)
            await asyncio.wait(tasks, timeout=KILL_SECONDS)
    causes = [rank for rank in failed if not sounds_lost(rank.output)] or failed
    first = min(causes, key=lambda rank: rank.end_time, default=None)
    stop_signal = requests[0][0] if requests else 0
    if first is None:
        return Outcome(stop_signal)
    return Outcome(stop_signal, first.number, first.process.returncode or 0, first.output)


def _failed(ranks: Sequence[_CommandRank]) -> list[_CommandRank]:
    return [rank for rank in ranks if rank.end_time and rank.process.returncode]


def _wait(
    environment: LaunchEnvironment,
    limit: float,
    arrived: Callable[[], bool],
    missing: Callable[[], list[int]],
    describe_cause: Callable[[], str] = str,
) -> None:
    """Wait for other ranks. The first rank of each host reports which ranks are missing, and how long it will wait.

    Args:
        limit: time limit in seconds.
        arrived: function that returns whether all ranks have arrived.
        missing: function that returns the ranks that are missing.
        describe_cause: function that returns why a rank is not found, such as ` (Connection refused)`; empty if it is
            not known.

    Raises:
        UserError: if ranks do not arrive in time. The message names them.
    """
    began = reported = time.monotonic()
    while not arrived():
        now = time.monotonic()
        waited = now - began
        if waited >= limit:
            ranks = missing()
            it, has, host = ("it", "has", "its host") if len(ranks) == 1 else ("they", "have", "their hosts")
            raise UserError(
                f"rank {environment.rank} of {environment.world} waited {limit:g} s for {rank_names(ranks)} at "
                f"{environment.endpoint}, and {it} {has} not answered{describe_cause()}; look at what {it} {has} "
                f"printed, and at what the launcher says of {host}"
            )
        if now - reported >= SAY_SECONDS and environment.local_rank == 0:
            say_waiting(f"waiting for {rank_names(missing())} at {environment.endpoint}, {waited:.0f} s of {limit:g} s")
            reported = now
        time.sleep(min(limit - waited, max(PAUSE, min(waited / 20, LONGEST_PAUSE))))


def _agent_store(environment: LaunchEnvironment, limit: float) -> dist.Store:
    """Return the store of torchrun's agent, in a namespace for this start of the ranks.

    The agent's store outlives a restart, and torch itself would find in it the addresses of ranks that have ended
    (https://github.com/pytorch/pytorch/issues/167288). No variable of torchrun identifies a start: agents of one world
    count restarts differently, and a host that joins is no restart. So each rank writes a random token. Rank 0
    publishes all tokens that it sees, until each rank has found its own token among them.
    """
    _wait_for_listener(environment, limit)
    store = _client(environment)
    own_word, rank, ranks = secrets.token_hex(8), environment.rank, range(environment.world)
    store.set(f"start/{rank}", own_word)
    words: list[str] = []

    def arrived() -> bool:
        nonlocal words
        if rank == 0:
            arrived_ranks = [other for other in ranks if store.check([f"start/{other}"])]
            words = [store.get(f"start/{other}").decode() for other in arrived_ranks]
            store.set("start", json.dumps(words))
            return len(words) == len(ranks) and store.check([f"{own_word}/{other}" for other in ranks[1:]])
        words = json.loads(store.get("start")) if store.check(["start"]) else []
        return len(words) == len(ranks) and words[rank] == own_word

    def missing() -> list[int]:
        absent = [other for other in ranks if not store.check([f"start/{other}"])]
        return absent or ([0] if rank else [other for other in ranks[1:] if not store.check([f"{own_word}/{other}"])])

    _wait(environment, limit, arrived, missing)
    store.set(f"{words[0]}/{rank}", "")
    return dist.PrefixStore(words[0], store)


def _rank_0_store(environment: LaunchEnvironment, limit: float) -> dist.Store:
    if environment.rank == 0:
        wait = timedelta(seconds=max(limit, ANSWER_SECONDS))  # for its own store, which others need not reach
        try:
            return dist.TCPStore(environment.address, environment.port, None, True, wait, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise port_in_use(environment, str(error).splitlines()[0]) from error
    _wait_for_listener(environment, limit)
    stores: list[dist.Store] = []
    thread = threading.Thread(target=lambda: stores.append(_client(environment)), daemon=True)
    thread.start()
    thread.join(ANSWER_SECONDS)
    if not stores:
        raise UserError(
            f"rank {environment.rank} did not find rank 0 at {environment.endpoint}: the port is in use by "
            "something else; choose another in MASTER_PORT"
        )
    return stores[0]


def _client(environment: LaunchEnvironment) -> dist.Store:
    return dist.TCPStore(environment.address, environment.port, is_master=False)


def _wait_for_listener(environment: LaunchEnvironment, limit: float) -> None:
    """Wait until a program listens at the meeting point and keeps a connection open.

    Before it imports torch, rank 0 tests the port (`require_port`). That test accepts connections and closes them.
    """

    cause = ""

    def listens() -> bool:
        nonlocal cause
        try:
            probe = socket.create_connection(
                (environment.address, environment.port), timeout=min(ANSWER_SECONDS, limit)
            )
        except OSError as error:
            cause = f" ({error.strerror or error})"
            return False
        with probe, suppress(TimeoutError):
            probe.settimeout(CLOSE_SECONDS)
            with suppress(ConnectionError):
                return probe.recv(1) != b""
            return False
        return True

    _wait(environment, limit, listens, lambda: [0], lambda: cause)

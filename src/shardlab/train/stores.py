"""The store in which a launcher's ranks meet, and what they tell one another there before they compute."""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# torch does not mark its stores as exported, and leaves some of its annotations out.

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TypeVar

import torch.distributed as dist

from shardlab.program import UserError
from shardlab.train.launch_environment import LaunchEnvironment, may_restart, port_in_use, restarts

Result = TypeVar("Result")

ANSWER = 5.0
"""Seconds in which rank 0's store answers, once something listens there; torch waits for ever for what is no store."""

PAUSE = 0.02
"""Seconds between two looks at what others have put into a store."""


_FOUND: dict[LaunchEnvironment, tuple[dist.Store, Iterator[int]]] = {}


def store_of(environment: LaunchEnvironment, timeout: timedelta = dist.default_pg_timeout) -> dist.Store:
    """Find the store of this world: that of torchrun's agent, or rank 0's; each time with names of its own.

    All ranks call this equally often.

    Raises:
        UserError: when its port is in use, or ranks do not come in time.
    """
    if environment not in _FOUND:
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        with ended_by_ctrl_c():
            found = (_of_this_start if agents else _of_rank_0)(environment, timeout.total_seconds())
        _FOUND[environment] = found, count()
    store, uses = _FOUND[environment]
    return dist.PrefixStore(str(next(uses)), store)


class Together:
    """What the ranks of a launcher's world tell one another by its store; all call each method equally often.

    Args:
        environment: the world; None: this process is alone.
        timeout: after which a rank gives the others up.
    """

    def __init__(
        self, environment: LaunchEnvironment | None = None, timeout: timedelta = dist.default_pg_timeout
    ) -> None:
        self.rank, self.world = (0, 1) if environment is None else (environment.rank, environment.world)
        self._store: dist.Store = dist.HashStore() if environment is None else store_of(environment, timeout)
        self._store.set_timeout(timeout)
        self._round = 0

    def exchange(self, word: str) -> list[str]:
        """Tell this rank's word; every rank's, once all have told theirs.

        Raises:
            UserError: when others do not come in time, or have ended.
        """
        self._round += 1
        store = dist.PrefixStore(str(self._round), self._store)
        try:
            if self.rank:
                store.set(str(self.rank), word)
                words: list[str] = json.loads(store.get("words"))
                if store.add("heard", 1) == self.world - 1:
                    store.set("all have heard", "")
                return words
            words = [word, *(store.get(str(other)).decode() for other in range(1, self.world))]
            store.set("words", json.dumps(words))
            if self.world > 1:
                store.get("all have heard")  # rank 0's own store ends with it
            return words
        except dist.DistError as error:
            raise UserError(
                f"rank {self.rank} of {self.world} has lost the others at the start ({str(error).splitlines()[0]}); "
                "look at what they have said"
            ) from None

    def all(self, act: Callable[[], Result]) -> Result:
        """What a function gives here, as soon as it has given something on every rank.

        Raises:
            UserError: on every rank, that of the first on which the function raised one.
        """
        found: list[Result] = []
        wrong = ""
        try:
            found.append(act())
        except UserError as error:
            wrong = str(error)
        for mistake in self.exchange(wrong):
            if mistake:
                raise UserError(mistake)
        return found[0]


def restarts_in(environment: LaunchEnvironment | None, timeout: timedelta = dist.default_pg_timeout) -> int:
    """How often torchrun has started the ranks again, by the host that counts most: one that has joined begins at 0."""
    here = restarts(os.environ)
    if environment is None or not may_restart(os.environ):
        return here
    return max(map(int, Together(environment, timeout).exchange(str(here))))


def _of_this_start(environment: LaunchEnvironment, limit: float) -> dist.Store:
    """The agent's store, with names of this start's own.

    The agent's store outlives a restart, and torch itself would find the addresses of ranks that are gone there
    (https://github.com/pytorch/pytorch/issues/167288). Nothing that torchrun says names a start: agents of one world
    count restarts differently, and a host that joins is no restart. So each rank leaves a word that nobody else has;
    rank 0 tells all the words that it sees, until each rank has found its own among them.
    """
    store = _client(environment)
    mine, rank, ranks = secrets.token_hex(8), environment.rank, range(environment.world)
    store.set(f"start/{rank}", mine)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if rank == 0:
            here = [other for other in ranks if store.check([f"start/{other}"])]
            words = [store.get(f"start/{other}").decode() for other in here]
            store.set("start", json.dumps(words))
            if len(words) == len(ranks) and store.check([f"{mine}/{other}" for other in ranks[1:]]):
                return dist.PrefixStore(mine, store)
        elif store.check(["start"]):
            words = json.loads(store.get("start"))
            if len(words) == len(ranks) and words[rank] == mine:
                store.set(f"{words[0]}/{rank}", "")
                return dist.PrefixStore(words[0], store)
        time.sleep(PAUSE)
    where = f"{environment.address}:{environment.port}"
    raise UserError(
        f"rank {rank} of {len(ranks)} did not meet the others at {where}, the store of torchrun's agent, in "
        f"{limit:.0f} s; look at what torchrun says of the other hosts"
    )


def _of_rank_0(environment: LaunchEnvironment, limit: float) -> dist.Store:
    where = f"{environment.address}:{environment.port}"
    if environment.rank == 0:
        try:
            return dist.TCPStore(environment.address, environment.port, is_master=True, wait_for_workers=False)
        except dist.DistNetworkError as error:
            raise port_in_use(environment, str(error).splitlines()[0]) from error
    _wait_for_listener(environment, limit)
    found: list[dist.Store] = []
    thread = threading.Thread(target=lambda: found.append(_client(environment)), daemon=True)
    thread.start()
    thread.join(ANSWER)
    if not found:
        raise UserError(
            f"rank {environment.rank} did not find rank 0 at {where}: the port is in use by something else; "
            "choose another in MASTER_PORT"
        )
    return found[0]


def _client(environment: LaunchEnvironment) -> dist.Store:
    return dist.TCPStore(environment.address, environment.port, is_master=False)


def _wait_for_listener(environment: LaunchEnvironment, limit: float) -> None:
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((environment.address, environment.port), timeout=ANSWER).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"rank {environment.rank} did not find rank 0 at {environment.address}:{environment.port} in "
                    f"{limit:.0f} s ({error})"
                ) from None
            time.sleep(0.1)


@contextmanager
def ended_by_ctrl_c() -> Generator[None]:
    """While this rank waits for the others, deep in torch, where Python hears of no signal."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""Ranks driven by the user's own asyncio: who runs, who waits, who has ended, and what to do when nobody can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shardlab.errors import Deadlock, Refused
from shardlab.program.waiting import Wait, explain

GRACE_SECONDS = 1.0
"""How long a rank without any operation may take to start before it is called missing."""

SETTLING_TURNS = 8
"""Turns of the event loop without any movement after which the ranks have settled: a task that can go on does so in
the next turn, one that awaits it (`gather`, `wait_for`) a few turns later."""


class _Waiting(NamedTuple):
    rank: int
    task: asyncio.Task[Any] | None
    reason: object
    describe: Callable[[], Wait]


class AsyncioWatch:
    """Blocks and wakes ranks on futures of the running loop, and finds deadlocks without sleeping or polling.

    A rank may wait in several operations at once (`asyncio.gather` inside a program), one task may drive several
    ranks one after the other, and one event loop may follow another.

    Args:
        ranks: how many ranks belong to the world.
        when_quiet: called when every rank waits or has ended; returns True if that let somebody go on.
    """

    def __init__(self, ranks: int, when_quiet: Callable[[], bool] = lambda: False) -> None:
        self._ranks = ranks
        self._when_quiet = when_quiet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._waiting: dict[asyncio.Future[None], _Waiting] = {}
        self._failure: str | None = None
        self._moves = 0
        self._settling = False

    def enter(self, rank: int) -> None:
        """Note the task that drives `rank`, if any does; its end is how the rank's end is learnt."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs: plain code
            return
        if task is None or self._tasks.get(rank) is task:
            return
        if task.get_loop() is not self._loop:
            self._loop = task.get_loop()
            self._tasks, self._waiting, self._failure, self._settling = {}, {}, None, False
        self._tasks[rank] = task
        task.add_done_callback(partial(self._ended, rank))

    async def block(self, rank: int, reason: object, describe: Callable[[], Wait]) -> None:
        """Suspend `rank` until `wake(rank, reason)`; `describe` says what it waits for.

        Raises:
            Deadlock: when no rank can go on.
            Refused: when another rank raised.
        """
        known = self._tasks.get(rank)
        if known is None or known.done() or known.get_loop() is not asyncio.get_running_loop():
            self.enter(rank)  # else a helper task waits here (`gather` in a program): the rank's own has issued already
        if self._failure is not None:
            raise Refused(self._failure)
        future = asyncio.get_running_loop().create_future()
        self._waiting[future] = _Waiting(rank, asyncio.current_task(), reason, describe)
        self._moved()
        try:
            await future
        finally:
            self._waiting.pop(future, None)

    def wake(self, rank: int, reason: object) -> None:
        """Let a rank go on that is blocked for `reason`; any other is left alone."""
        for future in [f for f, waiting in self._waiting.items() if waiting.rank == rank and waiting.reason is reason]:
            del self._waiting[future]
            if not future.done():
                future.set_result(None)
            self._moved()

    def _ended(self, rank: int, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(rank) is not task:
            return
        raised = None if task.cancelled() else task.exception()
        if task.cancelled() or raised is not None:
            reason = "was cancelled" if raised is None else f"raised {type(raised).__name__}: {raised}"
            self._failure = f"rank {rank} {reason}; the other ranks stop."
            self._fail(lambda: Refused(self._failure))
        else:
            self._moved()

    def _moved(self) -> None:
        """Something has happened; look again once the event loop has nothing more to run."""
        self._moves += 1
        if self._loop is not None and not self._settling:
            self._settling = True
            self._loop.call_soon(self._look, self._moves, 0)

    def _look(self, moves: int, turns: int) -> None:
        assert self._loop is not None
        if moves != self._moves:
            self._loop.call_soon(self._look, self._moves, 0)
        elif turns < SETTLING_TURNS and self._waiting:
            self._loop.call_soon(self._look, moves, turns + 1)
        else:
            self._settling = False
            if self._waiting:
                self._settle()

    def _running(self) -> list[int]:
        """Ranks that neither wait nor have ended."""
        ranks = {waiting.rank for waiting in self._waiting.values()}
        tasks = {waiting.task for waiting in self._waiting.values()}
        return [r for r, task in self._tasks.items() if r not in ranks and task not in tasks and not task.done()]

    def _settle(self) -> None:
        """If nobody can go on: let `when_quiet` help, give absent ranks their second, else report the deadlock."""
        running = self._running()
        if not running and self._when_quiet():
            return
        if running or len(self._tasks) < self._ranks:
            assert self._loop is not None
            self._loop.call_later(GRACE_SECONDS, self._give_up, self._moves)
        else:
            self._report()

    def _give_up(self, moves: int) -> None:
        """The second is over: unless something has moved since, go on without the ranks that it was given to."""
        if moves == self._moves and self._waiting and not self._when_quiet():
            self._report()

    def _report(self) -> None:
        """Report the deadlock to every rank that waits."""
        waits: dict[int, Wait] = {}
        for waiting in self._waiting.values():
            waits.setdefault(waiting.rank, waiting.describe())
        text = explain(waits)
        missing = [rank for rank in range(self._ranks) if rank not in self._tasks]
        if missing:
            names = ", ".join(str(rank) for rank in missing)
            text += f" Missing: rank {names} started no communication within {GRACE_SECONDS:g} s; is every rank driven?"
        for rank in self._running():
            text += f" Rank {rank} awaits something else than a communication; await only those."
        for rank in [*missing, *self._running()]:
            text = text.replace(f"rank {rank} has ended without it", f"rank {rank} has not come to it")
        self._fail(lambda: Deadlock(text))

    def _fail(self, error: Callable[[], Refused]) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting:
            if not future.done():
                future.set_exception(error())

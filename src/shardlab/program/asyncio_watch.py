"""Ranks driven by the user's own asyncio: who runs, who waits, who has ended, and what to do when nobody can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from shardlab.program.errors import Deadlock, Refused
from shardlab.program.waiting import Wait, explain

GRACE_SECONDS = 1.0
"""How long a rank without any operation may take to start before it is called missing."""


class _Waiting(NamedTuple):
    reason: object
    describe: Callable[[], Wait]
    future: asyncio.Future[None]


class AsyncioWatch:
    """Blocks and wakes ranks on futures of the running loop, and finds deadlocks without sleeping or polling.

    Args:
        ranks: how many ranks belong to the world.
        when_quiet: called when every rank waits or has ended; returns True if that let somebody go on.
    """

    def __init__(self, ranks: int, when_quiet: Callable[[], bool] = lambda: False) -> None:
        self._ranks = ranks
        self._when_quiet = when_quiet
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._waiting: dict[int, _Waiting] = {}
        self._failure: str | None = None

    def enter(self, rank: int) -> None:
        """Note the task that drives `rank`; its end is how the rank's end is learnt."""
        task = asyncio.current_task()
        if task is not None and self._tasks.get(rank) is not task:
            self._tasks[rank] = task
            task.add_done_callback(partial(self._ended, rank))

    async def block(self, rank: int, reason: object, describe: Callable[[], Wait]) -> None:
        """Suspend `rank` until `wake(rank, reason)`; `describe` says what it waits for.

        Raises:
            Deadlock: when no rank can go on.
            Refused: when another rank raised.
        """
        self.enter(rank)
        if self._failure is not None:
            raise Refused(self._failure)
        future = asyncio.get_running_loop().create_future()
        self._waiting[rank] = _Waiting(reason, describe, future)
        self._settle()
        await future

    def wake(self, rank: int, reason: object) -> None:
        """Let a rank go on that is blocked for `reason`; any other is left alone."""
        if rank in self._waiting and self._waiting[rank].reason is reason:
            waiting = self._waiting.pop(rank)
            if not waiting.future.done():
                waiting.future.set_result(None)

    def _ended(self, rank: int, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(rank) is not task:
            return
        raised = None if task.cancelled() else task.exception()
        if task.cancelled() or raised is not None:
            reason = "was cancelled" if raised is None else f"raised {type(raised).__name__}: {raised}"
            self._failure = f"rank {rank} {reason}; the other ranks stop."
            self._fail(lambda: Refused(self._failure))
        else:
            self._settle()

    def _quiet(self) -> bool:
        return bool(self._waiting) and all(
            rank in self._waiting or task.done() for rank, task in self._tasks.items()
        )

    def _settle(self) -> None:
        """If nobody can go on: let `when_quiet` help, give absent ranks their second, else report the deadlock."""
        if not self._quiet() or self._when_quiet():
            return
        if len(self._tasks) < self._ranks:
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._deadlock_if_quiet, dict(self._waiting))
        else:
            asyncio.get_running_loop().call_soon(self._deadlock_if_quiet, dict(self._waiting))

    def _deadlock_if_quiet(self, before: dict[int, _Waiting]) -> None:
        """Report the deadlock unless something has moved since it was suspected."""
        if not self._quiet() or self._waiting != before:
            return
        text = explain({rank: waiting.describe() for rank, waiting in self._waiting.items()})
        missing = [rank for rank in range(self._ranks) if rank not in self._tasks]
        if missing:
            names = ", ".join(str(rank) for rank in missing)
            text += f" Missing: rank {names} issued no operation within {GRACE_SECONDS:g} s; is every rank driven?"
        self._fail(lambda: Deadlock(text))

    def _fail(self, error: Callable[[], Refused]) -> None:
        waiting, self._waiting = self._waiting, {}
        for blocked in waiting.values():
            if not blocked.future.done():
                blocked.future.set_exception(error())

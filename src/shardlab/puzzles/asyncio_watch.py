"""Ranks driven by the user's own asyncio: who runs, who waits, who has ended, and what to do when nobody can go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardlab.program.lines import SourceLine
from shardlab.program.values import Wait, deadlock
from shardlab.puzzles.refusal import PuzzleDeadlock, PuzzleRefused

GRACE_SECONDS = 1.0
"""How long a rank without any operation may take to start before it is called missing."""

STOP = "the other ranks stop, mend it there"
"""What ranks that wait are told when one has raised something."""

SETTLING_TURNS = 8
"""Turns of the event loop without any movement after which the ranks have settled: a task that can go on does so in
the next turn, one that awaits it (`gather`, `wait_for`) a few turns later."""


@dataclass(eq=False)
class Blocked:
    """A rank that waits until somebody gives `future` its result.

    Attributes:
        rank, line: who waits, and where.
        task: the task that waits: the rank's own, or a helper's (`asyncio.gather` inside a program).
    """

    rank: int
    line: SourceLine | None
    task: asyncio.Task[Any] | None = field(init=False, default_factory=asyncio.current_task)
    future: asyncio.Future[Any] = field(init=False, default_factory=lambda: asyncio.get_running_loop().create_future())

    def wait(self) -> Wait:
        """What it waits for, in words."""
        raise NotImplementedError

    def go_on(self, result: Any = None) -> None:
        """Let the rank go on, unless it does already."""
        if not self.future.done():
            self.future.set_result(result)


class AsyncioWatch:
    """Blocks ranks on futures of the running loop, and finds deadlocks without sleeping or polling.

    A rank may wait in several operations at once (`asyncio.gather` inside a program), one task may drive several
    ranks one after the other, and one event loop may follow another.

    Args:
        ranks: how many ranks there are.
        when_quiet: called when every rank waits or has ended; returns True if that let somebody go on.

    Attributes:
        forgotten: communications that were called without an `await`, a sentence about each.
    """

    def __init__(self, ranks: int, when_quiet: Callable[[], bool]) -> None:
        self.ranks = ranks
        self._when_quiet = when_quiet
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._blocked: dict[asyncio.Future[Any], Blocked] = {}
        self._failure: PuzzleRefused | None = None
        self._moves = 0
        self._settling = False
        self.forgotten: list[PuzzleRefused] = []

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
            self._tasks, self._blocked, self._failure, self._settling = {}, {}, None, False
        self._tasks[rank] = task
        task.add_done_callback(partial(self._ended, rank))

    async def block(self, blocked: Blocked) -> Any:
        """Suspend a rank until its future has a result, and give that.

        Raises:
            PuzzleDeadlock: when no rank can go on.
            PuzzleRefused: when another rank raised, or somebody forgot an `await`.
        """
        if self._failure:
            raise PuzzleRefused.of(self._failure)
        self._blocked[blocked.future] = blocked
        blocked.future.add_done_callback(self._over)
        self._moved()
        return await blocked.future

    def waiting(self) -> set[int]:
        """Ranks that wait in something."""
        return {blocked.rank for future, blocked in self._blocked.items() if not future.done()}

    def ended(self) -> list[int]:
        """Ranks whose task is over."""
        return sorted(rank for rank, task in self._tasks.items() if task.done())

    def _over(self, future: asyncio.Future[Any]) -> None:
        self._blocked.pop(future, None)
        self._moved()

    def _ended(self, rank: int, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(rank) is not task:
            return
        raised = None if task.cancelled() else task.exception()
        if task.cancelled() or raised is not None:
            reason = "was cancelled" if raised is None else f"raised {type(raised).__name__}: {raised}"
            self._failure = PuzzleRefused("the program raised", "", f"rank {rank} {reason}", STOP)
            self._fail(self._failure)
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
        if moves != self._moves or turns < SETTLING_TURNS:
            self._loop.call_soon(self._look, self._moves, turns + 1 if moves == self._moves else 0)
            return
        self._settling = False
        running = self._running()
        if not self.waiting() or (not running and self._when_quiet()):
            return
        if running or len(self._tasks) < self.ranks:
            self._loop.call_later(GRACE_SECONDS, self._give_up, moves)
        else:
            self._report()

    def _running(self) -> list[int]:
        """Ranks that neither wait nor have ended."""
        ranks, tasks = self.waiting(), {blocked.task for blocked in self._blocked.values()}
        return [r for r, task in self._tasks.items() if r not in ranks and task not in tasks and not task.done()]

    def _give_up(self, moves: int) -> None:
        """The second is over: unless something has moved since, go on without the ranks that it was given to."""
        if moves == self._moves and self.waiting() and not self._when_quiet():
            self._report()

    def _report(self) -> None:
        """Report the deadlock, or the forgotten `await` behind it, to every rank that waits."""
        if self.forgotten:
            self._fail(self.forgotten[0])
            return
        waits: dict[int, Wait] = {}
        for blocked in self._blocked.values():
            waits.setdefault(blocked.rank, blocked.wait())
        refusal = PuzzleDeadlock.of(deadlock(waits))
        missing, running = [rank for rank in range(self.ranks) if rank not in self._tasks], self._running()
        if missing:
            names = ", ".join(map(str, missing))
            refusal.trail += (
                f" Missing: rank {names} started no communication within {GRACE_SECONDS:g} s; is every rank driven?"
            )
        for rank in running:
            refusal.trail += f" Rank {rank} awaits something else than a communication; await only those."
        for rank in [*missing, *running]:
            ended, not_come = f"rank {rank} has ended without it", f"rank {rank} has not come to it"
            refusal.given = refusal.given.replace(ended, not_come)
        self._fail(refusal)

    def _fail(self, refusal: PuzzleRefused) -> None:
        """Raise the refusal, each its own, in all ranks that wait."""
        for future in self._blocked:
            if not future.done():
                future.set_exception(type(refusal).of(refusal))

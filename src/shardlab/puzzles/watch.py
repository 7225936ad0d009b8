"""The asyncio watch with the face's exceptions."""

from __future__ import annotations

from collections.abc import Callable

from shardlab.program import Deadlock, Refused
from shardlab.program.waiting import Wait
from shardlab.puzzles.asyncio_watch import AsyncioWatch
from shardlab.puzzles.calls import refuse_forgotten
from shardlab.puzzles.refusal import PuzzleDeadlock, PuzzleRefused


class Watch(AsyncioWatch):
    """Blocks and wakes ranks; what it raises are the AssertionErrors that published solutions expect.

    Attributes:
        forgotten: communications that were called without an `await`, a sentence about each.
    """

    def __init__(self, ranks: int, when_quiet: Callable[[], bool]) -> None:
        super().__init__(ranks, when_quiet)
        self.forgotten: list[str] = []

    async def block(self, rank: int, reason: object, describe: Callable[[], Wait]) -> None:
        try:
            await super().block(rank, reason, describe)
        except Deadlock as deadlock:
            refuse_forgotten(self.forgotten)
            raise PuzzleDeadlock(*deadlock.args) from None
        except Refused as refusal:
            raise PuzzleRefused(*refusal.args) from None

    def waiting(self) -> set[int]:
        """Ranks that wait in something."""
        return {waiting.rank for waiting in self._waiting.values()}

    def ended(self) -> list[int]:
        """Ranks whose task is over."""
        return sorted(rank for rank, task in self._tasks.items() if task.done())

"""The ranks that work together."""

from __future__ import annotations

from shardlab.program import UserError
from shardlab.puzzles.asyncio_watch import AsyncioWatch
from shardlab.puzzles.combining import PuzzleCollectives
from shardlab.puzzles.mail import Mail


class PuzzleRun:
    """One run of a solution on all ranks: its collectives and its mail."""

    def __init__(self, ranks: int) -> None:
        self.mail, self.collectives = Mail(), PuzzleCollectives(ranks)
        self.watch = AsyncioWatch(ranks, lambda: self.collectives.advance() or self.mail.advance())
        self.members: set[int] = set()


class Dist:
    """`Dist(4)`: four ranks. It may be used again: the second `Model` made for a rank starts a new run.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UserError(f"{total} ranks were asked for; give 1 or more")
        self.ranks = total
        self._run = PuzzleRun(total)

    def join(self, rank: int) -> PuzzleRun:
        """The run that a new model of this rank belongs to."""
        if rank in self._run.members:
            self._run = PuzzleRun(self.ranks)
        self._run.members.add(rank)
        return self._run

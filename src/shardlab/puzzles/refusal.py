"""How the face says no: the same refusals, catchable as the AssertionErrors that published solutions expect."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Self, TypeVar

from shardlab.program import Deadlock, Refused
from shardlab.program.lines import SourceLine, here
from shardlab.puzzles.log import COLLECTIVES

if TYPE_CHECKING:
    from shardlab.puzzles.stores import Stores

T = TypeVar("T")


class PuzzleRefused(Refused, AssertionError):
    """A solution is wrong; the sentence names rank, op, layer and the elements."""

    @classmethod
    def of(cls, refusal: Refused) -> Self:
        """Turn a refusal of the check into the puzzles' own, with all that it says."""
        mine = cls(*refusal.args)
        vars(mine).update(vars(refusal))
        return mine

    def on(self, line: SourceLine | None) -> Self:
        """Say on which of the student's lines it is, if that is known."""
        self.line = "" if line is None else str(line)
        return self


class PuzzleDeadlock(PuzzleRefused, Deadlock):
    """Ranks wait for one another for ever; the message names the whole cycle."""


_here: ContextVar[Stores | None] = ContextVar("shardlab_puzzle_rank", default=None)


def stand(rank: Stores) -> None:
    """Note which rank runs in this task: `a + b` and `.combine` do not say."""
    _here.set(rank)


def derived(made: T, *read: Any) -> T:
    """A value that was made of others without an op; the rank that runs is told, for its memory."""
    rank = _here.get()
    if rank is not None:
        rank.derive(made, *read)
    return made


@contextmanager
def judged(rank: Stores | None = None, line: SourceLine | None = None) -> Generator[None]:
    """Turn a refusal of the shared rules into the face's own, in the puzzles' words and with the place before it.

    Args:
        rank: whose op it is (None: of the rank that runs in this task).
        line: the student's line (None: the one that runs).
    """
    try:
        yield
    except PuzzleRefused:
        raise
    except Refused as refusal:
        mine = PuzzleRefused.of(refusal).on(line or here())
        for published, kind in COLLECTIVES.items():
            mine.about = mine.about.replace(kind.value, published)
            mine.given = mine.given.replace(kind.value, published)
            mine.remedy = mine.remedy.replace(kind.value, published)
        rank = rank or _here.get()
        if rank is not None:
            mine.at(rank.rank, len(rank.log))
        raise mine from None

"""How the face says no: the same refusals, catchable as the AssertionErrors that published solutions expect."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

from shardlab.program import Deadlock, Refused
from shardlab.program.lines import Line, here
from shardlab.puzzles.log import COLLECTIVES

if TYPE_CHECKING:
    from shardlab.puzzles.stores import Stores

T = TypeVar("T")


class PuzzleRefused(Refused, AssertionError):
    """A solution is wrong; the sentence names rank, op, layer and the elements."""


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


def placed(line: Line | None, text: str) -> str:
    """A message with the student's line before it."""
    return text if line is None else f"{line}: {text}"


@contextmanager
def judged(rank: Stores | None = None, line: Line | None = None) -> Generator[None]:
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
        text = str(refusal)
        for published, kind in COLLECTIVES.items():
            text = text.replace(kind.value, published)
        rank = rank or _here.get()
        mine = PuzzleRefused(text)
        if rank is not None:
            mine.at(rank.rank, len(rank.log))
        mine.args = (placed(line or here(), str(mine)),)
        raise mine from None

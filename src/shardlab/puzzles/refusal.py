"""How the face says no: the same refusals, catchable as the AssertionErrors that published solutions expect."""

from __future__ import annotations

from collections.abc import Generator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from shardlab.program import Deadlock, Refused
from shardlab.puzzles.lines import Line, here

T = TypeVar("T")


class PuzzleRefused(Refused, AssertionError):
    """A solution is wrong; the sentence names rank, op, layer and the elements."""


class PuzzleDeadlock(PuzzleRefused, Deadlock):
    """Ranks wait for one another for ever; the message names the whole cycle."""


class Place(Protocol):
    """Where a refusal happens: a rank, and the number of the event that it is about to log."""

    @property
    def rank(self) -> int: ...

    @property
    def log(self) -> Sized: ...

    def derive(self, made: Any, *read: Any) -> None: ...


_here: ContextVar[Place | None] = ContextVar("shardlab_puzzle_rank", default=None)

_WORDS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "scatterreduce"}


def stand(place: Place) -> None:
    """Note which rank runs in this task: `a + b` and `.combine` do not say."""
    _here.set(place)


def derived(made: T, *read: Any) -> T:
    """A value that was made of others without an op; the rank that runs is told, for its memory."""
    place = _here.get()
    if place is not None:
        place.derive(made, *read)
    return made


def placed(line: Line | None, text: str) -> str:
    """A message with the student's line before it."""
    return text if line is None else f"{line}: {text}"


@contextmanager
def judged(place: Place | None = None, line: Line | None = None) -> Generator[None]:
    """Turn a refusal of the shared rules into the face's own, in the puzzles' words and with the place before it.

    Args:
        place: the rank (None: the one that runs in this task).
        line: the student's line (None: the one that runs).
    """
    try:
        yield
    except PuzzleRefused:
        raise
    except Refused as refusal:
        text = str(refusal)
        for ours, theirs in _WORDS.items():
            text = text.replace(ours, theirs)
        place = place or _here.get()
        mine = PuzzleRefused(text)
        if place is not None:
            mine.at(place.rank, len(place.log))
        mine.args = (placed(line or here(), str(mine)),)
        raise mine from None

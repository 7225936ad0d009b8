"""How the face says no: the same refusals, catchable as the AssertionErrors that published solutions expect."""

from __future__ import annotations

from collections.abc import Generator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from shardlab.program import Deadlock, Refused


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


_here: ContextVar[Place | None] = ContextVar("shardlab_puzzle_rank", default=None)

_WORDS = {"all_reduce": "allreduce", "all_gather": "allgather", "reduce_scatter": "scatterreduce"}


def stand(place: Place) -> None:
    """Note which rank runs in this task: `a + b` and `.combine` do not say."""
    _here.set(place)


@contextmanager
def judged(place: Place | None = None) -> Generator[None]:
    """Turn a refusal of the shared rules into the face's own, in the puzzles' words and with the place before it."""
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
        raise (mine if place is None else mine.at(place.rank, len(place.log))) from None

"""How many ops are traced, and how long one may take: a program may never end, and an input of a few digits may ask for
more than memory holds."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

from shardlab.errors import Refused, UserError

MAX_OPS = 500_000
"""Ops on all tapes, if nobody says: two seconds, and some hundred megabytes."""

MAX_FOLDED = 4_000_000
"""Ops on the tapes of a plan whose alike ranks are folded, if nobody says: a plan ends, so these may be more."""

MAX_SECONDS = 2.0
"""CPU seconds that a user's program may take until its next op, if nobody says."""

COUNTED = 256
"""A rank counts its ops whenever it has made so many more values, or issued so many more communications."""

_asked: ContextVar[tuple[int | None, float | None]] = ContextVar("bounds", default=(None, None))


class Endless(Refused):
    """A program has written more ops than are traced."""


@contextmanager
def bounded(ops: int | None = None, seconds: float | None = None) -> Generator[None, None, None]:
    """Let programs have so many ops, and so many CPU seconds for each (None: as if nobody said).

    Raises:
        UserError: for no time at all.
    """
    if seconds is not None and not seconds > 0:
        raise UserError(f"--max-seconds-per-op: {seconds:g} is too little; give more than 0")
    token = _asked.set((ops, seconds))
    try:
        yield
    finally:
        _asked.reset(token)


def max_ops(default: int = MAX_OPS) -> int:
    """How many ops a traced program may have on all its tapes."""
    return _asked.get()[0] or default


def max_seconds() -> float:
    """How many CPU seconds a user's program may take until its next op."""
    return _asked.get()[1] or MAX_SECONDS


def require_ops(least: int, what: str, default: int = MAX_OPS) -> None:
    """Refuse what is sure to have too many ops before any is traced.

    Args:
        least: how many ops there will be, or more.
        what: what they are for, in the plural.
        default: how many there may be, if nobody said.

    Raises:
        UserError: with both numbers.
    """
    if least > (most := max_ops(default)):
        raise UserError(
            f"{what} come to {least:,} ops or more, and at most {most:,} are traced; take fewer, or raise --max-ops if "
            "there is the time and the memory"
        )


class OpCount:
    """The ops that all ranks of a world have written.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._ops = 0

    def add(self, ops: int) -> None:
        """Count some more.

        Raises:
            Endless: if these are too many.
        """
        self._ops += ops
        if self._ops > self.most:
            given = f"the step has more than {self.most:,} ops here, and no more are traced"
            remedy = (
                "if this goes on for ever, let the loops end whatever the numbers are; otherwise raise --max-ops, or "
                "take fewer microbatches"
            )
            raise Endless("endless", "", given, remedy)

"""The two ways in which Shardlab says no: to a program that is wrong, and to a request that is wrong."""

from __future__ import annotations


class Refused(Exception):
    """A program is wrong: it would hang, or would not compute the gradient.

    The message says which rank and op, what was found, what was expected and what to do.
    """

    rank: int | None = None
    op: int | None = None

    def at(self, rank: int, op: int) -> Refused:
        """Put the place before the sentence, once; the innermost place wins."""
        if self.rank is None:
            self.rank, self.op = rank, op
            self.args = (f"rank {rank}, op {op} {self.args[0]}",)
        return self


class Deadlock(Refused):
    """Ranks wait for one another for ever; the message names the whole cycle."""


class UserError(ValueError):
    """A request cannot be met as given; the message is one sentence that a user can act on."""


class TooDeep(ValueError):
    """A file has more levels of tables and lists than are read."""

    def __init__(self, most: int) -> None:
        super().__init__(f"it is nested more than {most} levels deep")


def why_unreadable(error: OSError | UnicodeDecodeError | TooDeep) -> str:
    """Why a file could not be read, for a sentence."""
    if isinstance(error, TooDeep):
        return str(error)
    return "it is not text" if isinstance(error, UnicodeDecodeError) else error.strerror or str(error)

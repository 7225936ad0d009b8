"""The two ways in which Shardlab says no: to a program that is wrong, and to a request that is wrong.

A name that is not known is answered with the nearest one that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


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


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that `name` was probably meant to be, in any case of letters; None: no name is like it."""
    known = {each.lower(): each for each in names}
    close = get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    return known[close[0]] if close else None


def nearest(name: str, names: Iterable[str], others: str = "") -> str:
    """The second half of a sentence about an unknown name: what was probably meant, or else what there is.

    >>> nearest("fsdq", ["ddp", "fsdp"])
    'did you mean fsdp?'
    >>> nearest("tree", ["ddp", "fsdp"], " and files that end in .py")
    'there are ddp, fsdp and files that end in .py'

    Args:
        others: what else may be given, after the list of names.
    """
    known = list(names)
    close = closest(name, known)
    return f"did you mean {close}?" if close else f"there are {', '.join(known)}{others}"


def unknown(what: str, name: str | int, names: Iterable[str], others: str = "") -> UserError:
    """The error to raise for a name of some kind of thing that is not among `names`; `others` as in `nearest`."""
    return UserError(f"there is no {what} {name!r}; {nearest(str(name), names, others)}")


def find(table: Mapping[str, T], name: str, what: str) -> T:
    """The table's entry of that name, in any case of letters.

    Raises:
        UserError: there is none; the nearest name is suggested.
    """
    found = table.get(name.strip().lower())
    if found is None:
        raise unknown(what, name, table)
    return found

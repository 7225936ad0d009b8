"""Looking a name up in a table, and suggesting the nearest when it is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

from shardlab.program import UserError

T = TypeVar("T")


def nearest(name: str, names: Iterable[str]) -> str:
    """What an error says of a name that is not among `names`: the nearest ones, or all."""
    known = list(names)
    close = get_close_matches(name.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(sorted(known))}"


def find(table: Mapping[str, T], name: str, what: str) -> T:
    """The row of that name, in any case.

    Raises:
        UserError: there is none.
    """
    found = table.get(name.strip().lower())
    if found is None:
        raise UserError(f"no {what} is called {name!r}; {nearest(name, table)}")
    return found

"""What a rank holds in variables alone: counted as if it stood in a store, from its making to its last use.

A value is known to be alive when a store has it or an op reads it; so it was alive at every event since it was made,
and events at which no store had it are made larger after the fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from shardlab.puzzles.log import Event
from shardlab.puzzles.pieces import Value


class Lives:
    """The lives of one rank's values.

    Args:
        log: the rank's events.
    """

    def __init__(self, log: list[Event]) -> None:
        self._log = log
        self._counted: dict[int, tuple[Value, int]] = {}  # by id: up to which event the value has been counted

    def begin(self, value: Any) -> None:
        """A rank has made or received a value; one that it has had before has lived on meanwhile."""
        for each in values_in([value]):
            if id(each) in self._counted:
                self.use(each)
            else:
                self._counted[id(each)] = each, len(self._log)

    def use(self, *values: Any) -> None:
        """Values are alive: count them at the events since they were made or counted."""
        for value in values_in(values):
            _, counted = self._counted.get(id(value), (value, len(self._log)))
            for event in self._log[counted:]:
                event.memory += value.memory()
            self._counted[id(value)] = value, len(self._log)

    def log(self, event: Event, stored: Iterable[Value], read: Iterable[Any]) -> None:
        """Append an event, whose memory is that of the stores, and add what it reads from none of them."""
        in_stores = {id(value): value for value in stored}
        loose = {id(value): value for value in values_in(read) if id(value) not in in_stores}
        self.use(*in_stores.values(), *loose.values())
        event.memory += sum(value.memory() for value in loose.values())
        self._log.append(event)
        for value in (*in_stores.values(), *loose.values()):
            self._counted[id(value)] = value, len(self._log)


def values_in(things: Iterable[Any]) -> Iterable[Value]:
    """The values among some things, and in the lists, tuples and dicts among them: a message may be one."""
    for thing in things:
        if isinstance(thing, dict):
            thing = list(cast(dict[Any, Any], thing).values())
        parts = cast(list[Any], thing) if isinstance(thing, (list, tuple)) else [thing]
        yield from (part for part in parts if isinstance(part, Value))

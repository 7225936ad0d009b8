"""What a rank holds in variables alone: counted as if it stood in a store, from its making to its last use.

A value is known to be alive when a store has it or an op reads it; so it was alive at every event since it was made,
and events at which no store had it are made larger after the fact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from shardlab.puzzles.log import Event
from shardlab.puzzles.pieces import Value


@dataclass
class _Life:
    """A value, and the number of events whose memory it is counted in where it was alive."""

    value: Value
    counted: int


class Lives:
    """The lives of one rank's values.

    Args:
        log: the rank's events.
    """

    def __init__(self, log: list[Event]) -> None:
        self._log = log
        self._lives: dict[int, _Life] = {}  # by id: of two equal values each takes memory

    def go_on(self, *values: Any) -> None:
        """Values have been made, have come or are read: those that were here before have been here ever since."""
        for value in values_in(values):
            self._go_on(value)

    def log(self, event: Event, stored: Iterable[Value], read: Iterable[Any]) -> None:
        """Append an event, whose memory is that of the stores, and add what it reads from none of them."""
        alive = {id(value): value for value in stored}
        for value in values_in(read):
            if id(value) not in alive:
                alive[id(value)] = value
                event.memory += value.memory()
        for value in alive.values():
            self._go_on(value).counted += 1
        self._log.append(event)

    def _go_on(self, value: Value) -> _Life:
        life = self._lives.get(id(value))
        if life is None:
            life = self._lives[id(value)] = _Life(value, len(self._log))
        elif life.counted < len(self._log):
            for event in self._log[life.counted :]:
                event.memory += value.memory()
            life.counted = len(self._log)
        return life


def values_in(things: Iterable[Any]) -> Iterable[Value]:
    """The values among some things, and in the lists, tuples and dicts among them: a message may be one."""
    for thing in things:
        if isinstance(thing, dict):
            thing = list(cast(dict[Any, Any], thing).values())
        parts = cast(list[Any], thing) if isinstance(thing, (list, tuple)) else [thing]
        yield from (part for part in parts if isinstance(part, Value))

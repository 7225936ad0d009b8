"""A rank's memory, its clock and its log.

What a rank holds in variables alone counts as if it stood in a store, from its making to its last use. A value is known
to be alive when a store has it or an op reads it; so it was alive at every event since it was made, and events at which
no store had it are made larger after the fact.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any, TypeVar, cast

from shardlab.program import Refused
from shardlab.puzzles.calls import PuzzleCall
from shardlab.puzzles.log import PuzzleEvent
from shardlab.puzzles.refusal import judged
from shardlab.puzzles.values import Activation, ActivationGrad, OptState, PuzzleValue, Weight, WeightGrad

T = TypeVar("T")

Storage = tuple[
    dict[Any, Weight], dict[Any, OptState], dict[Any, Activation], dict[Any, ActivationGrad], dict[Any, WeightGrad]
]


class Stores:
    """The memory of one rank, and what it has done when.

    Attributes:
        rank: this rank's number.
        weights, opt_states, activations, grad_activations, grad_weights: the stores. Keys are free; a value under two
            keys counts twice.
        time: the rank's clock.
        log: everything it has done, in order.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time: float = 0
        self.log: list[PuzzleEvent] = []
        self.weights: dict[Any, Weight] = {}
        self.opt_states: dict[Any, OptState] = {}
        self.activations: dict[Any, Activation] = {}
        self.grad_activations: dict[Any, ActivationGrad] = {}
        self.grad_weights: dict[Any, WeightGrad] = {}
        self._alive: dict[int, tuple[PuzzleValue, int]] = {}
        """Values by id, since of two equal ones each takes memory, and how many events of the log count them or were
        before them."""

    def stores(self) -> Storage:
        """The five stores, in the published order."""
        return self.weights, self.opt_states, self.activations, self.grad_activations, self.grad_weights

    def _stored(self) -> list[PuzzleValue]:
        """Everything that is in the stores.

        Raises:
            PuzzleRefused: if it is no value.
        """
        values: list[PuzzleValue] = []
        for store in self.stores():
            for key, value in cast("dict[Any, object]", store).items():
                if isinstance(value, PuzzleCall):
                    value.refuse()
                if not isinstance(value, PuzzleValue):
                    with judged(self):
                        given = f"the store has {value!r} under {key!r}"
                        raise Refused("no value", "memory", given, "keep values of the puzzles in it")
                values.append(value)
        return values

    def memory(self) -> float:
        """Elements in the stores."""
        return sum(value.memory() for value in self._stored())

    def status(self) -> None:
        """Print what is in the stores."""
        names = ("weights", "opt_states", "activations", "grad_activations", "grad_weights")
        for name, store in zip(names, self.stores(), strict=True):
            print(f"{name}: " + (", ".join(f"{key!r}: {value.spec}" for key, value in store.items()) or "empty"))

    def note(
        self,
        typ: str,
        *read: Any,
        layer: int | None = None,
        batches: Set[int] = frozenset(),
        to: int | None = None,
        source: int | None = None,
    ) -> None:
        """Log an event that starts now and reads some values, and let its time pass."""
        stored = self._stored()
        alive = {id(value): value for value in stored}
        hidden = {id(value): value for value in values_in(read) if id(value) not in alive}
        memory = sum(value.memory() for value in (*stored, *hidden.values()))
        event = PuzzleEvent(typ, layer, self.rank, self.time, 0, memory, batches, to, source)
        event.length = event.cost
        self.derive(*stored, *hidden.values())
        self.log.append(event)
        self._alive |= {key: (value, len(self.log)) for key, value in (alive | hidden).items()}
        self.time = event.end

    def derive(self, *values: Any) -> None:
        """Note that values have been made, have come or are read: those from before have been here ever since."""
        for value in values_in(values):
            _, counted = self._alive.get(id(value), (value, len(self.log)))
            for event in self.log[counted:]:
                event.memory += value.memory()
            self._alive[id(value)] = value, len(self.log)


def values_in(things: Iterable[Any]) -> Iterable[PuzzleValue]:
    """The values among some things, and in the lists, tuples and dicts among them: a message may be one."""
    for thing in things:
        if isinstance(thing, dict):
            thing = list(cast(dict[Any, Any], thing).values())
        parts = cast(list[Any], thing) if isinstance(thing, (list, tuple)) else [thing]
        yield from (part for part in parts if isinstance(part, PuzzleValue))

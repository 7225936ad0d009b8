"""A rank's state: its five stores, its clock and its log."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, TypeVar

from shardlab.program import Refused
from shardlab.puzzles.calls import Call
from shardlab.puzzles.lives import Lives
from shardlab.puzzles.log import KINDS, Event, later, length
from shardlab.puzzles.refusal import judged
from shardlab.puzzles.values import Activation, ActivationGrad, OptState, Value, Weight, WeightGrad
from shardlab.simulate.costs import UNIT_COSTS

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
        final_weights: what `set_final_weight` was given.
        time: the rank's clock.
        log: everything it has done, in order.
        forgotten: communications of the run that were called without an `await`, a sentence about each.
        fakes: gradients made up by `fake_grad`, but for zeros.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.time: float = 0
        self.log: list[Event] = []
        self.forgotten: list[str] = []
        self._lives = Lives(self.log)
        self.fakes: list[str] = []
        self.final_weights: dict[int, Weight] = {}
        self.weights: dict[Any, Weight] = {}
        self.opt_states: dict[Any, OptState] = {}
        self.activations: dict[Any, Activation] = {}
        self.grad_activations: dict[Any, ActivationGrad] = {}
        self.grad_weights: dict[Any, WeightGrad] = {}

    def stores(self) -> Storage:
        """The five stores, in the published order."""
        return self.weights, self.opt_states, self.activations, self.grad_activations, self.grad_weights

    def memory(self) -> float:
        """Elements in the stores.

        Raises:
            PuzzleRefused: if a store has something else than a value in it.
        """
        total: float = 0
        for store in self.stores():
            for key, value in store.items():
                if isinstance(value, Call):
                    value.refuse()
                if not isinstance(value, Value):  # pyright: ignore[reportUnnecessaryIsInstance]
                    with judged(self):
                        raise Refused(f"memory: the store has {value!r} under {key!r}; it keeps values of the puzzles.")
                total += value.memory()
        return total

    def status(self) -> None:
        """Print what is in the stores."""
        names = ("weights", "opt_states", "activations", "grad_activations", "grad_weights")
        for name, store in zip(names, self.stores(), strict=True):
            print(f"{name}: " + (", ".join(f"{key!r}: {value.spec}" for key, value in store.items()) or "empty"))

    def note(self, typ: str, *read: Any, layer: int | None = None, batches: Set[int] = frozenset()) -> None:
        """Log an event that starts now and reads some values, and let its time pass."""
        event = Event(typ, layer, self.rank, self.time, length(KINDS[typ], batches), self.memory(), batches)
        self._append(event, *read)

    def note_pass(self, *read: Any, to: int | None = None, source: int | None = None) -> None:
        """Log a send or a receive."""
        cost = UNIT_COSTS.recv if to is None else UNIT_COSTS.send
        self._append(Event("pass", None, self.rank, self.time, cost, self.memory(), to=to, source=source), *read)

    def _append(self, event: Event, *read: Any) -> None:
        self._lives.log(event, (value for store in self.stores() for value in store.values()), read)
        self.time = later(self.time, event.length)

    def derive(self, made: T, *read: Any) -> T:
        """Note that a value has been made, or has come, and that others were read."""
        self._lives.go_on(made, *read)
        return made

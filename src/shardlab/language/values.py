"""Objects that a strategy handles: values, the stores that keep them, and handles of communication in flight.

The last part explains deadlocks: `Wait` names the ranks for which a rank waits, `deadlock_sentence` turns many waits
into a sentence, and `deadlock_error` into an error.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Generator, Hashable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar, cast

from shardlab.common.errors import About, Deadlock, Refused, Rule
from shardlab.common.text import listed
from shardlab.language.misuse import HandleMisuse, ValueMisuse
from shardlab.language.ops import picture
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.spec import Form, Spec
from shardlab.language.sizes import Sizes
from shardlab.language.tape import Op


class TracedRank(Protocol):
    """The part of `tracing.Tracer` that a rank's values, stores and handles use.

    Attributes:
        index: the rank's number, from 0.
        sizes: the elements and bytes of every value.
        ops: the rank's tape.
        handles: the number of communications that the rank has issued.
    """

    index: int
    sizes: Sizes
    ops: list[Op]
    handles: int

    def make(self, spec: Spec) -> Value: ...
    def add(self, a: Value, b: Value) -> Value: ...
    def emit_wait(self, handle: Handle[Any]) -> None: ...
    def forget_key(self, value: Value) -> None: ...
    def refuse(self, rule: Rule, about: About | str, fault: str, remedy: str) -> NoReturn: ...
    def require_storable(self, kind: Kind, key: Hashable, value: object) -> None: ...
    def why_missing(self, kind: Kind, key: Hashable) -> str: ...


class Value(ValueMisuse):
    """Symbolic value on one rank while the program is traced. It has a spec and no data.

    Attributes:
        rank, number: the rank, and the value's number on its tape.
        spec: the value's spec.
        keys: number of store keys that name the value.
        reading: communications in flight that read it. Until they complete it is read-only and stays alive.
        alive: whether it has been neither freed nor replaced by an update.
        dropped: whether its last key was deleted or overwritten, which ended it.
        replaced: whether an update ended it.
        saved_values: numbers of the values that the layer saved for the backward pass with this input, by form (None:
            none yet). The form records which slices of the layer's parameters the forward pass used.
        saved_for_weight: number of the value that `backward_input` leaves for `backward_weight` (-1: none).
    """

    __slots__ = (
        "alive", "dropped", "keys", "number", "rank", "reading", "replaced", "saved_for_weight", "saved_values", "spec",
    )  # fmt: skip

    rank: TracedRank
    number: int
    spec: Spec
    keys: int
    reading: tuple[Handle[Any], ...]
    alive: bool
    dropped: bool
    replaced: bool
    saved_values: dict[Form, int] | None
    saved_for_weight: int

    @property
    def elements(self) -> int:
        return self.rank.sizes.elements(self.spec)

    @property
    def bytes(self) -> int:
        return self.rank.sizes.bytes(self.spec)

    def __add__(self, other: Value) -> Value:
        return self.rank.add(self, other)

    def __repr__(self) -> str:
        state = "" if self.alive else ", freed"
        return f"<{self.spec} on rank {self.rank.index}, {self.elements} elements{state}>"

    def _repr_svg_(self) -> str | None:
        return picture(self)


_new = object.__new__


def new_value(rank: TracedRank, number: int, spec: Spec) -> Value:
    """Return a new value, without the cost of a constructor call."""
    value = _new(Value)
    value.rank, value.number, value.spec = rank, number, spec
    value.keys, value.reading, value.alive = 0, (), True
    value.dropped = value.replaced = False
    value.saved_values, value.saved_for_weight = None, -1
    return value


class MissingKey(Refused, KeyError):
    """Error about a key that a store does not have."""


class Store(MutableMapping[Hashable, Value]):
    """One of a rank's stores. Two keys may name one value, which is freed when its last key is deleted.

    Args:
        shared: map from a key to another one, whose value it reads as long as it has none of its own.
    """

    def __init__(self, rank: TracedRank, kind: Kind, shared: Mapping[Hashable, Hashable] | None = None) -> None:
        self._rank = rank
        self._shared = shared or {}
        self.kind = kind
        self.name: str = kind.value
        self._values: dict[Hashable, Value] = {}

    def __getitem__(self, key: Hashable) -> Value:
        try:
            return self._values[key]
        except KeyError:
            if key in self._shared:
                return self[self._shared[key]]
            raise self._missing(key) from None

    def __setitem__(self, key: Hashable, value: Value) -> None:
        rank = self._rank
        if (
            value.__class__ is not Value
            or value.spec[0].kind is not self.kind
            or not value.alive
            or value.rank is not rank
        ):
            rank.require_storable(self.kind, key, value)
        value.keys += 1  # before the old value is released: it may be this one
        old = self._values.get(key)
        if old is not None:
            rank.forget_key(old)
        self._values[key] = value

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        del self._values[key]
        self._rank.forget_key(value)

    def pop(self, key: Hashable, *other_keys: Hashable) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remove a value from the store and return it. It is freed after its last use.

        Raises:
            Refused: for a key that the store does not have, and for a key of several parts without its parentheses.
        """
        if other_keys:
            parts = ", ".join(map(repr, (key, *other_keys)))
            remedy = f"a key of several parts is one tuple, write pop(({parts})); there is no default"
            self._rank.refuse("unknown key", f"{self.name}.pop", f"{parts} was given", remedy)
        try:
            value = self._values.pop(key)
        except KeyError:
            raise self._missing(key) from None
        value.keys -= 1
        return value

    def __contains__(self, key: object) -> bool:  # without building the sentence of a missing key
        return key in self._values

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        items = ", ".join(f"{key!r}: {value!r}" for key, value in itertools.islice(self._values.items(), SHOWN_KEYS))
        rest = len(self._values) - SHOWN_KEYS
        return f"{self.kind.value}: {{{items}{f' and {rest} more' if rest > 0 else ''}}}"

    def _repr_svg_(self) -> str | None:
        return picture(self)

    def _missing(self, key: Hashable) -> Refused:
        fault, keys = f"{self.name}[{key!r}] does not exist", listed_keys(self._values)
        other = next((k for k, v in self._values.items() if isinstance(k, int) and v.spec.layer == key), None)
        if other is not None:
            fault += f"; {self._values[other].spec} is under the key {other}"
            remedy = "correct one of the two keys"
        elif reason := self._rank.why_missing(self.kind, key):
            remedy = reason
        elif self.kind is Kind.GRAD_WEIGHT and not isinstance(key, tuple):
            remedy = "begin the sum with rank.accumulate(gradient)"
        elif not keys:
            remedy = f"the store is empty, first write rank.{self.name}[{key!r}] = value"
        else:
            fault += f"; the store has {'only the key' if len(self) == 1 else 'the keys'} {keys}"
            remedy = f"correct the key, or write rank.{self.name}[{key!r}] before this line"
        return MissingKey("unknown key", "", fault, remedy).at(self._rank.index, len(self._rank.ops))


SHOWN_KEYS = 6
"""Most keys of a store that are listed, unless they are numbers."""


def listed_keys(keys: Collection[Hashable]) -> str:
    """Return the keys of a store as text: all as ranges if they are numbers, otherwise the first `SHOWN_KEYS`."""
    if all(isinstance(key, int) for key in keys):
        return listed(sorted(cast(Collection[int], keys))) if keys else ""
    rest = len(keys) - SHOWN_KEYS
    return ", ".join(map(repr, itertools.islice(keys, SHOWN_KEYS))) + (f" and {rest} more" if rest > 0 else "")


def argument_text(argument: object) -> str:
    """Return an argument of a verb as a program could write it, without memory addresses."""
    if isinstance(argument, Value):
        return str(argument.spec)
    if isinstance(argument, Store):
        return f"rank.{argument.name}"
    if isinstance(argument, list):
        return f"[{', '.join(map(argument_text, cast(list[object], argument)))}]"
    if inspect.ismethod(argument):
        owner = argument.__self__
        return f"{'rank' if hasattr(owner, 'refuse') else argument_text(owner)}.{argument.__name__}"
    return f"{argument!r:.100}"


Result = TypeVar("Result", covariant=True)


class Handle(HandleMisuse, Generic[Result]):
    """Handle of a communication in flight. `await` it for the result.

    The result is None for a send and a barrier, and for a gather or a reduce on every rank but the root.

    Attributes:
        rank, number, op: the rank that issued it, its number there, and the index of its op on the tape.
        result: the result. On the root of a broadcast it is the input value.
        read: the value that the communication reads until it completes.
        others: handles that are awaited together with this one, since they were issued as one batch.
        ready: whether `await` returns without waiting for another rank. A send and a copy are ready at once; a receive
            and a collective are ready when all their parts have been issued.
        waited: whether its WAIT is on the tape.
    """

    __slots__ = ("number", "op", "others", "rank", "read", "ready", "result", "waited")

    def waits_for(self) -> Wait:
        """Return what this handle waits for."""
        raise AssertionError("every kind of handle says what it waits for")

    def refuse_use(self) -> NoReturn:
        """Refuse the use of this handle where its result is wanted."""
        fault = f"the handle of {self.rank.ops[self.op]} (op {self.op}) was used where its result is wanted"
        self.rank.refuse("not awaited", "", fault, "await it first")

    def __repr__(self) -> str:  # asyncio prints it if a strategy is awaited by hand
        return f"<{type(self).__name__} of rank {self.rank.index}; only `trace` drives a strategy>"

    def __await__(self) -> Generator[Any, None, Result]:
        if not self.ready:
            yield self
        if self.others:
            yield from self._await_others()
        if not self.waited:
            self.rank.emit_wait(self)
        return self.result

    def _begin(self, rank: TracedRank, result: Any, read: Value | None, *, ready: bool = False) -> None:
        """Set the fields of every kind of handle. It is a method because `super().__init__` would be slower."""
        self.rank = rank
        self.number = rank.handles
        self.op = len(rank.ops)
        self.result: Result = result
        self.read = read
        self.others: tuple[Handle[Any], ...] = ()
        self.ready, self.waited = ready, False

    def _await_others(self) -> Generator[Any, None, None]:
        """Wait until all handles of the batch are ready, then append their WAITs in the order of issue."""
        for handle in self.others:
            if not handle.ready:
                yield handle
        for handle in sorted((self, *self.others), key=attrgetter("number")):
            if not handle.waited:
                self.rank.emit_wait(handle)


class Wait(NamedTuple):
    """Reason why a rank cannot go on: the op in which it waits, and the ranks that would have to act."""

    op_text: str
    blockers: Sequence[int]


def deadlock_error(waits: Mapping[int, Wait]) -> Deadlock:
    """Return the error for a program that deadlocks. It names the ranks that wait, and for what."""
    remedy = (
        "let every op come on all of its ranks, and in one order: look for an `if`, a loop or an early return that "
        "differs between these ranks"
    )
    if all(wait.op_text.startswith("recv ") and wait.blockers[0] in waits for wait in waits.values()):
        remedy = "let one of them send first, or let each send and receive at once with rank.exchange"
    return Deadlock("deadlock", "deadlock", chain_of_waits(waits), remedy)


def deadlock_sentence(waits: Mapping[int, Wait]) -> str:
    """Return the sentence about ranks that wait for one another."""
    return f"deadlock: {chain_of_waits(waits)}."


def chain_of_waits(waits: Mapping[int, Wait]) -> str:
    """Describe the waits from the first rank on, until a rank repeats (a cycle) or has ended without the missing op."""
    rank = min(waits)
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        blockers = waits[rank].blockers
        rank = next((b for b in blockers if b not in waits), blockers[0])
    cyclic = rank in path
    chain = path[path.index(rank) :] if cyclic else path
    sentences = [f"rank {r} waits in {waits[r].op_text}" for r in chain]
    if not cyclic:
        sentences.append(f"rank {rank} has ended without it")
    rest = len(waits) - len(chain)
    suffix = f" ({rest} more rank{'s wait' if rest > 1 else ' waits'} behind them)" if rest else ""
    return "; ".join(sentences) + suffix

"""The values that a strategy handles, the handles of communications under way, and the stores that keep values."""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, MutableMapping, Sequence
from operator import attrgetter
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from shardlab.common.errors import Deadlock, Refused
from shardlab.language.ops import picture
from shardlab.language.rules.kinds import Kind
from shardlab.language.rules.spec import Form, Spec
from shardlab.language.sizes import Sizes
from shardlab.language.tape import Op


class TracedRank(Protocol):
    """Interface that values, stores and handles use of the rank that they belong to (see `tracing.Tracer`).

    Attributes:
        index: the rank's number, from 0.
        sizes: the elements and bytes of every value.
        ops: the rank's tape.
        handles: how many communications the rank has issued.
    """

    index: int
    sizes: Sizes
    ops: list[Op]
    handles: int

    def make(self, spec: Spec) -> Value: ...
    def add(self, a: Value, b: Value) -> Value: ...
    def emit_wait(self, handle: Handle[Any]) -> None: ...
    def forget_key(self, value: Value) -> None: ...
    def refuse_to_store(self, kind: Kind, key: Hashable, value: object) -> NoReturn: ...


class Value:
    """A value on one rank while the program is traced: it knows what it is, and has no data.

    Attributes:
        rank, number, spec: where it is, its number there, and what it is.
        keys: how many store keys name it.
        reading: communications in flight that read it; until they complete it is read-only and stays live.
        alive: whether ops may use it.
        was_stored: whether a key has named it.
        replaced: whether an update ended it.
        saved: numbers of what its layer keeps of this activation's forward passes (None: of none yet), by form, which
            tells with which slices of the layer's parameters each was made.
        saved_for_weight: number of what `backward_input` leaves for `backward_weight` (-1: nothing).
    """

    __slots__ = (
        "alive", "keys", "number", "rank", "reading", "replaced", "saved", "saved_for_weight", "spec", "was_stored",
    )  # fmt: skip

    rank: TracedRank
    number: int
    spec: Spec
    keys: int
    reading: tuple[Handle[Any], ...]
    alive: bool
    was_stored: bool
    replaced: bool
    saved: dict[Form, int] | None
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
    """Make a value; a constructor of the class's own would be called through C, which costs as much again."""
    value = _new(Value)
    value.rank, value.number, value.spec = rank, number, spec
    value.keys, value.reading, value.alive = 0, (), True
    value.was_stored = value.replaced = False
    value.saved, value.saved_for_weight = None, -1
    return value


class MissingKey(Refused, KeyError):
    """A key that a store does not have."""


class Store(MutableMapping[Hashable, Value]):
    """One of a rank's stores. Two keys may name one value; it is freed when its last key goes."""

    def __init__(self, rank: TracedRank, kind: Kind) -> None:
        self._rank = rank
        self.kind = kind
        self.name: str = kind.value
        self._values: dict[Hashable, Value] = {}

    def __getitem__(self, key: Hashable) -> Value:
        try:
            return self._values[key]
        except KeyError:
            raise self._missing(key) from None

    def _missing(self, key: Hashable) -> Refused:
        have = ", ".join(map(repr, self._values))
        has = f"has the keys {have}, use one of these" if have else "is empty, keep the value in it"
        missing = MissingKey("unknown key", "", f"{self.name}[{key!r}] does not exist", f"the store {has}")
        return missing.at(self._rank.index, len(self._rank.ops))

    def __setitem__(self, key: Hashable, value: Value) -> None:
        rank = self._rank
        if (
            value.__class__ is not Value
            or value.spec[0].kind is not self.kind
            or not value.alive
            or value.rank is not rank
        ):
            rank.refuse_to_store(self.kind, key, value)
        value.was_stored = True
        value.keys += 1  # before the old value goes: it may be this one
        old = self._values.get(key)
        if old is not None:
            rank.forget_key(old)
        self._values[key] = value

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        del self._values[key]
        self._rank.forget_key(value)

    def pop(self, key: Hashable) -> Value:  # pyright: ignore[reportIncompatibleMethodOverride]  # no default
        """Take a value out for its last use: it lives until the op that uses it ends."""
        try:
            value = self._values.pop(key)
        except KeyError:
            raise self._missing(key) from None
        value.keys -= 1
        return value

    def __contains__(self, key: object) -> bool:  # without the sentence of a missing key
        return key in self._values

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"{self.kind.value}: {self._values!r}"

    def _repr_svg_(self) -> str | None:
        return picture(self)


Result = TypeVar("Result", covariant=True)


class Handle(Generic[Result]):
    """What a communication call returns at once. `await` it for the result.

    That is None for a send and a barrier, and where another rank is the root that alone receives.

    Attributes:
        rank, number, op: the rank that issued it, its number there, and the index of its op on the tape.
        result: what awaiting gives; the value that was read itself, where a root has broadcast it.
        read: the value that the communication reads until it completes.
        others: handles that are awaited with this one, since they were issued together.
        ready: whether everybody needed has issued their part.
        waited: whether its WAIT stands on the tape.
    """

    __slots__ = ("number", "op", "others", "rank", "read", "ready", "result", "waited")

    def _begin(self, rank: TracedRank, result: Any, read: Value | None, *, ready: bool = False) -> None:
        """What each kind of handle begins with; a plain call, where `super` would make an object."""
        self.rank = rank
        self.number = rank.handles
        self.op = len(rank.ops)
        self.result: Result = result
        self.read = read
        self.others: tuple[Handle[Any], ...] = ()
        self.ready, self.waited = ready, False

    def wait(self) -> Wait:
        """What this handle waits for, in words."""
        raise AssertionError("every kind of handle says what it waits for")

    def __repr__(self) -> str:  # asyncio shows it when a strategy is awaited by hand
        return f"<{type(self).__name__} of rank {self.rank.index}; only `trace` drives a strategy>"

    def __await__(self) -> Generator[Any, None, Result]:
        if not self.ready:
            yield self
        if self.others:
            yield from self._await_others()
        if not self.waited:
            self.rank.emit_wait(self)
        return self.result

    def _await_others(self) -> Generator[Any, None, None]:
        """Wait until all are ready, then for those that were issued before this one, for it, and for the rest."""
        for handle in self.others:
            if not handle.ready:
                yield handle
        for handle in sorted((self, *self.others), key=attrgetter("number")):
            if not handle.waited:
                self.rank.emit_wait(handle)


class Wait(NamedTuple):
    """A rank that cannot go on: the op that it waits in, and the ranks that would have to act."""

    what: str
    blockers: Sequence[int]


def deadlock(waits: Mapping[int, Wait]) -> Deadlock:
    """The refusal of a program whose ranks wait so."""
    remedy = "let every op come on all of its ranks, and in one order"
    return Deadlock("deadlock", "deadlock", circle(waits), remedy)


def explain(waits: Mapping[int, Wait]) -> str:
    """The sentence about ranks that wait so."""
    return f"deadlock: {circle(waits)}."


def circle(waits: Mapping[int, Wait]) -> str:
    """Follow the waits until a rank repeats (a cycle) or one is reached that has ended without the missing op."""
    rank = min(waits)
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        blockers = waits[rank].blockers
        rank = next((b for b in blockers if b not in waits), blockers[0])
    cyclic = rank in path
    shown = path[path.index(rank) :] if cyclic else path
    sentences = [f"rank {r} waits in {waits[r].what}" for r in shown]
    if not cyclic:
        sentences.append(f"rank {rank} has ended without it")
    rest = len(waits) - len(shown)
    after = f" ({rest} more rank{'s wait' if rest > 1 else ' waits'} behind them)" if rest else ""
    return "; ".join(sentences) + after

"""The values that a strategy handles, and the stores that keep them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from shardlab.errors import Refused
from shardlab.program.picture import picture
from shardlab.rules.kind import Kind
from shardlab.rules.spec import Form, Spec

if TYPE_CHECKING:
    from shardlab.program.handle import Handle
    from shardlab.program.rank import Rank
    from shardlab.program.tracer import Tracer


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

    rank: Rank
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


def new_value(rank: Rank, number: int, spec: Spec) -> Value:
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

    def __init__(self, rank: Tracer, kind: Kind) -> None:
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

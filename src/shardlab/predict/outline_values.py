"""Values and handles of a rank that only notes: their bytes, and who still wants them.

They live and end as those of a traced rank do (see `shardlab.program.tracing`).
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from shardlab.predict.priced_sample import SizedPart
from shardlab.program import Group, Kind

if TYPE_CHECKING:
    from shardlab.predict.outline import Outline


class OutlineValue:
    """A value of an outlined rank.

    Attributes:
        part: what it is.
        layer, pieces, of: whose, and so many of so many pieces.
        room: the bytes that it takes now; 0 if it lies where another value did.
        slot: the category that they count in, by its place.
        keys, reading, alive: as of `shardlab.program.values.Value`.
        updated: whether it is a weight that the step has updated.
    """

    __slots__ = ("alive", "keys", "layer", "of", "part", "pieces", "rank", "reading", "room", "slot", "updated")

    def __init__(self, rank: Outline, part: SizedPart, layer: int = -1, pieces: int = 1, of: int = 1) -> None:
        self.rank, self.part, self.layer, self.pieces, self.of = rank, part, layer, pieces, of
        self.room = part.room
        self.slot = part.slot
        self.keys = 0
        self.alive, self.updated = True, False
        self.reading: tuple[OutlineHandle, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.part.spec.form.kind

    def __add__(self, other: OutlineValue) -> OutlineValue:
        return self.rank.add(self, other)


class OutlineHandle:
    """A collective that an outlined rank has begun.

    Attributes:
        group: who meets.
        number: among the rank's collectives.
        result, read: the value that it makes, and the one that it reads.
    """

    __slots__ = ("group", "number", "rank", "read", "result", "waited")

    def __init__(
        self, rank: Outline, group: Group, number: int, result: OutlineValue | None, read: OutlineValue | None
    ) -> None:
        self.rank, self.group, self.number, self.result, self.read = rank, group, number, result, read
        self.waited = False

    def __await__(self) -> Generator[OutlineHandle, None, Any]:
        if not self.waited:
            self.rank.wait(self)
        return self.result
        yield self


class OutlineStore(dict[Hashable, OutlineValue]):
    """An outlined rank's values of a kind; the last key that goes frees its value."""

    def __setitem__(self, key: Hashable, value: OutlineValue) -> None:
        value.keys += 1
        old = self.get(key)
        if old is not None:
            old.rank.forget(old)
        super().__setitem__(key, value)

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        super().__delitem__(key)
        value.rank.forget(value)

    def pop(self, key: Hashable) -> OutlineValue:  # pyright: ignore[reportIncompatibleMethodOverride]  # no default
        value = super().pop(key)
        value.keys -= 1
        return value

    def reset(self, values: Mapping[Hashable, OutlineValue]) -> None:
        """Keep these values, and forget the others as if they had never been."""
        self.clear()
        self.update(values)

    def put(self, key: Hashable, value: OutlineValue) -> None:
        """Bring back a value that knows how many keys it has."""
        super().__setitem__(key, value)


class Borders:
    """Values between layers. Passes have counted them already; one that is sent is made when it is."""

    def __init__(self, rank: Outline, kind: Kind) -> None:
        self.rank = rank
        self.kind = kind
        self.name = kind.value
        self._parts: dict[int, SizedPart] = {}

    def __setitem__(self, key: Hashable, value: object) -> None:
        """Nothing is left to count."""

    def __delitem__(self, key: tuple[int, int]) -> None:
        """Nothing, but for the gradient of the tokens, which no pass reads."""
        if self.kind is Kind.GRAD_ACTIVATION and key[0] == 0:
            self.rank.drop(self.pop(key))

    def pop(self, key: tuple[int, int]) -> OutlineValue:
        return self.coming(key[0])

    def coming(self, layer: int) -> OutlineValue:
        """Make the value that enters a layer, or its gradient."""
        part = self._parts.get(layer)
        if part is None:
            part = self._parts[layer] = self.rank.figures.border(self.kind, layer)
        return OutlineValue(self.rank, part)

"""What the puzzles' values have in common: those cut into shards, and those that are of some microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any, Self, cast

from shardlab.program import Holds, Refused, Spec
from shardlab.program.sizes import PUZZLE_HIDDEN, PUZZLE_LENGTH
from shardlab.puzzles import rules
from shardlab.puzzles.refusal import derived, judged
from shardlab.rules.pieces import bits, mask_of

if TYPE_CHECKING:
    from shardlab.puzzles.pictures import Picture

ONE: frozenset[int] = frozenset({0})


class Value:
    """A value of one layer: which one, and how many layers the network has."""

    layer: int
    layers: int
    total_batches: int = 1

    @cached_property
    def spec(self) -> Spec:
        """What is known of the value, in the terms of `shardlab.program`."""
        return self._spec()

    def _spec(self) -> Spec:
        raise NotImplementedError

    def memory(self) -> float:
        """Elements that it takes."""
        raise NotImplementedError

    def draw(self) -> Picture:
        """The network with this value filled in."""
        from shardlab.puzzles.pictures import network

        return network([self])

    def _repr_svg_(self) -> str:
        return self.draw().svg

    def keep(self, field: str, given: Iterable[Any]) -> None:
        """Make a field, given as any collection of numbers, a frozen set."""
        try:
            numbers = frozenset(index(number) for number in given)
        except TypeError:
            numbers = frozenset({-1})
        if any(number < 0 for number in numbers):
            with judged():
                raise Refused(
                    f"{type(self).__name__} of layer {self.layer}: {field} are {given!r}; give a collection of "
                    "numbers, which count from 0."
                )
        object.__setattr__(self, field, numbers)

    def _key(self) -> tuple[object, ...]:
        return type(self), self.layers, self.total_batches, self.spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class Sharded(Value):
    """A value that can be cut into shards and put together again: a weight, an optimizer state, a weight gradient."""

    shards: Set[int]
    total: int

    def __post_init__(self) -> None:
        self.keep("shards", self.shards)
        if not self.shards or max(self.shards) >= self.total:
            with judged():
                raise Refused(
                    f"{type(self).__name__} of layer {self.layer}: shards {sorted(self.shards)} of {self.total} were "
                    "given; a value has at least one shard, and they count from 0."
                )

    @property
    def holds(self) -> Holds:
        """Which slices of the layer are here."""
        return Holds(mask_of(self.shards), self.total)

    def is_complete(self) -> bool:
        """Whether every shard of the layer is here."""
        return len(self.shards) == self.total

    def combine(self, other: Self) -> Self:
        """Both put together: the shards of either.

        Raises:
            PuzzleRefused: if they are not pieces of one value.
        """
        with judged():
            op = f"combine({self.spec.name})"
            specs = [self.spec, rules.spec_of(op, "other value", other)]
            whole = self.holding(rules.gather(op, specs, ["the first value", "the second value"]).holds)
        return derived(whole, self, other)

    def shard(self, shard: int, total: int) -> Self:
        """Piece `shard` of `total` equal ones.

        Raises:
            PuzzleRefused: if the value is not complete, or the piece does not exist.
        """
        with judged():
            if not self.is_complete():
                raise Refused(f"shard({self.spec.name}): {self.spec} is partial; only a complete value is cut.")
            return derived(self.holding(Holds(mask_of([shard]), total)), self)

    def holding(self, holds: Holds) -> Self:
        """The same value with other slices of the layer."""
        return replace(cast(Any, self), shards=frozenset(bits(holds.mask)), total=holds.of)

    def memory(self) -> float:
        return (len(self.shards) / self.total) * PUZZLE_HIDDEN * PUZZLE_HIDDEN

    def _key(self) -> tuple[object, ...]:
        spec = self.spec
        return (
            type(self),
            self.layers,
            self.total_batches,
            spec._replace(form=spec.form.but(holds=rules.lowest_terms(spec.holds))),
        )


class Rows(Value):
    """A value of some microbatches: an activation or its gradient."""

    batches: Set[int]

    def __post_init__(self) -> None:
        self.keep("batches", self.batches)

    @property
    def holds(self) -> Holds:
        """Which microbatches are here."""
        return Holds(mask_of(self.batches), self.total_batches)

    def memory(self) -> int:
        """Elements that it takes."""
        return len(self.batches) * PUZZLE_HIDDEN * PUZZLE_LENGTH

"""The puzzles' five kinds of value. Each knows what it holds and what it sums (`spec`); none carries data.

Shards and microbatches may be given as any collection of numbers. Values never change, and two that hold the same
slices are equal, however many shards they are counted in.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any, ClassVar, Self, cast

from shardlab.errors import About, Refused
from shardlab.program import Holds, Kind, Spec
from shardlab.program.sizes import PUZZLE_HIDDEN, PUZZLE_LENGTH
from shardlab.puzzles import rules
from shardlab.puzzles.pictures import Picture, network_picture
from shardlab.puzzles.refusal import derived, judged
from shardlab.rules import sums
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import bits, mask_of
from shardlab.rules.spec import Space, form_of

ONE: frozenset[int] = frozenset({0})


class PuzzleValue:
    """A value of one layer; what a kind of value has no field for is the same for all of its values.

    Attributes:
        kind: what it is in the vocabulary of `shardlab.program`.
        layer, layers: which layer, and how many the network has.
        step: how often it was updated.
        batches, total_batches: its microbatches, and how many there are.
        shards, total: which of so many shards of the layer it holds.
    """

    kind: ClassVar[Kind]
    layer: int
    layers: int
    step: int = 0
    batches: Set[int] = frozenset()
    total_batches: int = 0
    shards: Set[int] = ONE
    total: int = 1

    def __post_init__(self) -> None:
        for name in ("shards", "batches"):
            given = getattr(self, name)
            try:
                numbers = frozenset(map(index, given))
            except TypeError:
                numbers = frozenset({-1})
            if min(numbers, default=0) < 0:
                self._refuse(f"{name} are {given!r}", "give a collection of numbers, which count from 0")
            object.__setattr__(self, name, numbers)
        if not self.shards or max(self.shards) >= self.total:
            given = f"shards {sorted(self.shards)} of {self.total}"
            self._refuse(f"{given} were given", "give at least one shard, counted from 0")

    def _refuse(self, given: str, remedy: str) -> None:
        about = About(f"{type(self).__name__} of layer {self.layer}", self.layer)
        with judged():
            raise Refused("unknown slice", about, given, remedy)

    @cached_property
    def spec(self) -> Spec:
        """What is known of the value, in the terms of `shardlab.program`."""
        layer = self.layer + (self.kind is Kind.GRAD_ACTIVATION)
        holds = Holds(mask_of(self.shards), self.total)
        return Spec(form_of(self.kind, layer, self.step, Space(self.total_batches), holds), mask_of(self.batches))

    def memory(self) -> float:
        """Elements that it takes."""
        if self.kind in ROW_KINDS:
            return len(self.batches) * PUZZLE_HIDDEN * PUZZLE_LENGTH
        return (len(self.shards) / self.total) * PUZZLE_HIDDEN * PUZZLE_HIDDEN

    def draw(self) -> Picture:
        """The network with this value filled in."""
        return draw_group({0: self})

    def _repr_svg_(self) -> str:
        return self.draw().svg

    def _key(self) -> tuple[object, ...]:
        form = self.spec.form
        return self.layers, self.spec._replace(form=form.but(holds=form.holds.simplified()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PuzzleValue) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


class Sharded(PuzzleValue):
    """A value that can be cut into shards and put together again: a weight, an optimizer state, a weight gradient."""

    def is_complete(self) -> bool:
        """Whether every shard of the layer is here."""
        return len(self.shards) == self.total

    def combine(self, other: Self) -> Self:
        """Put both together: the shards of either.

        Raises:
            PuzzleRefused: if they are not pieces of one value.
        """
        with judged():
            op = self.spec.about("combine")
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
                raise Refused("partial", self.spec.about("shard"), f"{self.spec} is partial", "cut a complete value")
            return derived(self.holding(Holds(mask_of([shard]), total)), self)

    def holding(self, holds: Holds) -> Self:
        """Copy the value with other slices of the layer."""
        return replace(cast(Any, self), shards=frozenset(bits(holds.mask)), total=holds.of)


@dataclass(frozen=True, eq=False)
class Parameters(Sharded):
    """What a layer's parameters are, or the optimizer keeps for them, or some shards of it."""

    layer: int
    layers: int
    step: int = field()
    shards: Set[int] = ONE
    total: int = 1


class Weight(Parameters):
    """The weight of one layer, or some shards of it; `step` counts its updates."""

    kind = Kind.WEIGHT


class OptState(Parameters):
    """What the optimizer keeps for one layer, or some shards of it; `step` counts its updates."""

    kind = Kind.OPT_STATE


@dataclass(frozen=True, eq=False)
class WeightGrad(Sharded):
    """The gradient of one layer's weight, or some shards of it, with the microbatches summed into it."""

    kind = Kind.GRAD_WEIGHT
    layer: int
    layers: int
    batches: Set[int] = field()
    total_batches: int = field()
    shards: Set[int] = ONE
    total: int = 1

    def __add__(self, other: WeightGrad) -> WeightGrad:
        """The sum of two gradients of one layer and slice, of different microbatches.

        Raises:
            PuzzleRefused: also when a microbatch would be counted twice.
        """
        if not isinstance(other, WeightGrad):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        with judged():
            total = self.summing(sums.add_two(self.spec, other.spec))
        return derived(total, self, other)

    def summing(self, spec: Spec) -> WeightGrad:
        """Copy the gradient with the microbatches of `spec` added."""
        return replace(self, batches=frozenset(bits(spec.cells)))


@dataclass(frozen=True, eq=False)
class Rows(PuzzleValue):
    """A value of some microbatches."""

    layer: int
    layers: int
    batches: Set[int] = field()
    total_batches: int = field()


class Activation(Rows):
    """Activation l, which enters layer l, for some microbatches."""

    kind = Kind.ACTIVATION


class ActivationGrad(Rows):
    """The gradient of activation l, for some microbatches. Its `layer` is l - 1, whose backward pass it enters."""

    kind = Kind.GRAD_ACTIVATION


def draw_group(group: Mapping[Any, PuzzleValue]) -> Picture:
    """All values of a store, laid over the network that they belong to."""
    values = group.values()
    layers = max((max(value.layers, value.layer + 1) for value in values), default=1)
    batches = max((value.total_batches for value in values), default=1)
    elements = sum(value.memory() for value in values)
    return network_picture([value.spec for value in values], layers, max(batches, 1), elements)

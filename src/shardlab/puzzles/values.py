"""The puzzles' five kinds of value. Each knows what it holds and what it sums (`spec`); none carries data.

Shards and microbatches may be given as any collection of numbers. Values never change, and two that hold the same
slices are equal, however many shards they are counted in.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from shardlab.program import Kind, Spec
from shardlab.puzzles.pieces import ONE, Rows, Sharded, Value
from shardlab.puzzles.refusal import derived, judged
from shardlab.rules import update
from shardlab.rules.pieces import bits, mask_of
from shardlab.rules.spec import Space, form_of

__all__ = ["Activation", "ActivationGrad", "OptState", "Rows", "Sharded", "Value", "Weight", "WeightGrad"]


@dataclass(frozen=True, eq=False)
class Weight(Sharded):
    """The weight of one layer, or some shards of it; `step` counts its updates."""

    layer: int
    layers: int
    step: int
    shards: Set[int] = ONE
    total: int = 1

    def _spec(self) -> Spec:
        return Spec(form_of(Kind.WEIGHT, self.layer, self.step, Space(0), self.holds))


@dataclass(frozen=True, eq=False)
class OptState(Sharded):
    """What the optimizer keeps for one layer, or some shards of it; `step` counts its updates."""

    layer: int
    layers: int
    step: int
    shards: Set[int] = ONE
    total: int = 1

    def _spec(self) -> Spec:
        return Spec(form_of(Kind.OPT_STATE, self.layer, self.step, Space(0), self.holds))


@dataclass(frozen=True, eq=False)
class WeightGrad(Sharded):
    """The gradient of one layer's weight, or some shards of it, with the microbatches summed into it."""

    layer: int
    layers: int
    batches: Set[int]
    total_batches: int
    shards: Set[int] = ONE
    total: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keep("batches", self.batches)

    def _spec(self) -> Spec:
        return Spec(
            form_of(Kind.GRAD_WEIGHT, self.layer, 0, Space(self.total_batches), self.holds), mask_of(self.batches)
        )

    def __add__(self, other: WeightGrad) -> WeightGrad:
        """The sum of two gradients of one layer and slice, of different microbatches.

        Raises:
            PuzzleRefused: also when a microbatch would be counted twice.
        """
        if not isinstance(other, WeightGrad):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        with judged():
            total = self.summing(update.add_two(self.spec, other.spec))
        return derived(total, self, other)

    def summing(self, spec: Spec) -> WeightGrad:
        """The same gradient with the microbatches of `spec` in it."""
        batches = frozenset(bits(spec.cells))
        return WeightGrad(self.layer, self.layers, batches, self.total_batches, self.shards, self.total)


@dataclass(frozen=True, eq=False)
class Activation(Rows):
    """Activation l, which enters layer l, for some microbatches."""

    layer: int
    layers: int
    batches: Set[int]
    total_batches: int

    def _spec(self) -> Spec:
        return Spec(form_of(Kind.ACTIVATION, self.layer, 0, Space(self.total_batches)), mask_of(self.batches))


@dataclass(frozen=True, eq=False)
class ActivationGrad(Rows):
    """The gradient of activation l, for some microbatches. Its `layer` is l - 1, whose backward pass it enters."""

    layer: int
    layers: int
    batches: Set[int]
    total_batches: int

    def _spec(self) -> Spec:
        return Spec(form_of(Kind.GRAD_ACTIVATION, self.layer + 1, 0, Space(self.total_batches)), mask_of(self.batches))

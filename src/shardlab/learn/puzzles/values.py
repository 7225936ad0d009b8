"""The puzzles' five kinds of value. A value has a spec, which says what it holds and sums (docs/glossary.md), but no
data.

Shards and microbatches may be given as any collection of numbers. Values are immutable. Values with the same slices are
equal, even if their numbers of shards differ: shard 0 of 2 equals shards 0 and 1 of 4. The functions after the classes
are rules of the puzzles that are more lenient than `shardlab.language.rules`, so that published solutions run. A
`Picture` is drawn when a notebook first shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Any, ClassVar, Self, cast

from shardlab.common.errors import About, Refused, about_layer
from shardlab.common.files import write_atomically
from shardlab.common.text import listed, plural
from shardlab.language import Holds, Kind, Spec
from shardlab.language.rules import arithmetic
from shardlab.language.rules import optimizer_step as steps
from shardlab.language.rules.kinds import ROW_KINDS, bits, in_equal_pieces, mask_of, microbatches_text
from shardlab.language.rules.spec import Space, form_of, missing_text
from shardlab.language.sizes import PUZZLE_HIDDEN, PUZZLE_LENGTH
from shardlab.learn.puzzles.calls import record_derived, translate_refusals
from shardlab.simulate.timeline import Timeline

ONE: frozenset[int] = frozenset({0})


class PuzzleValue:
    """Value of one layer. A field that a kind of value does not use keeps its default.

    Attributes:
        kind: kind of the value in `shardlab.language`.
        layer, layers: number of the layer, and number of layers of the network.
        step: number of updates so far.
        batches, total_batches: microbatches of the value (for a weight's gradient, those summed into it), and number of
            microbatches of the step.
        shards, total: shards of the layer that the value has, and number of shards of the whole layer.
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
            value = getattr(self, name)
            try:
                numbers = frozenset(map(index, value))
            except TypeError:
                numbers = frozenset({-1})
            if min(numbers, default=0) < 0:
                self._refuse(f"{name} are {value!r}", "give a collection of numbers, which count from 0")
            object.__setattr__(self, name, numbers)
        if not self.shards or max(self.shards) >= self.total:
            text = f"shards {sorted(self.shards)} of {self.total}"
            self._refuse(f"{text} were given", "give at least one shard, counted from 0")

    @cached_property
    def spec(self) -> Spec:
        """Spec of the value in `shardlab.language`."""
        layer = self.layer + (self.kind is Kind.GRAD_ACTIVATION)
        holds = Holds(mask_of(self.shards), self.total)
        return Spec(form_of(self.kind, layer, self.step, Space(self.total_batches), holds), mask_of(self.batches))

    def memory(self) -> float:
        """Return the number of elements."""
        if self.kind in ROW_KINDS:
            return len(self.batches) * PUZZLE_HIDDEN * PUZZLE_LENGTH
        return (len(self.shards) / self.total) * PUZZLE_HIDDEN * PUZZLE_HIDDEN

    def draw(self) -> Picture:
        """Return a picture of the network with this value filled in."""
        return draw_group({0: self})

    def _repr_svg_(self) -> str:
        return self.draw().svg

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PuzzleValue) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _refuse(self, problem: str, remedy: str) -> None:
        about = About(f"{type(self).__name__} of layer {self.layer}", self.layer)
        with translate_refusals():
            raise Refused("unknown slice", about, problem, remedy)

    def _key(self) -> tuple[object, ...]:
        form = self.spec.form
        return self.layers, self.spec._replace(form=form.but(holds=form.holds.simplified()))


class Sharded(PuzzleValue):
    """Value that can be split into shards and combined again: a weight, an optimizer state, a weight gradient."""

    def is_complete(self) -> bool:
        """Return whether it has every shard of the layer."""
        return len(self.shards) == self.total

    def combine(self, other: Self) -> Self:
        """Return the value with the shards of both.

        Raises:
            PuzzleRefused: if they are not pieces of one value.
        """
        with translate_refusals():
            op = self.spec.about("combine")
            specs = [self.spec, spec_of(op, "other value", other)]
            whole = self.with_holds(gather(op, specs, ["the first value", "the second value"]).holds)
        return record_derived(whole, self, other)

    def shard(self, shard: int, total: int) -> Self:
        """Return piece `shard` of `total` equal pieces.

        Raises:
            PuzzleRefused: if the value is not complete, or the piece does not exist.
        """
        with translate_refusals():
            if not self.is_complete():
                raise Refused("partial", self.spec.about("shard"), f"{self.spec} is partial", "cut a complete value")
            return record_derived(self.with_holds(Holds(mask_of([shard]), total)), self)

    def with_holds(self, holds: Holds) -> Self:
        """Return a copy of the value with other slices of the layer."""
        return replace(cast(Any, self), shards=frozenset(bits(holds.mask)), total=holds.of)


@dataclass(frozen=True, eq=False)
class Parameters(Sharded):
    """Value with the layout of a layer's parameters: the weight or the optimizer state, or some shards."""

    layer: int
    layers: int
    step: int = field()
    shards: Set[int] = ONE
    total: int = 1


class Weight(Parameters):
    """Weight of one layer, or some shards of it. `step` counts its updates."""

    kind = Kind.WEIGHT


class OptState(Parameters):
    """Optimizer state of one layer, or some shards of it. `step` counts its updates."""

    kind = Kind.OPT_STATE


@dataclass(frozen=True, eq=False)
class WeightGrad(Sharded):
    """Gradient of one layer's weight, or some shards of it, with the microbatches summed into it."""

    kind = Kind.GRAD_WEIGHT
    layer: int
    layers: int
    batches: Set[int] = field()
    total_batches: int = field()
    shards: Set[int] = ONE
    total: int = 1

    def __add__(self, other: WeightGrad) -> WeightGrad:
        """Return the sum of two gradients of the same layer and slice over different microbatches.

        Raises:
            PuzzleRefused: if they do not match, or a microbatch would be counted twice.
        """
        if not isinstance(other, WeightGrad):  # pyright: ignore[reportUnnecessaryIsInstance]
            return NotImplemented
        with translate_refusals():
            total = self.with_microbatches(arithmetic.add_two(self.spec, other.spec))
        return record_derived(total, self, other)

    def with_microbatches(self, spec: Spec) -> WeightGrad:
        """Return a copy of the gradient with the microbatches of `spec` instead of its own."""
        return replace(self, batches=frozenset(bits(spec.cells)))


@dataclass(frozen=True, eq=False)
class Rows(PuzzleValue):
    """Value of some microbatches."""

    layer: int
    layers: int
    batches: Set[int] = field()
    total_batches: int = field()


class Activation(Rows):
    """Activation l, the input of layer l, for some microbatches."""

    kind = Kind.ACTIVATION


class ActivationGrad(Rows):
    """Gradient of activation l, for some microbatches. Its `layer` is l - 1, whose backward pass reads it."""

    kind = Kind.GRAD_ACTIVATION


def draw_group(group: Mapping[Any, PuzzleValue]) -> Picture:
    """Return a picture of all values of a store in their network."""
    values = group.values()
    layers = max((max(value.layers, value.layer + 1) for value in values), default=1)
    batches = max((value.total_batches for value in values), default=1)
    elements = sum(value.memory() for value in values)
    return network_picture([value.spec for value in values], layers, max(batches, 1), elements)


def spec_of(op: About, name: str, value: Any) -> Spec:
    """Return the spec of a value, and refuse any other object."""
    spec = getattr(value, "spec", None)
    if not isinstance(spec, Spec):
        raise Refused("no value", op, f"the {name} given is {value!r}", "give a value of the puzzles")
    return spec


def gather(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the spec of the combined pieces of one value. Replicas are accepted, and pieces need not be adjacent.

    Args:
        op: the op, for a refusal.
        specs: specs of the pieces.
        names: names of the pieces, for a refusal.
    """
    first = specs[0]
    holds = first.holds
    for spec, name in zip(specs, names, strict=True):
        if spec.kind in ROW_KINDS:
            problem = f"{name} gave {spec}, and activations are not cut into shards"
            raise Refused("wrong kind", op, problem, "put weights, optimizer states and their gradients together")
        if spec.form.but(holds=first.holds) is not first.form or spec.cells != first.cells:
            requirement = "of one value" if spec.cells == first.cells else "that sum the same microbatches"
            problem = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, problem, f"put pieces {requirement} together")
        combined, piece = in_equal_pieces(holds, spec.holds)
        holds = Holds(combined.mask | piece.mask, combined.of)
    return first._replace(form=first.form.but(holds=holds))


def update(layer: int, gradient: Spec, weight: Spec, state: Spec) -> None:
    """Refuse an update without the whole batch. The optimizer state may hold more slices than the weight."""
    step = steps.full_sum(gradient.form)
    surplus = gradient.cells & ~step
    if surplus and gradient.layer == layer:
        problem = f"{gradient} has {microbatches_text(surplus)} in it"
        remedy = f"the step's microbatches are {listed(bits(step))}, sum these"
        raise Refused("unknown microbatch", about_layer("update", layer), problem, remedy)
    if state.layer == weight.layer == layer and not state.holds.contains(weight.holds):
        problem = f"the weight holds {weight.holds.slices_text}, but the optimizer state only {state.holds}"
        raise Refused("missing slices", about_layer("update", layer), problem, "give the state of the same slices")
    if gradient.holds.contains(state.holds):
        state = state._replace(form=state.form.but(holds=weight.holds))
    steps.update(layer, gradient, weight, state)


def refuse_stale(op: About, weight: Spec, updated: Mapping[int, Holds]) -> None:
    """Refuse an old weight after this rank has updated some of its slices."""
    if weight.kind is Kind.WEIGHT and weight.step == 0 and weight.layer in updated:
        updated_slices, weight_slices = in_equal_pieces(updated[weight.layer], weight.holds)
        stale = updated_slices.mask & weight_slices.mask
        if stale:
            problem = (
                f"the weight given is {weight}, a stale copy; slice {listed(bits(stale))} of {updated_slices.of} was "
                "already updated on this rank"
            )
            remedy = "finish every use of a weight before its update; a new Model starts a new run"
            raise Refused("stale weight", op, problem, remedy)


def require_one_update(layer: int, weights: Mapping[int, Any]) -> None:
    """Refuse a layer's final weights (`weights`, by rank) if they lack slices or were not updated exactly once."""
    op = About("Model.check", layer)
    if not weights:
        problem = f"no rank has set the final weight of layer {layer}"
        raise Refused("not kept", op, problem, "call set_final_weight")
    specs: list[Spec] = []
    for rank, weight in weights.items():
        spec = spec_of(op, f"final weight of layer {layer} on rank {rank}", weight)
        if spec.layer != layer or spec.step != 1:
            final = f"rank {rank}'s final weight of layer {layer} is {spec}, of optimizer step {spec.step}"
            raise Refused("wrong step", op, final, f"give weights[{layer}] of step 1, updated exactly once")
        specs.append(spec)
    holds = gather(op, specs, [f"rank {rank}" for rank in weights]).holds
    if not holds.complete:
        missing = ~holds.mask & (1 << holds.of) - 1
        lacks = missing_text("slice", missing, f" of {holds.of}")
        partial = f"the final weights[{layer}] of {plural('rank', len(weights))} {listed(weights)} lack a part; {lacks}"
        raise Refused("missing slices", op, partial, "let some rank update it", missing=bits(missing))


class Picture:
    """SVG picture, which a notebook shows."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    @cached_property
    def svg(self) -> str:
        """The picture as an SVG document."""
        return self._make()

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write the SVG to a file."""
        write_atomically(Path(path), self.svg)


def timeline_picture(timeline: Timeline) -> Picture:
    """Return a picture with a row for each rank, and the memory of all ranks below."""

    def make() -> str:
        from shardlab.draw import timeline_svg

        return timeline_svg(timeline)

    return Picture(make)


def network_picture(specs: Sequence[Spec], layers: int, batches: int, elements: float) -> Picture:
    """Return a picture of values in a network with these numbers of layers and microbatches."""

    def make() -> str:
        from shardlab.draw import network_svg

        title = str(specs[0]) if len(specs) == 1 else f"{len(specs)} values"
        return network_svg(specs, layers, batches, title, f"{elements:,.0f} elements")

    return Picture(make)

"""Runner that follows a rank's schedule on a compressed rank.

`CompressedRunner` is a `PlanRunner`: the order of gathers, passes, reductions and updates is that of traced programs.
It differs from the runner of traced programs in two ways. Layers' passes are taken from the sample; if a pass through a
stage gathers no weights and reduces no gradients, the passes of all its layers are joined to one measured pass. And a
step is given by a `StepKey` instead of a microbatch: the key has everything on which a step's time and memory depend,
except the rank's state before the step.

This file contains, in order: `CompressedRunner` with the passes of its layers; `StateSnapshots`, which captures the
state of a rank between two steps and restores it; `step_keys`, which turns a schedule into a sequence of keys.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, cast

from shardlab.language import Group, Kind, OpKind
from shardlab.simulate.predict.compressed.clocks import CompressedStep
from shardlab.simulate.predict.compressed.rank import BoundaryStore, CompressedRank, SizedHandle, SizedValue
from shardlab.simulate.predict.compressed.sample import (
    NO_PEAKS,
    Cuts,
    MeasuredPass,
    SizedPart,
    join_passes,
    with_more_bytes,
)
from shardlab.simulate.predict.compressed.short_model import Repetition
from shardlab.simulate.timeline.memory import NO_BYTES
from shardlab.strategies.plan.program import PlanRunner
from shardlab.strategies.plan.rank_plan import Keeps, RankPlan
from shardlab.strategies.plan.sharding import GradientReducer, ParameterGatherer, WeightUse, weight_uses
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import Message, Recv, Send, ShardedStep


class _Layers:
    """Passes of a compressed rank's layers, with the interface of `LayerRunner`."""

    def __init__(self, rank: CompressedRank, rank_plan: RankPlan) -> None:
        self.rank, self.sample = rank, rank.sample
        self.plan = rank_plan
        sizes = rank_plan.plan.mesh.sizes()
        self.slices = {l: math.prod(sizes[axis] for axis in w.cut_axes) for l, w in rank_plan.weights.items()}
        self.cuts = {l: block_cuts(rank_plan, l) for l in rank_plan.layers}
        self.shared_residuals = self.sample.shared_residuals(rank_plan)
        self.forwards: dict[tuple[int, Keeps, bool], MeasuredPass] = {}

    def pass_key(self, layer: int) -> tuple[Cuts, int, bool]:
        """Return (cuts of the layer's block, identical sample layer, whether its residual is in a saved value)."""
        return self.cuts[layer], self.sample.sample_layer[layer], layer in self.shared_residuals

    def pass_of(self, name: str, layer: int, *rest: object) -> MeasuredPass:
        """Return a measured pass of a layer. For a forward pass, `rest` is (`keeps`, `stores_outputs`)."""
        return self.sample.passes(self.cuts[layer]).by_key[name, self.sample.sample_layer[layer], *rest]

    def forward_of(self, layer: int, keeps: Keeps, stores_outputs: bool) -> MeasuredPass:
        """Return a layer's measured forward pass, corrected for the memory of its residual stream on this rank."""
        key = layer, keeps, stores_outputs
        measured_pass = self.forwards.get(key)
        if measured_pass is None:
            measured_pass = self.pass_of("forward", layer, keeps, stores_outputs)
            cuts, sample_layer, shared_residuals = self.pass_key(layer)
            extra_residuals = shared_residuals - (sample_layer in self.sample.sample_shared_residuals(cuts))
            if (
                extra_residuals and keeps == self.plan.layers[layer].keeps
            ):  # else this recomputes the layer, as in the sample
                residual = self.sample.boundary(Kind.RESIDUAL, layer)
                measured_pass = with_more_bytes(
                    measured_pass, extra_residuals * residual.held_bytes, residual.slot, during=keeps != "all"
                )
            self.forwards[key] = measured_pass
        return measured_pass

    async def forward(
        self, layer: int, m: int, weight: SizedValue, keeps: Keeps, *, stores_outputs: bool = True
    ) -> None:
        if self.rank.step_kind is Forward:  # else a backward pass recomputes the layer
            self.rank.enter("forward", layer)
        self.rank.apply_pass(self.forward_of(layer, keeps, stores_outputs), layer, weight)

    async def loss(self, m: int) -> None:
        last = len(self.rank.layers)
        self.rank.apply_pass(self.sample.passes().by_key["loss", self.sample.sample_layer[last]], last)

    async def backward(self, layer: int, m: int, weight: SizedValue) -> SizedValue:
        self.rank.enter("backward", layer)
        return self.with_gradient(self.pass_of("backward", layer), layer, weight)

    async def backward_input(self, layer: int, m: int, weight: SizedValue) -> None:
        self.rank.enter("backward_input", layer)
        self.rank.apply_pass(self.pass_of("backward_input", layer), layer, weight)

    def backward_weight(self, layer: int, m: int) -> SizedValue:
        self.rank.enter("backward_weight", layer)
        return self.with_gradient(self.pass_of("backward_weight", layer), layer, None)

    def discard(self, layer: int, m: int) -> None:
        """Fail: only frozen blocks discard activations, and `can_compress` rejects plans with such blocks."""
        raise NotImplementedError("plans with frozen blocks are replayed, not compressed")

    def gradient(self, layer: int) -> SizedValue:
        """Create the gradient that a layer's backward pass returns."""
        owner = self.plan.weight_of(layer)
        return self.rank.new_value(Kind.GRAD_WEIGHT, owner, of=self.slices.get(owner, 1))

    def accumulates(self, layer: int) -> bool:
        """Return whether the backward pass adds a layer's gradient to an older one in place."""
        weight = self.plan.weights.get(owner := self.plan.weight_of(layer))
        return weight is not None and not weight.reduce_every_microbatch and owner in self.rank.grad_weights

    def with_gradient(self, measured_pass: MeasuredPass, layer: int, weight: SizedValue | None) -> SizedValue:
        gradient = self.gradient(layer)
        if self.accumulates(layer):
            gradient.held_bytes = 0
        self.rank.apply_pass(measured_pass, layer, weight, gradient)
        return gradient


class CompressedRunner(PlanRunner[SizedValue]):
    """Runner of a plan's steps on a compressed rank.

    Args:
        rank: the rank.
        rank_plan: the rank's plan of the short model.

    Attributes:
        passes: passes of the rank's layers.
        compressed: the rank.
        key: key of the current step.
        uses: cache of the uses of weights in a pass and in the passes after it.
        stage_passes: by name and stage, the passes of all layers of a stage as one.
        counts: stages that reduce their gradients in their last backward pass, not in a step of the schedule.
        owners: by stage, the layers that own the weights of its layers, in the order of a backward pass.
    """

    def __init__(self, rank: CompressedRank, rank_plan: RankPlan) -> None:
        self.passes = _Layers(rank, rank_plan)
        super().__init__(rank, rank_plan, self.passes)
        rank.may_grow = self.may_grow
        if rank_plan.plan.reduce_at == "step":
            weights = rank_plan.weights.items()
            rank.first_axes = {l: weight.reduce_once[0] for l, weight in weights if weight.reduce_once}
        self.compressed = rank
        self.stage_passes: dict[tuple[str, int], MeasuredPass] = {}
        self.key = StepKey(None)
        self.uses: dict[Hashable, list[WeightUse]] = {}
        self.counts = {stage for stage, remaining in self.remaining.items() if remaining}
        self.owners = {
            stage: [rank_plan.weight_of(l) for l in reversed(rank_plan.stages[stage]) if l not in rank_plan.weightless]
            for stage in rank_plan.own_stages
        }

    def may_grow(self, reductions: Mapping[SizedHandle, object], added: int) -> bool:
        """Return whether reductions can stay in flight while further ones are started.

        They can if they reduce weight gradients, such as those of norms, and the reduction buffer has space for all of
        them and for the rank's largest weight that is reduced over the same axis.

        Args:
            reductions: the collectives in flight of one group and kind of value.
            added: number of collectives to add.
        """
        if any(handle.result is None or handle.result.kind is not Kind.GRAD_WEIGHT for handle in reductions):
            return False
        axis = next(iter(reductions)).group.axis
        weights = self.plan.weights
        largest = max(w.elements for w in weights.values() if axis in (*w.reduce_every_microbatch, *w.reduce_once))
        sizes = [(weights[h.result.layer].elements, h.repetition) for h in reductions if h.result]
        in_flight = sum(elements * (1 + repetition.repetitions if repetition else 1) for elements, repetition in sizes)
        return in_flight + added * max(elements for elements, _ in sizes) + largest <= self.plan.reduction_buffer

    @cached_property
    def snapshots(self) -> StateSnapshots:
        """Snapshots of this rank's state, created when its weights are loaded."""
        return StateSnapshots(self.compressed, self.weights, self.gradients)

    def run_step(self, key: StepKey) -> CompressedStep:
        """Run a step other than a message, or run the end of the schedule, and return the compressed step."""
        self.key, self.compressed.step_kind = key, key.kind
        coroutine = self.finish(key) if key.kind is None else self.step(self.step_for(key))
        try:
            coroutine.send(None)
        except StopIteration:
            return self.compressed.finish_step()
        raise AssertionError("a compressed rank never waits for other ranks")

    def step_for(self, key: StepKey) -> ShardedStep:
        """Create a step with this key, and tell the `ParameterGatherer` which weights it and later passes use."""
        kind, stage = key.kind, self.plan.own_stages[key.stage]
        if kind not in (Forward, Backward, BackwardInput, BackwardWeight):
            return cast(Any, kind)(stage)
        if stage in self.counts:
            self.remaining[stage] = 1 if key.last else 2
        step = cast(Any, kind)(stage, 0)
        if self.plan.gather_axes:
            upcoming = kind, stage, key.ahead, key.later_stages
            if upcoming not in self.uses:
                ahead = [*filter(None, key.ahead), *(UpcomingPass(place, True) for place in key.later_stages)]
                stages = self.plan.own_stages
                steps = [(Forward if p.forward else Backward)(stages[p.stage], 0) for p in ahead]
                self.uses[upcoming] = weight_uses(self.plan, [step, *steps])
            self.weights.set_uses(self.uses[upcoming])
        return step

    async def finish(self, key: StepKey) -> None:
        """Update the weights, and wait for all sends and collectives."""
        await self.gradients.update()
        self.wait_for_sends(key)
        self.compressed.wait_for_all()

    def message(self, key: StepKey) -> CompressedStep:
        """Run an action that sends or receives, and return its entries and its change of memory."""
        boundary = key.boundary
        assert boundary is not None
        self.wait_for_sends(key)
        layer, values = self.values(boundary, sends=key.kind is Send)
        if key.kind is Send:
            # a residual stream inside a saved value gets separate memory, since its message may end later
            for value in values if layer in self.passes.shared_residuals else ():
                if value.kind is Kind.RESIDUAL:
                    self.compressed.allocate(value)
                    self.compressed.record_peak(OpKind.SEND, layer)
            self.compressed.send(values, boundary.offset)
        else:
            self.compressed.receive(values, layer, boundary.offset)
        return self.compressed.finish_step()

    def wait_for_sends(self, key: StepKey) -> None:
        """Wait for earlier sends that must end before this step."""
        for boundary in key.awaited_sends:
            self.compressed.wait_sent(self.values(boundary, sends=True)[1], boundary.offset)

    async def receive(self, layer: int, m: int, *, forward: bool) -> None:
        if self.key.input_message is not None:
            boundary, turn = self.key.input_message
            layer, values = self.values(boundary, sends=False)
            self.compressed.wait_received(values, layer, boundary.offset, turn)

    def values(self, boundary: StageBoundary, *, sends: bool) -> tuple[int, list[SizedValue]]:
        """Return the first layer after a boundary between stages, and the values that cross the boundary."""
        layers = self.plan.stages[self.plan.own_stages[boundary.stage]]
        layer = layers.stop if boundary.forward is sends else layers.start
        stores = self.boundaries[layer, boundary.forward]
        return layer, [cast(BoundaryStore, store).value_at(layer) for store in stores]

    async def forward(self, stage: int, m: int) -> None:
        stage_pass = None if self.plan.gather_axes else self.stage_pass("forward", stage)
        if stage_pass is None:
            await super().forward(stage, m)
            return
        layers = self.plan.stages[stage]
        if stage == 0:
            self.compressed.load_batch([m], None)
        await self.receive(layers[0], m, forward=True)
        self.compressed.apply_pass(stage_pass, layers[0])

    async def backward(self, stage: int, m: int) -> None:
        stage_pass = self.adding_pass("backward", stage)
        if stage_pass is None:
            await super().backward(stage, m)
            return
        await self.gradient_of_output(stage, m)
        self.add_gradients(stage_pass, stage)
        if stage == 0:
            del self.rank.grad_activations[0, m]

    async def backward_input(self, stage: int, m: int) -> None:
        stage_pass = None if self.plan.gather_axes else self.stage_pass("backward_input", stage)
        if stage_pass is None:
            await super().backward_input(stage, m)
            return
        await self.gradient_of_output(stage, m)
        self.compressed.apply_pass(stage_pass, self.plan.stages[stage][0])
        if stage == 0:
            del self.rank.grad_activations[0, m]

    async def backward_weight(self, stage: int, m: int) -> None:
        stage_pass = self.adding_pass("backward_weight", stage)
        if stage_pass is None:
            await super().backward_weight(stage, m)
            return
        self.add_gradients(stage_pass, stage)

    def adding_pass(self, name: str, stage: int) -> MeasuredPass | None:
        """Return the passes of all layers of a stage as one, or None if they cannot be joined.

        They can if no weights are gathered, no gradients are reduced, and all gradients are stored or all are added.
        """
        owners, weights = self.owners[stage], self.plan.weights
        reduced = self.remaining[stage] == 1 or any(weights[owner].reduce_every_microbatch for owner in owners)
        if self.plan.gather_axes or reduced:
            return None
        stored = sum(owner in self.compressed.grad_weights for owner in set(owners))
        if stored == len(owners):
            return self.stage_pass(name, stage)
        return None if stored or len(set(owners)) < len(owners) else self.stage_pass(f"first {name}", stage)

    def add_gradients(self, stage_pass: MeasuredPass, stage: int) -> None:
        """Run the joined passes of a stage, and store the gradients of weights that had none."""
        rank = self.compressed
        rank.apply_pass(stage_pass, self.plan.stages[stage][0])
        for layer in self.owners[stage]:
            if layer not in rank.grad_weights:
                rank.grad_weights[layer] = self.passes.gradient(layer)
        self.remaining[stage] -= 1

    def stage_pass(self, name: str, stage: int) -> MeasuredPass:
        stage_pass = self.stage_passes.get((name, stage))
        if stage_pass is None:
            joined_passes, layers = self.compressed.sample.joined_passes, self.plan.stages[stage]
            model_gaps = self.compressed.model.gaps
            gaps = [(gap.next_layer - layers[0], gap.left_out) for gap in model_gaps if gap.next_layer in layers]
            key = (name, *map(self.passes.pass_key, layers), *gaps)
            stage_pass = joined_passes.get(key)
            if stage_pass is None:
                stage_pass = joined_passes[key] = join_passes(self.passes_of(name, layers))
            self.stage_passes[name, stage] = stage_pass
        return stage_pass

    def passes_of(self, name: str, layers: range) -> list[tuple[MeasuredPass, int]]:
        """Return the passes of one stage of the whole model, in order, each with a number.

        The number is to be added to the layers of the pass's memory peaks, which then count from the first layer of the
        stage. For each block that the short model leaves out, the list has a copy of the joined passes of one block.
        """
        forward, model = name == "forward", self.compressed.model
        passes: list[tuple[MeasuredPass, int]] = []
        block: list[tuple[MeasuredPass, int]] = []
        for l in layers if forward else reversed(layers):
            shift = model.whole_layer[l] - model.whole_layer[layers[0]] - l
            of_layer = [(measured_pass, layer + shift) for measured_pass, layer in self.passes_at(name, l)]
            passes += of_layer
            position = model.positions.get(l)
            if position is None or position.after_gap is forward:
                continue
            block += of_layer
            gap = position.gap
            if l == (gap.next_layer - 1 if forward else gap.next_layer):
                joined, distance = join_passes(block), gap.block_layers if forward else -gap.block_layers
                passes += [(joined, number * distance) for number in range(1, gap.left_out + 1)]
                block = []
        return passes

    def passes_at(self, name: str, l: int) -> Iterator[tuple[MeasuredPass, int]]:
        """Yield the passes that a stage runs for one layer, each with its layer: recomputed layers first.

        If `name` begins with "first", the passes store their gradients instead of adding them to older ones.
        """
        forward_of, sample, pass_name = self.passes.forward_of, self.compressed.sample, name.removeprefix("first ")
        if name == "forward":
            yield forward_of(l, self.plan.layers[l].keeps, True), l
            return
        if pass_name != "backward_weight":
            for recomputed in self.plan.layers[l].recompute:
                yield forward_of(recomputed, "all", recomputed != l), recomputed
        measured_pass = self.passes.pass_of(pass_name, l)
        if name == "backward_input" or l in self.plan.weightless:
            yield measured_pass, l
            return
        gradient = self.passes.gradient(l)
        if name != pass_name:
            key = name, self.passes.pass_key(l)
            if key not in sample.joined_passes:
                sample.joined_passes[key] = with_more_bytes(measured_pass, gradient.held_bytes, gradient.slot)
            yield sample.joined_passes[key], l
            return
        yield measured_pass, l
        if not sample.prices.adds_in_backward:
            seconds = sample.compute(OpKind.ADD, gradient.part)
            yield MeasuredPass(seconds, (), seconds, NO_BYTES, NO_PEAKS), l


ValueState = tuple[SizedPart, int, int, int, int, int, int, bool]
"""Part, layer, pieces, of, held_bytes, slot, keys and updated of a `SizedValue`."""

StorePlace = tuple[int, Hashable]
"""(number of the store, key) of a stored value."""


StoredValues = frozenset[tuple[int, Hashable, ValueState]]
"""(number of the store, key, state) of each stored value."""


class HandleState(NamedTuple):
    """State of a `SizedHandle` without times or absolute positions, so that the states after two steps can be equal.

    Attributes:
        kind: kind of the collective.
        group: the ranks that take part.
        ago: how many collectives of the group ago it was started (1: it is the latest).
        result: state of its output (None: the collective belongs to a measured pass).
        read: its input: the place in a store, or the state of a value that no store has (None: as for `result`).
        repetition: the repetition of which it is a part (None: it is not repeated).
    """

    kind: OpKind
    group: Group
    ago: int
    result: ValueState | None
    read: StorePlace | ValueState | None
    repetition: Repetition | None


class RankState(NamedTuple):
    """State of a rank between two steps: everything on which the next step depends besides the plan and the step's key.

    Attributes:
        values: values in stores. A rank's slices of weights and optimizer state are left out, since only the update
            changes them.
        under_way: outstanding collectives, in order.
        gathering, reducing: states of the `ParameterGatherer` and the `GradientReducer`, with handles as positions in
            `under_way`.
    """

    values: StoredValues
    under_way: tuple[HandleState, ...]
    gathering: Any
    reducing: Any


class StateSnapshots:
    """Snapshots of a rank's state between two steps, which can be restored."""

    def __init__(
        self, rank: CompressedRank, weights: ParameterGatherer[SizedValue], gradients: GradientReducer[SizedValue]
    ) -> None:
        self._rank, self._weights, self._gradients = rank, weights, gradients
        self._stores = (rank.weights, rank.grad_weights, rank.scalars)
        self._constant_keys = frozenset(rank.weights)
        self._values, self._values_at = self._stored(), rank.changes  # stored values after this number of changes

    def _stored(self) -> StoredValues:
        states = [
            (number, key, _state_of(value))
            for number, store in enumerate(self._stores)
            for key, value in store.items()
            if number or key not in self._constant_keys
        ]
        return frozenset(states)

    def capture(self) -> RankState:
        """Return the rank's present state."""
        rank = self._rank
        if rank.changes != self._values_at:
            self._values, self._values_at = self._stored(), rank.changes
        stores = enumerate(self._stores) if rank.outstanding else ()
        places = {id(value): (number, key) for number, store in stores for key, value in store.items()}
        under_way = tuple(
            [
                HandleState(
                    collective.kind,
                    collective.group,
                    rank.started[collective.group] - collective.number,
                    collective.result and _state_of(collective.result),
                    collective.read and (places.get(id(collective.read)) or _state_of(collective.read)),
                    collective.repetition,
                )
                for collective in rank.outstanding
            ]
        )
        numbers: dict[Any, int] = {handle: number for number, handle in enumerate(rank.outstanding)}
        number_of = numbers.__getitem__
        return RankState(self._values, under_way, self._weights.state(number_of), self._gradients.state(number_of))

    def restore(self, state: RankState) -> None:
        """Set the rank to a state that it had before."""
        rank = self._rank

        def restored(saved_state: ValueState) -> SizedValue:
            value = SizedValue(rank, *saved_state[:4])
            value.held_bytes, value.slot, value.keys, value.updated = saved_state[4:]
            return value

        for handle in rank.outstanding:
            if handle.read is not None:
                handle.read.reading = ()
        for number, store in enumerate(self._stores):
            store.reset({key: value for key, value in store.items() if not number and key in self._constant_keys})
        for number, key, saved_state in state.values:
            self._stores[number].put(key, restored(saved_state))
        self._values, self._values_at = state.values, rank.changes
        rank.outstanding.clear()
        rank.open.clear()
        rank.started.clear()
        for saved_state in state.under_way:
            rank.started[saved_state.group] = max(rank.started[saved_state.group], saved_state.ago)
        for saved_state in state.under_way:
            read, result = saved_state.read, saved_state.result and restored(saved_state.result)
            value = read and (self._stores[read[0]][read[1]] if len(read) == 2 else restored(read))
            handle = SizedHandle(
                rank,
                saved_state.kind,
                saved_state.group,
                rank.started[saved_state.group] - saved_state.ago,
                result,
                value,
            )
            handle.repetition = saved_state.repetition
            rank.register(handle)
        handles: list[Any] = list(rank.outstanding)
        self._weights.restore(state.gathering, handles.__getitem__)
        self._gradients.restore(state.reducing, handles.__getitem__)


def _state_of(value: SizedValue) -> ValueState:
    return value.part, value.layer, value.pieces, value.of, value.held_bytes, value.slot, value.keys, value.updated


PASS_STEPS = (Forward, Backward, BackwardInput)
"""Types of steps that compute with weights."""


class StageBoundary(NamedTuple):
    """Boundary of a pipeline stage that a message crosses.

    Attributes:
        stage: position of the stage among the rank's stages.
        forward: whether activations (and not gradients) cross it.
        offset: position of the peer in the pipeline, relative to this rank.
    """

    stage: int
    forward: bool
    offset: int


class UpcomingPass(NamedTuple):
    """Later pass for which weights may be gathered ahead, with the position of its stage among the rank's stages."""

    stage: int
    forward: bool


Lookahead = tuple[tuple[UpcomingPass | None, UpcomingPass | None], frozenset[int]]
"""`ahead` and `later_stages` of a `StepKey`."""

NO_LOOKAHEAD: Lookahead = ((None, None), frozenset())


class StepKey(NamedTuple):
    """Key of a step: everything on which its time and memory depend, except the rank's state before it.

    Steps of different microbatches, and of different ranks of one kind, have equal keys if they do the same work.

    Attributes:
        kind: type of the step (None: the end of the schedule).
        stage: position of the stage among the rank's stages.
        boundary: boundary that a message crosses (None: the step is not a message).
        awaited_sends: earlier sends for which the step waits.
        input_message: for a pass whose input another rank sends, the boundary that this message crosses, and the
            position of the message among those not yet awaited.
        last: whether the pass computes the last weight gradient of its stage.
        ahead: the next pass, and the next pass of another stage. Both are None if the rank gathers no weights ahead.
        later_stages: stages that still have passes after this one. It is empty if the rank gathers no weights ahead.
    """

    kind: type | None
    stage: int = 0
    boundary: StageBoundary | None = None
    awaited_sends: tuple[StageBoundary, ...] = ()
    input_message: tuple[StageBoundary, int] | None = None
    last: bool = False
    ahead: tuple[UpcomingPass | None, UpcomingPass | None] = (None, None)
    later_stages: frozenset[int] = frozenset()


class KeySequence(NamedTuple):
    """Step keys of a rank's schedule.

    Attributes:
        keys: the different keys.
        order: for each step, the position of its key in `keys`.
    """

    keys: Sequence[StepKey]
    order: Sequence[int]


MOST_SEQUENCES = 1024
"""Largest number of cached sequences. Many plans of a search have equal schedules."""

_SEQUENCES: dict[Hashable, tuple[Sequence[ShardedStep], KeySequence]] = {}
"""Steps and their keys, by the `id` of the steps (which stay alive here) and the other arguments of `step_keys`."""


def step_keys(
    steps: Sequence[ShardedStep], own_stages: Sequence[int], rank_place: int, *, gathers: bool
) -> KeySequence:
    """Return the keys of a rank's steps, and of the end of its schedule.

    Args:
        steps: the rank's steps in order.
        own_stages: stages of the rank.
        rank_place: position of the rank in the pipeline.
        gathers: whether the rank gathers weights ahead of their use.
    """
    key = id(steps), tuple(own_stages), rank_place, gathers
    if key not in _SEQUENCES:
        if len(_SEQUENCES) == MOST_SEQUENCES:
            _SEQUENCES.clear()
        _SEQUENCES[key] = steps, _key_sequence(steps, own_stages, rank_place, gathers=gathers)
    return _SEQUENCES[key][1]


def _key_sequence(
    steps: Sequence[ShardedStep], own_stages: Sequence[int], rank_place: int, *, gathers: bool
) -> KeySequence:
    places = {stage: place for place, stage in enumerate(own_stages)}
    last = {step.stage: index for index, step in enumerate(steps) if isinstance(step, (Backward, BackwardWeight))}
    ahead = _ahead(steps, places) if gathers else {}
    boundaries: dict[tuple[int, bool, int], StageBoundary] = {}
    receives: dict[tuple[int, bool], list[tuple[int, StageBoundary]]] = defaultdict(list)
    sends: dict[int, StageBoundary] = {}
    # A step is first looked up by the few values that determine its key, since keys take long to create.
    numbers: dict[Hashable, int] = {}
    keys: list[StepKey] = []
    order: list[int] = []
    for index, step in enumerate(steps):
        kind, stage, boundary, earlier_send, turn, is_last = type(step), places[step.stage], None, None, -1, False
        lookahead = NO_LOOKAHEAD
        if isinstance(step, Message):
            place = stage, step.forward, step.peer
            boundary = boundaries.get(place)
            if boundary is None:
                boundary = boundaries[place] = StageBoundary(stage, step.forward, step.peer - rank_place)
            if kind is Recv:
                receives[stage, step.forward].append((step.microbatch, boundary))
            else:
                earlier_send, sends[step.peer] = sends.get(step.peer), boundary
        else:
            is_last = last.get(step.stage) == index
            if isinstance(step, PASS_STEPS):
                unawaited, m = receives[stage, kind is Forward], step.microbatch
                for place, (microbatch, _) in enumerate(unawaited):
                    if microbatch == m:
                        boundary, turn = unawaited.pop(place)[1], place
                        break
                lookahead = ahead.get(index, NO_LOOKAHEAD)
        lookup_key = kind, stage, id(boundary), id(earlier_send), turn, is_last, lookahead if gathers else None
        number = numbers.get(lookup_key)
        if number is None:
            number = numbers[lookup_key] = len(keys)
            input_message = None if boundary is None or turn < 0 else (boundary, turn)
            awaited_sends = () if earlier_send is None else (earlier_send,)
            keys.append(
                StepKey(kind, stage, boundary if turn < 0 else None, awaited_sends, input_message, is_last, *lookahead)
            )
        order.append(number)
    keys.append(StepKey(None, awaited_sends=tuple(sends.values())))
    return KeySequence(keys, [*order, len(keys) - 1])


def _ahead(steps: Sequence[ShardedStep], places: dict[int, int]) -> dict[int, Lookahead]:
    """Map the index of each pass in `steps` to the passes after it. `places` has the position of each stage."""
    lookaheads: dict[int, Lookahead] = {}
    next_pass: UpcomingPass | None = None
    other_stage: UpcomingPass | None = None
    later_stages: frozenset[int] = frozenset()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if isinstance(step, PASS_STEPS):
            this_pass = UpcomingPass(places[step.stage], isinstance(step, Forward))
            if next_pass is not None and next_pass.stage != this_pass.stage:
                other_stage = next_pass
            lookaheads[index] = (next_pass, other_stage), later_stages
            next_pass = this_pass
            later_stages |= {this_pass.stage}
    return lookaheads


def block_cuts(plan: RankPlan, layer: int) -> Cuts:
    """Return the `Cuts` of a layer's block. If all blocks are recomputed, layers outside blocks have the cuts ()."""
    if plan.layers[layer].keeps == "all":
        return None if plan.plan.recompute != "full" else ()
    blocks = plan.model.recomputable
    block = blocks[bisect_right(blocks, layer, key=lambda block: block.start) - 1]
    return tuple(stage[0] - block[0] for stage in plan.stages if block[0] < stage[0] <= block[-1])

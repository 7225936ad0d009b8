"""A rank that records the seconds and bytes of a step instead of ops.

`CompressedRank` has the verbs of a traced rank (`PlanRank`), so the code that gathers weights, reduces gradients and
updates runs on it unchanged. A verb adds the op's seconds to the entries of the current step, and adds or subtracts the
bytes of its values. The passes of layers are not run: `apply_pass` adds a pass that was measured on the sample.

This file contains, in order: `StepRecorder` with the entries and bytes of the current step, `CompressedRank` with the
verbs, and the values, handles and stores. As on a traced rank (`shardlab.language.values`), a value lives until its
last store key is deleted and no collective reads it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Any

from shardlab.language import Group, Kind, Mesh, OpKind
from shardlab.language.mesh import group_among
from shardlab.simulate.predict.compressed.clocks import (
    AwaitCollective,
    AwaitMessage,
    CompressedStep,
    Compute,
    Entry,
    Exposed,
    Interval,
    LocalCollective,
    PostMessage,
    Rendezvous,
    Route,
)
from shardlab.simulate.predict.compressed.sample import MeasuredPass, PricedSample, SizedPart
from shardlab.simulate.predict.compressed.short_model import (
    NotPeriodicError,
    Position,
    Repetition,
    ShortModel,
    StepSegment,
    extend_step,
)
from shardlab.simulate.timeline.memory import CATEGORIES, Category, MemoryLedger


class StepRecorder(MemoryLedger):
    """Recorder of a rank's current step: the entries and the memory ledger of the current segment.

    Args:
        model: the short model that the rank follows. A step is cut into segments beside the model's gaps.

    Attributes:
        entries: entries of the current segment, in order.
        outstanding: collectives that the rank has not awaited, in the order of their start.
        started: by group, the number of collectives that the rank has started.
        may_grow: function that returns whether reductions can stay in flight while others start (see
            `CompressedRunner`).
    """

    def __init__(self, model: ShortModel) -> None:
        self.model, self.positions = model, model.positions
        self.started = Counter[Group]()
        self.outstanding: dict[SizedHandle, None] = {}
        self.may_grow: Callable[[Mapping[SizedHandle, object], int], bool] = lambda _handles, _added: False
        self._begin_step()

    def _begin_step(self) -> None:
        self._segments: list[StepSegment] = []
        self._loop: Hashable = None
        self._position: Position | None = None
        self._entered: tuple[InFlight, Counter[Group]] | None = None
        self._landing: Repetition | None = None
        self._landed = 0
        self._begin()

    def _begin(self) -> None:
        self.entries: list[Entry] = []
        MemoryLedger.__init__(self)

    def finish_step(self) -> CompressedStep:
        """Return the recorded step, extended to the whole model, and begin to record the next step.

        Raises:
            NotPeriodicError: if the step cannot be extended to that of the whole model.
        """
        if self._entered is not None or self._landing is not None:
            raise NotPeriodicError
        self._end_segment()
        segments = self._segments
        self._begin_step()
        return extend_step(segments)

    def enter(self, loop: Hashable, layer: int) -> None:
        """Begin a new segment if a loop over layers reaches or leaves a block beside a gap.

        The loop reaches the two blocks beside a gap one after the other. The segment of the first of them is repeated
        for the missing blocks.

        Args:
            loop: name of the loop.
            layer: layer of the short model that the loop has reached.

        Raises:
            NotPeriodicError: if different collectives are in flight at the start of the two blocks, or if the loop
                skips one of them.
        """
        if self._landing is not None:
            self._end_landing()
        position = self.positions.get(layer)
        if position is self._position and (position is None or loop == self._loop):
            return
        self._end_segment()
        if self._entered is not None:
            assert self._position is not None
            gap, after_gap = self._position
            if position is None or position != Position(gap, not after_gap) or loop != self._loop:
                raise NotPeriodicError
            self._repeat(
                *self._entered,
                self._in_flight(position),
                gap.left_out,
                -gap.block_layers if after_gap else gap.block_layers,
            )
            self._entered = None
        elif position is not None:
            self._entered = self._in_flight(position), self.started.copy()
        self._loop, self._position = loop, position

    def _end_segment(self) -> None:
        self._segments.append(StepSegment(CompressedStep(self.entries, self.change)))
        self._begin()

    def _in_flight(self, position: Position) -> InFlight:
        """Return the collectives in flight by group and kind of value, each with its state relative to a block."""
        first = position.gap.next_layer - (0 if position.after_gap else position.gap.block_layers)
        in_flight: InFlight = defaultdict(dict)
        for handle in self.outstanding:
            in_flight[handle.group, handle.result and handle.result.kind][handle] = handle.relative_to(first)
        return in_flight

    def _repeat(
        self, previous: InFlight, started: Counter[Group], in_flight: InFlight, times: int, distance: int
    ) -> None:
        """Repeat the last segment, and count the collectives that its repetitions start.

        For each group and kind of value, the collectives in flight must meet one of three conditions: they are the same
        before and after the segment; they are in the same state relative to the block; or the segment only adds
        collectives, and all of them are awaited after the last block.

        Raises:
            NotPeriodicError: if none of the conditions holds.
        """
        started = self.started - started
        for queue in previous.keys() | in_flight.keys():
            old, new = previous[queue], in_flight[queue]
            if list(old.values()) == list(new.values()):
                for handle in new:
                    handle.number += times * started[handle.group]
            elif old and old.keys() < new.keys() and self.may_grow(new, times * (len(new) - len(old))):
                added = [handle for handle in new if handle not in old]
                repetition = Repetition(times, distance, started[added[0].group], len(added))
                for handle in added:
                    handle.repetition = repetition
            elif old.keys() != new.keys():
                raise NotPeriodicError
        self._repeat_segment(times, distance, started)

    def _repeat_segment(self, repetitions: int, distance: int, started: Counter[Group]) -> None:
        """Repeat the last segment. It has started the collectives `started`, counted by group."""
        for group, number in started.items():
            self.started[group] += repetitions * number
        self._segments[-1] = StepSegment(self._segments[-1].step, repetitions, distance, started)

    def _land(self, repetition: Repetition | None) -> None:
        """Begin, continue or end a segment of waits for repeated collectives.

        Args:
            repetition: repetition of the collective that is awaited next (None: it is not repeated).
        """
        if repetition is not self._landing:
            if self._landing is not None:
                self._end_landing()
            if repetition is None:
                return
            if self._position is not None:
                raise NotPeriodicError
            self._end_segment()
            self._landing, self._landed, self._started = repetition, 0, self.started.copy()
        self._landed += 1

    def _end_landing(self) -> None:
        """End the segment that awaits repeated collectives, and repeat it."""
        repetition = self._landing
        assert repetition is not None
        if self._landed != repetition.handles:
            raise NotPeriodicError
        self._end_segment()
        self._repeat_segment(repetition.repetitions, repetition.distance, self.started - self._started)
        self._landing = None

    def _number_in_whole(self, layer: int) -> int:
        """Return the number that a layer of the short model has in the whole model.

        In a segment beside a gap, layers near the current block keep their distance to this block.
        """
        if layer < 0:
            return layer
        if self._position is not None:
            gap, after_gap = self._position
            first = gap.next_layer if after_gap else gap.next_layer - gap.block_layers
            near = abs(layer - first) < 2 * gap.block_layers
            if near and gap.run_start <= layer < gap.run_stop:
                return layer + self.model.whole_layer[first] - first
        return self.model.whole_layer[layer]

    def allocate(self, value: SizedValue) -> None:
        self.hold(value.slot, value.held_bytes)

    def release(self, value: SizedValue) -> None:
        self.hold(value.slot, -value.held_bytes)

    def record_peak(self, op: OpKind, layer: int) -> None:
        if self.bytes > self.peak_bytes:
            super().record_peak(op, self._number_in_whole(layer))

    def add_compute(self, seconds: float, waits: Sequence[Interval] = (), exposed: Exposed = ()) -> None:
        """Add seconds of compute, with the idle intervals and the waits for communication in them."""
        if not seconds:
            return
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Compute):
            last.extend(seconds, waits, exposed)
        else:
            self.entries.append(Compute(seconds, waits, exposed))


InFlight = dict[Hashable, "dict[SizedHandle, Hashable]"]
"""Collectives in flight by group and kind of value, each with its state relative to a block (`relative_to`)."""

GATHERED, COMMUNICATION = CATEGORIES.index(Category.GATHERED), CATEGORIES.index(Category.COMMUNICATION)


class CompressedRank(StepRecorder):
    """Rank that records the seconds and bytes of its steps. It represents all ranks of its pipeline stage.

    Args:
        index: the rank's number.
        sample: sizes, prices and measured passes.
        routes: list to which the rank adds the kinds of messages that it sends and receives.
        model: the short model that the rank follows.

    Attributes:
        open: by group, the number of outstanding collectives.
        step_kind: type of the current step (None: the update at the end).
        changes: number of changes of its stores.
        first_axes: for each weight, the first axis over which its gradient is reduced once a step.
    """

    def __init__(self, index: int, mesh: Mesh, sample: PricedSample, routes: list[Route], model: ShortModel) -> None:
        super().__init__(model)
        self.index, self.mesh, self.sample, self.routes = index, mesh, sample, routes
        self.layers = range(len(sample.sample_layer) - 1)
        self.open = Counter[Group]()
        self.step_kind: type | None = None
        self.first_axes: Mapping[int, str] = {}
        self.changes = 0
        self.weights, self.opt_states = SizedStore(), SizedStore()
        self.grad_weights, self.scalars = SizedStore(), SizedStore()
        self._boundaries = {kind.value: BoundaryStore(self, kind) for kind in Kind}
        self.activations = self.store(Kind.ACTIVATION)
        self.grad_activations = self.store(Kind.GRAD_ACTIVATION)
        self._rank_stride = mesh.world // mesh.pp
        self._groups: dict[str, Group] = {}

    def store(self, kind: Kind) -> BoundaryStore:
        return self._boundaries[kind.value]

    def group(self, axis: str) -> Group:
        """Return the group along an axis. For axes other than `pp`, all rows use the group of the first row."""
        group = self._groups.get(axis)
        if group is None:
            group = self._groups[axis] = self.mesh.group(self.index if axis == "pp" else 0, axis)
        return group

    # Memory

    def drop_key(self, value: SizedValue) -> None:
        value.keys -= 1
        if not value.keys and value.alive:
            self.free(value)

    def free_if_unused(self, value: SizedValue | None) -> None:
        if value is not None and not value.keys and value.alive and not value.reading:
            self.free(value)

    def free(self, value: SizedValue) -> None:
        value.alive = False
        for handle in value.reading:
            self.wait(handle)
        self.release(value)

    def new_value(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> SizedValue:
        """Create `pieces` of the `of` pieces into which a layer's weight, gradient or optimizer state is cut."""
        return SizedValue(self, self.sample.part(kind, layer, pieces, of), layer, pieces, of)

    # Collectives

    def register(self, handle: SizedHandle) -> SizedHandle:
        """Count a collective as outstanding. The caller adds its entry."""
        self.outstanding[handle] = None
        self.open[handle.group] += 1
        if handle.read is not None:
            handle.read.reading += (handle,)
        return handle

    def start_collective(
        self,
        kind: OpKind,
        group: Group,
        seconds: float,
        result: SizedValue | None = None,
        read: SizedValue | None = None,
    ) -> SizedHandle:
        """Start a collective: of this row alone or, if the group has ranks of several stages, of several rows."""
        handle = self.register(SizedHandle(self, kind, group, self.started[group], result, read))
        self.started[group] += 1
        across = self._crosses_rows(group)
        entry = Rendezvous(group, group, len(group.ranks), (seconds,)) if across else LocalCollective(group, seconds)
        self.entries.append(entry)
        return handle

    def _crosses_rows(self, group: Group) -> bool:
        return group.axis == "pp" or (self.mesh.pp > 1 and group.ranks[-1] - group.ranks[0] >= self._rank_stride)

    def wait(self, handle: SizedHandle) -> None:
        if handle.repetition is not None or self._landing is not None:
            self._land(handle.repetition)
        group = handle.group
        handle.waited = True
        del self.outstanding[handle]
        self.open[group] -= 1
        ago = self.started[group] - handle.number
        last = self.entries[-1] if ago == 1 and self.entries and self.sample.merges else None
        if (
            isinstance(last, LocalCollective) and last.group is group and not self.open[group]
        ):  # awaited immediately, on an idle stream
            self.entries.pop()
            self.started[group] -= 1
            waits = ((0.0, last.seconds),) if self.sample.notes_waits else ()
            self.add_compute(last.seconds, waits, (((handle.kind, group.axis), last.seconds),))
        else:
            stride = handle.repetition.stride if handle.repetition else 0
            self.entries.append(AwaitCollective(group, ago, handle.kind, stride))
        result, read = handle.result, handle.read
        if result is not None and result.slot == COMMUNICATION:  # it has arrived
            result.slot = result.part.slot
            self.move(COMMUNICATION, result.slot, result.held_bytes)
        if read is not None:
            read.reading = () if len(read.reading) == 1 else tuple([h for h in read.reading if h is not handle])
            if not read.keys:
                self.free_if_unused(read)

    def wait_for_all(self) -> None:
        """Wait for all outstanding collectives."""
        for handle in list(self.outstanding):
            if not handle.waited:
                self.wait(handle)

    # Messages

    def send(self, values: Sequence[SizedValue], offset: int) -> None:
        """Start to send values together to the rank `offset` positions further in the pipeline."""
        self.entries += [PostMessage(route) for route in self._routes(True, offset, values)]

    def wait_sent(self, values: Sequence[SizedValue], offset: int) -> None:
        """Wait for the oldest unawaited sends on the route of these values, and free the values."""
        self.entries += [AwaitMessage(route, 0) for route in self._routes(True, offset, values)]
        for value in values:
            self.release(value)

    def receive(self, values: Sequence[SizedValue], layer: int, offset: int) -> None:
        """Start to receive values that enter a layer, or their gradients."""
        self.entries += [PostMessage(route) for route in self._routes(False, offset, values, layer)]
        for value in values:
            value.slot = COMMUNICATION
            self.allocate(value)
            self.record_peak(OpKind.RECV, layer)

    def wait_received(self, values: Sequence[SizedValue], layer: int, offset: int, turn: int) -> None:
        """Wait for values that the rank receives. `turn` is that of `AwaitMessage`."""
        self.entries += [AwaitMessage(route, turn) for route in self._routes(False, offset, values, layer)]
        for value in values:
            self.move(COMMUNICATION, value.slot, value.held_bytes)

    def _routes(self, sends: bool, offset: int, values: Sequence[SizedValue], layer: int = -1) -> Iterator[int]:
        """Yield the position in `routes` of the route that carries these values together.

        If each send blocks the rank, yield instead the position of a separate route for each value.
        """
        parts = tuple([value.part for value in values])
        for sent_parts in [(part,) for part in parts] if self.sample.prices.blocking_p2p else [parts]:
            route = Route(sends, offset, sent_parts, layer)
            if route not in self.routes:
                self.routes.append(route)
            yield self.routes.index(route)

    # Verbs of a program

    def load_weight(self, layer: int, index: int = 0, of: int = 1) -> SizedValue:
        return self._load(Kind.WEIGHT, OpKind.LOAD_WEIGHT, layer, of)

    def load_opt_state(self, layer: int, index: int = 0, of: int = 1) -> SizedValue:
        return self._load(Kind.OPT_STATE, OpKind.LOAD_OPT_STATE, layer, of)

    def _load(self, kind: Kind, op: OpKind, layer: int, of: int) -> SizedValue:
        self.enter("load", layer)
        value = self.new_value(kind, layer, 1, of)
        self.add_compute(self.sample.compute(op, value.part))
        self.allocate(value)
        self.record_peak(op, layer)
        return value

    def load_batch(self, microbatches: Sequence[int], slices: Sequence[int] | None) -> SizedValue:
        self.apply_pass(self.sample.passes().by_key["load",], 0)
        return self.activations.value_at(0)

    def all_gather(self, value: SizedValue, *, axis: str) -> SizedHandle:
        group = self.group(axis)
        if self.step_kind is None and value.kind is Kind.WEIGHT:
            self.enter(("gather", axis), value.layer)
        result = self.new_value(value.kind, value.layer, value.pieces * len(group.ranks), value.of)
        result.updated = value.updated
        return self._collective(OpKind.ALL_GATHER, value, result, group)

    def reduce_scatter(self, value: SizedValue, *, axis: str) -> SizedHandle:
        group = self.group(axis)
        self._enter_reduction(value, axis)
        result = self.new_value(value.kind, value.layer, value.pieces, value.of * len(group.ranks))
        return self._collective(OpKind.REDUCE_SCATTER, value, result, group)

    def all_reduce(self, value: SizedValue, *, axis: str = "", among: Sequence[int] = ()) -> SizedHandle:
        group = group_among(tuple(among)) if among else self.group(axis)
        self._enter_reduction(value, axis)
        return self._collective(OpKind.ALL_REDUCE, value, self._same_size(value), group)

    def _enter_reduction(self, value: SizedValue, axis: str) -> None:
        """Enter the layer of a gradient (see `enter`) if its reduction was deferred to the end of the schedule."""
        if self.step_kind is None and value.kind is Kind.GRAD_WEIGHT and axis == self.first_axes.get(value.layer):
            self.enter("reduce", value.layer)

    def _collective(self, kind: OpKind, value: SizedValue, result: SizedValue, group: Group) -> SizedHandle:
        gathers = kind is OpKind.ALL_GATHER and value.part.spec.form.kind is Kind.WEIGHT and not value.updated
        result.slot = GATHERED if gathers else COMMUNICATION
        self.allocate(result)
        if kind is OpKind.ALL_REDUCE:  # in place
            self._reuse_memory(value)
        self.record_peak(kind, value.layer)
        seconds = self.sample.collective(kind, max(value.part.wire_bytes, result.part.wire_bytes), group)
        return self.start_collective(kind, group, seconds, result, value)

    def _reuse_memory(self, value: SizedValue) -> None:
        """Free the memory of a value for its successor, which was just created."""
        self.release(value)
        value.held_bytes = 0

    def _same_size(self, value: SizedValue) -> SizedValue:
        return SizedValue(self, value.part, value.layer, value.pieces, value.of)

    def add(self, older: SizedValue, newer: SizedValue) -> SizedValue:
        total = self._same_size(older)
        fused = newer.kind is Kind.GRAD_WEIGHT and not newer.held_bytes  # the backward pass has already added it
        if not (fused and self.sample.prices.adds_in_backward):
            self.add_compute(self.sample.compute(OpKind.ADD, total.part))
        self.allocate(total)
        self._reuse_memory(older)
        self.record_peak(OpKind.ADD, total.layer)
        self.free_if_unused(newer)
        return total

    def accumulate(self, gradient: SizedValue) -> None:
        layer, sums = gradient.layer, self.grad_weights
        sums[layer] = self.add(sums[layer], gradient) if layer in sums else gradient

    def norm(self, layer: int, gradient: SizedValue) -> SizedValue:
        self.enter("norm", layer)
        scalar = self.new_value(Kind.SCALAR, -1)
        self.add_compute(self.sample.compute(OpKind.NORM, gradient.part))
        self.allocate(scalar)
        self.record_peak(OpKind.NORM, layer)
        return scalar

    def direction(self, layer: int, gradient: SizedValue, opt_state: SizedValue, norm: SizedValue) -> SizedValue:
        direction = self.new_value(Kind.DIRECTION, layer, opt_state.pieces, opt_state.of)
        self.add_compute(self.sample.compute(OpKind.DIRECTION, direction.part))
        self.allocate(direction)
        self.record_peak(OpKind.DIRECTION, layer)
        return direction

    def update(
        self,
        layer: int,
        gradient: SizedValue,
        weight: SizedValue,
        opt_state: SizedValue,
        norm: SizedValue,
        direction: SizedValue | None,
    ) -> tuple[SizedValue, SizedValue]:
        self.enter("update", layer)
        self.free(weight)
        self.free(opt_state)
        new_weight = self.new_value(Kind.WEIGHT, layer, opt_state.pieces, opt_state.of)
        new_state = self.new_value(Kind.OPT_STATE, layer, opt_state.pieces, opt_state.of)
        new_weight.updated = True
        self.allocate(new_weight)
        self.allocate(new_state)
        self.add_compute(self.sample.compute(OpKind.UPDATE, new_weight.part))
        self.record_peak(OpKind.UPDATE, layer)
        self.free_if_unused(gradient)
        self.free_if_unused(direction)
        return new_weight, new_state

    # Passes

    def apply_pass(
        self, measured: MeasuredPass, layer: int, weight: SizedValue | None = None, gradient: SizedValue | None = None
    ) -> None:
        """Add a measured pass to the step.

        If no collective is in flight on the streams that the pass uses, its seconds count as compute. Otherwise the
        clocks decide which of its collectives have to queue. If ranks lose time at each wait (`Prices.lag`), its
        collectives are started and awaited one by one in any case.

        Args:
            measured: the pass.
            layer: its layer on this rank; for a pass of several layers, the first.
            weight: the weight that it reads. It is freed if no store has it and no collective reads it.
            gradient: the weight gradient that it computes.
        """
        if self.sample.merges:
            if any(map(self.open.__getitem__, measured.groups)):
                self.entries.append(measured)
            else:
                self.add_compute(measured.seconds, measured.waits, measured.exposed)
        else:
            for compute_seconds, group, seconds, kind in measured.collectives:
                self.add_compute(compute_seconds)
                self.wait(self.start_collective(kind, group, seconds))
            self.add_compute(measured.rest, (), () if measured.collectives else measured.exposed)
        first_peak, main_peak, last_peak = measured.peaks
        if first_peak is not None and self.bytes + first_peak.bytes > self.peak_bytes:
            self.raise_peak(first_peak, self._number_in_whole(layer))
        if gradient is not None:
            self.allocate(gradient)
        if main_peak is not None and self.bytes + main_peak.bytes > self.peak_bytes:
            self.raise_peak(main_peak, self._number_in_whole(layer))
        if weight is not None:
            self.free_if_unused(weight)
        if last_peak is not None and self.bytes + last_peak.bytes > self.peak_bytes:
            self.raise_peak(last_peak, self._number_in_whole(layer))
        by_category = self.by_category
        for slot, change in measured.changes:
            by_category[slot] += change
        self.bytes += measured.bytes


class SizedValue:
    """Value of a compressed rank.

    Attributes:
        part: spec and sizes.
        layer, pieces, of: the value has `pieces` of the `of` pieces of this layer.
        held_bytes: bytes that it takes now; 0 if it lies in the memory of another value.
        slot: index of its current memory category in `CATEGORIES`.
        keys: number of store keys of the value.
        reading: collectives in flight that read it.
        alive: whether it has been neither freed nor replaced by an update.
        updated: whether it is an updated weight.
    """

    __slots__ = ("alive", "held_bytes", "keys", "layer", "of", "part", "pieces", "rank", "reading", "slot", "updated")

    def __init__(self, rank: CompressedRank, part: SizedPart, layer: int = -1, pieces: int = 1, of: int = 1) -> None:
        self.rank, self.part, self.layer, self.pieces, self.of = rank, part, layer, pieces, of
        self.held_bytes = part.held_bytes
        self.slot = part.slot
        self.keys = 0
        self.alive, self.updated = True, False
        self.reading: tuple[SizedHandle, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.part.spec.form.kind

    def __add__(self, other: SizedValue) -> SizedValue:
        return self.rank.add(self, other)


class SizedHandle:
    """Collective that a compressed rank has started.

    Attributes:
        kind: kind of the collective.
        group: the ranks that take part.
        number: position among the rank's collectives of this group.
        result, read: the output and the input (None: the collective belongs to a measured pass).
        repetition: its repetition for missing blocks (None: it is not repeated).
    """

    __slots__ = ("group", "kind", "number", "rank", "read", "repetition", "result", "waited")

    def __init__(
        self,
        rank: CompressedRank,
        kind: OpKind,
        group: Group,
        number: int,
        result: SizedValue | None,
        read: SizedValue | None,
    ) -> None:
        self.rank, self.kind, self.group, self.number = rank, kind, group, number
        self.result, self.read, self.waited = result, read, False
        self.repetition: Repetition | None = None

    def relative_to(self, layer: int) -> Hashable:
        """Return the state of the collective, with layers counted from `layer`.

        The state is a tuple: how many collectives of the group ago it was started, its output, and its input.
        """
        values = [value and (value.part, value.layer - layer, value.keys) for value in (self.result, self.read)]
        return (self.rank.started[self.group] - self.number, *values)

    def __await__(self) -> Generator[SizedHandle, None, Any]:
        if not self.waited:
            self.rank.wait(self)
        return self.result
        yield self


class SizedStore(dict[Hashable, SizedValue]):
    """Values of one kind by key. A value is freed when its last key is deleted."""

    def __setitem__(self, key: Hashable, value: SizedValue) -> None:
        value.keys += 1
        value.rank.changes += 1
        old = self.get(key)
        if old is not None:
            old.rank.drop_key(old)
        super().__setitem__(key, value)

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        super().__delitem__(key)
        value.rank.changes += 1
        value.rank.drop_key(value)

    def pop(self, key: Hashable) -> SizedValue:  # pyright: ignore[reportIncompatibleMethodOverride]  # no default
        value = super().pop(key)
        value.keys -= 1
        value.rank.changes += 1
        return value

    def reset(self, values: Mapping[Hashable, SizedValue]) -> None:
        """Replace all entries, without freeing the old values."""
        self.clear()
        self.update(values)

    def put(self, key: Hashable, value: SizedValue) -> None:
        """Restore a value whose `keys` already counts this key."""
        super().__setitem__(key, value)


class BoundaryStore:
    """Store of the values between layers. It stores nothing, since measured passes count their bytes.

    A value is created on each look-up, to be sent or received.
    """

    def __init__(self, rank: CompressedRank, kind: Kind) -> None:
        self.rank, self.kind, self.name = rank, kind, kind.value
        self._parts: dict[int, SizedPart] = {}

    def __setitem__(self, key: Hashable, value: object) -> None:
        """Ignore the value, which its pass has counted."""

    def __delitem__(self, key: tuple[int, int]) -> None:
        """Free the gradient of the tokens, which no pass reads. Passes free all other values."""
        if self.kind is Kind.GRAD_ACTIVATION and key[0] == 0:
            self.rank.release(self.pop(key))

    def pop(self, key: tuple[int, int]) -> SizedValue:
        return self.value_at(key[0])

    def value_at(self, layer: int) -> SizedValue:
        """Return the value that enters a layer, or its gradient."""
        part = self._parts.get(layer)
        if part is None:
            part = self._parts[layer] = self.rank.sample.boundary(self.kind, layer)
        return SizedValue(self.rank, part)

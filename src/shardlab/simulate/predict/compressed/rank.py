"""A rank that records the seconds and bytes of a step, and no ops.

`CompressedRank` has the verbs of a traced rank (`PlanRank`), so the code that gathers weights, reduces gradients and
updates runs on it unchanged. A verb adds the op's seconds to the entries of the current step, and adds or takes away
the bytes of its values. The passes of layers are not run: `apply_pass` adds a pass that was measured on the sample.

The parts, in order: `StepRecorder` has the entries and bytes of the current step; `CompressedRank` has the verbs;
values, handles and stores are below it. Values live as long as those of a traced rank (`shardlab.language.values`):
until their last key of a store is deleted and no collective reads them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

from shardlab.language import Group, Kind, Mesh, OpKind
from shardlab.language.mesh import group_among
from shardlab.simulate.predict.compressed.clocks import (
    AwaitCollective,
    AwaitMessage,
    CompressedStep,
    Compute,
    Entry,
    Interval,
    LocalCollective,
    PostMessage,
    Rendezvous,
    Route,
)
from shardlab.simulate.predict.compressed.sample import MeasuredPass, PassPeak, PricedSample, SizedPart
from shardlab.simulate.timeline.memory import CATEGORIES, Category


class StepRecorder:
    """Entries and bytes of the step that is being recorded.

    Attributes:
        entries: in order.
        by_category, bytes: bytes that are held beyond those at the step's start, by category and in all.
        peak_bytes: the largest `bytes` during an op so far.
    """

    def _begin(self) -> None:
        self.entries: list[Entry] = []
        self.by_category = [0] * len(CATEGORIES)
        self.bytes = 0
        self._peak: PassPeak | None = None
        self.peak_bytes = -math.inf

    def finish_step(self) -> CompressedStep:
        """Return the step that was recorded, and begin to record the next one."""
        ended = CompressedStep(self.entries, self.bytes, tuple(self.by_category), self._peak)
        self._begin()
        return ended

    def allocate(self, value: SizedValue) -> None:
        self.by_category[value.slot] += value.held_bytes
        self.bytes += value.held_bytes

    def release(self, value: SizedValue) -> None:
        self.by_category[value.slot] -= value.held_bytes
        self.bytes -= value.held_bytes

    def record_peak(self, op: OpKind, layer: int) -> None:
        """Compare the bytes that are held during an op with the step's peak."""
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self._peak = self.bytes, PassPeak(self.bytes, tuple(self.by_category), op, layer)

    def add_compute(self, seconds: float, waits: Sequence[Interval] = ()) -> None:
        """Add seconds of compute, and the intervals in them in which nothing is computed."""
        if not seconds:
            return
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Compute):
            if waits:
                before = last.seconds
                last.waits += [(before + start, before + end) for start, end in waits]
            last.seconds += seconds
        else:
            self.entries.append(Compute(seconds, waits))

    def raise_peak(self, peak: PassPeak, layer: int) -> None:
        """Set the step's peak to that of a pass, which counts from the bytes that are held now."""
        by_category = tuple([a + b for a, b in zip(self.by_category, peak.by_category, strict=True)])
        self.peak_bytes = self.bytes + peak.bytes
        self._peak = PassPeak(self.peak_bytes, by_category, peak.op, layer + peak.layer)


GATHERED, COMMUNICATION = CATEGORIES.index(Category.GATHERED), CATEGORIES.index(Category.COMMUNICATION)


class CompressedRank(StepRecorder):
    """Rank that records the seconds and bytes of its steps; it stands for all ranks of its pipeline stage.

    Args:
        index: the rank's number.
        sample: sizes, prices and measured passes.
        routes: gets the kinds of messages that the rank sends and receives.

    Attributes:
        collectives: how many the rank has started.
        outstanding: collectives that it has not waited for, in order.
        open: by group, how many of these there are.
    """

    def __init__(self, index: int, mesh: Mesh, sample: PricedSample, routes: list[Route]) -> None:
        self.index, self.mesh, self.sample, self.routes = index, mesh, sample, routes
        self.layers = range(len(sample.sample_layer) - 1)
        self.collectives = 0
        self.outstanding: dict[SizedHandle, None] = {}
        self.open = Counter[Group]()
        self._begin()
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
        """Return the group along an axis. Along any axis but `pp`, the first row's stands for those of all rows."""
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
        """Make a value of `pieces` of the `of` pieces of a layer's weight."""
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
        self, group: Group, seconds: float, result: SizedValue | None = None, read: SizedValue | None = None
    ) -> SizedHandle:
        """Start a collective: of this row alone, or with other rows that have members in the group."""
        handle = self.register(SizedHandle(self, group, self.collectives, result, read))
        self.collectives += 1
        across = self._crosses_rows(group)
        entry = Rendezvous(group, group, len(group.ranks), seconds) if across else LocalCollective(group, seconds)
        self.entries.append(entry)
        return handle

    def _crosses_rows(self, group: Group) -> bool:
        return group.axis == "pp" or (self.mesh.pp > 1 and group.ranks[-1] - group.ranks[0] >= self._rank_stride)

    def wait(self, handle: SizedHandle) -> None:
        group = handle.group
        handle.waited = True
        del self.outstanding[handle]
        self.open[group] -= 1
        ago = self.collectives - handle.number
        last = self.entries[-1] if ago == 1 and self.entries and self.sample.merges else None
        if isinstance(last, LocalCollective) and not self.open[group]:  # awaited at once, on an idle stream
            self.entries.pop()
            self.collectives -= 1
            self.add_compute(last.seconds, ((0.0, last.seconds),) if self.sample.notes_waits else ())
        else:
            self.entries.append(AwaitCollective(ago))
        result, read = handle.result, handle.read
        if result is not None and result.slot == COMMUNICATION:  # it has arrived
            self.by_category[COMMUNICATION] -= result.held_bytes
            result.slot = result.part.slot
            self.by_category[result.slot] += result.held_bytes
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

    def send(self, value: SizedValue, offset: int) -> None:
        """Start to send a value to the rank `offset` places further in the pipeline."""
        self.entries.append(PostMessage(self._route(Route(True, offset, value.part))))

    def wait_sent(self, value: SizedValue, offset: int) -> None:
        """Wait for the oldest send of a value like this one."""
        self.entries.append(AwaitMessage(self._route(Route(True, offset, value.part)), 0))
        self.release(value)

    def receive(self, value: SizedValue, layer: int, offset: int) -> None:
        """Start to receive a value that enters a layer, or its gradient."""
        value.slot = COMMUNICATION
        self.allocate(value)
        self.record_peak(OpKind.RECV, layer)
        self.entries.append(PostMessage(self._route(Route(False, offset, value.part, layer))))

    def wait_received(self, value: SizedValue, layer: int, offset: int, turn: int) -> None:
        """Wait for a received value: of those on its route, the oldest (`turn` 0) or a later one."""
        self.entries.append(AwaitMessage(self._route(Route(False, offset, value.part, layer)), turn))
        self.by_category[COMMUNICATION] -= value.held_bytes
        self.by_category[value.slot] += value.held_bytes

    def _route(self, route: Route) -> int:
        if route not in self.routes:
            self.routes.append(route)
        return self.routes.index(route)

    # Verbs of a program

    def load_weight(self, layer: int, index: int = 0, of: int = 1) -> SizedValue:
        return self._load(Kind.WEIGHT, OpKind.LOAD_WEIGHT, layer, of)

    def load_opt_state(self, layer: int, index: int = 0, of: int = 1) -> SizedValue:
        return self._load(Kind.OPT_STATE, OpKind.LOAD_OPT_STATE, layer, of)

    def _load(self, kind: Kind, op: OpKind, layer: int, of: int) -> SizedValue:
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
        result = self.new_value(value.kind, value.layer, value.pieces * len(group.ranks), value.of)
        result.updated = value.updated
        return self._collective(OpKind.ALL_GATHER, value, result, group)

    def reduce_scatter(self, value: SizedValue, *, axis: str) -> SizedHandle:
        group = self.group(axis)
        result = self.new_value(value.kind, value.layer, value.pieces, value.of * len(group.ranks))
        return self._collective(OpKind.REDUCE_SCATTER, value, result, group)

    def all_reduce(self, value: SizedValue, *, axis: str = "", among: Sequence[int] = ()) -> SizedHandle:
        group = group_among(tuple(among)) if among else self.group(axis)
        return self._collective(OpKind.ALL_REDUCE, value, self._same_size(value), group)

    def _collective(self, kind: OpKind, value: SizedValue, result: SizedValue, group: Group) -> SizedHandle:
        gathers = kind is OpKind.ALL_GATHER and value.part.spec.form.kind is Kind.WEIGHT and not value.updated
        result.slot = GATHERED if gathers else COMMUNICATION
        self.allocate(result)
        if kind is OpKind.ALL_REDUCE:  # in place
            self._reuse_memory(value)
        self.record_peak(kind, value.layer)
        seconds = self.sample.collective(kind, max(value.part.wire_bytes, result.part.wire_bytes), group)
        return self.start_collective(group, seconds, result, value)

    def _reuse_memory(self, value: SizedValue) -> None:
        """Let the value that was just made take the memory of this one."""
        self.release(value)
        value.held_bytes = 0

    def _same_size(self, value: SizedValue) -> SizedValue:
        return SizedValue(self, value.part, value.layer, value.pieces, value.of)

    def add(self, older: SizedValue, newer: SizedValue) -> SizedValue:
        made = self._same_size(older)
        fused = newer.kind is Kind.GRAD_WEIGHT and not newer.held_bytes  # the backward pass has added it
        if not (fused and self.sample.prices.adds_in_backward):
            self.add_compute(self.sample.compute(OpKind.ADD, made.part))
        self.allocate(made)
        self._reuse_memory(older)
        self.record_peak(OpKind.ADD, made.layer)
        self.free_if_unused(newer)
        return made

    def accumulate(self, gradient: SizedValue) -> None:
        layer, sums = gradient.layer, self.grad_weights
        sums[layer] = self.add(sums[layer], gradient) if layer in sums else gradient

    def norm(self, layer: int, gradient: SizedValue) -> SizedValue:
        made = self.new_value(Kind.SCALAR, -1)
        self.add_compute(self.sample.compute(OpKind.NORM, gradient.part))
        self.allocate(made)
        self.record_peak(OpKind.NORM, layer)
        return made

    def direction(self, layer: int, gradient: SizedValue, opt_state: SizedValue, norm: SizedValue) -> SizedValue:
        made = self.new_value(Kind.DIRECTION, layer, opt_state.pieces, opt_state.of)
        self.add_compute(self.sample.compute(OpKind.DIRECTION, made.part))
        self.allocate(made)
        self.record_peak(OpKind.DIRECTION, layer)
        return made

    def update(
        self,
        layer: int,
        gradient: SizedValue,
        weight: SizedValue,
        opt_state: SizedValue,
        norm: SizedValue,
        direction: SizedValue | None,
    ) -> tuple[SizedValue, SizedValue]:
        for value in (weight, opt_state):
            value.alive = False
            for handle in value.reading:
                self.wait(handle)
            self.release(value)
        made = self.new_value(Kind.WEIGHT, layer, opt_state.pieces, opt_state.of)
        state = self.new_value(Kind.OPT_STATE, layer, opt_state.pieces, opt_state.of)
        made.updated = True
        self.allocate(made)
        self.allocate(state)
        self.add_compute(self.sample.compute(OpKind.UPDATE, made.part))
        self.record_peak(OpKind.UPDATE, layer)
        self.free_if_unused(gradient)
        self.free_if_unused(direction)
        return made, state

    # Passes

    def must_queue(self, done: MeasuredPass) -> bool:
        """Tell whether a pass's collectives may have to wait for others in flight on the same streams."""
        for group in done.groups:  # noqa: SIM110 (a generator takes twice as long)
            if self.open[group]:
                return True
        return False

    def apply_pass(
        self, done: MeasuredPass, layer: int, weight: SizedValue | None = None, gradient: SizedValue | None = None
    ) -> None:
        """Add a measured pass to the step.

        If no collective of the pass has to queue, its seconds count as compute. Otherwise its collectives are started
        and awaited one by one.

        Args:
            done: the pass.
            layer: its layer on this rank; of a pass of several layers, the first.
            weight: the weight that it reads, which may end with it.
            gradient: the gradient of the weight that it makes.
        """
        if self.sample.merges and not self.must_queue(done):
            self.add_compute(done.seconds, done.waits)
        else:
            for after, group, seconds in done.collectives:
                self.add_compute(after)
                self.wait(self.start_collective(group, seconds))
            self.add_compute(done.rest)
        before, main, after = done.peaks
        if before is not None and self.bytes + before.bytes > self.peak_bytes:
            self.raise_peak(before, layer)
        if gradient is not None:
            self.allocate(gradient)
        if main is not None and self.bytes + main.bytes > self.peak_bytes:
            self.raise_peak(main, layer)
        if weight is not None:
            self.free_if_unused(weight)
        if after is not None and self.bytes + after.bytes > self.peak_bytes:
            self.raise_peak(after, layer)
        by_category = self.by_category
        for slot, change in done.changes:
            by_category[slot] += change
        self.bytes += done.bytes


class SizedValue:
    """Value of a compressed rank.

    Attributes:
        part: its spec and sizes.
        layer, pieces, of: the layer, and that it is `pieces` of the layer's `of` pieces.
        held_bytes: bytes that it takes now; 0 if it lies in the memory of another value.
        slot: index of the category in which these bytes count.
        keys, reading, alive: as of `shardlab.language.values.Value`.
        updated: whether it is a weight that the step has updated.
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
        group: its members.
        number: its place among the rank's collectives.
        result, read: the value that it makes, and the one that it reads (None: it belongs to a measured pass).
    """

    __slots__ = ("group", "number", "rank", "read", "result", "waited")

    def __init__(
        self, rank: CompressedRank, group: Group, number: int, result: SizedValue | None, read: SizedValue | None
    ) -> None:
        self.rank, self.group, self.number, self.result, self.read = rank, group, number, result, read
        self.waited = False

    def __await__(self) -> Generator[SizedHandle, None, Any]:
        if not self.waited:
            self.rank.wait(self)
        return self.result
        yield self


class SizedStore(dict[Hashable, SizedValue]):
    """Values of one kind by key. A value is freed when its last key is deleted."""

    def __setitem__(self, key: Hashable, value: SizedValue) -> None:
        value.keys += 1
        old = self.get(key)
        if old is not None:
            old.rank.drop_key(old)
        super().__setitem__(key, value)

    def __delitem__(self, key: Hashable) -> None:
        value = self[key]
        super().__delitem__(key)
        value.rank.drop_key(value)

    def pop(self, key: Hashable) -> SizedValue:  # pyright: ignore[reportIncompatibleMethodOverride]  # no default
        value = super().pop(key)
        value.keys -= 1
        return value

    def reset(self, values: Mapping[Hashable, SizedValue]) -> None:
        """Replace all entries, without freeing the values that leave."""
        self.clear()
        self.update(values)

    def put(self, key: Hashable, value: SizedValue) -> None:
        """Put back a value whose `keys` already counts this key."""
        super().__setitem__(key, value)


class BoundaryStore:
    """Store of the values between layers, whose bytes the measured passes have counted already.

    So it stores nothing. A value is made when it is asked for, to be sent or received.
    """

    def __init__(self, rank: CompressedRank, kind: Kind) -> None:
        self.rank, self.kind, self.name = rank, kind, kind.value
        self._parts: dict[int, SizedPart] = {}

    def __setitem__(self, key: Hashable, value: object) -> None:
        """Ignore the value: the pass that made it has counted it."""

    def __delitem__(self, key: tuple[int, int]) -> None:
        """Free the gradient of the tokens, which no pass reads. All other values are freed by passes."""
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

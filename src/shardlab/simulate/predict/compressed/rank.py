"""The outline of a rank's step: the strategy that follows plans, run on a rank that only notes seconds and bytes.

Gradients are reduced and weights gathered by the very code that is traced. Layers' passes are not run again but taken
from a sample (see `sampled_passes`), and where a stage does nothing but passes, all of them are one entry. So an
outline has as many entries as there are microbatches and messages, not ops.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

from shardlab.language import Group, Kind, Mesh, OpKind
from shardlab.language.mesh import group_among
from shardlab.simulate.predict.compressed.clocks import (
    Await,
    Compute,
    Entry,
    Issue,
    Join,
    OutlinedMessage,
    OutlinedStep,
    Take,
    Way,
)
from shardlab.simulate.predict.compressed.sample import Crest, Pass, PricedSample, SizedPart
from shardlab.simulate.timeline.memory import CATEGORIES, Category

# The stretch of an outline that is being written: its entries, and the bytes that are held meanwhile.


class OpenStep:
    """Entries and bytes since a stretch began.

    Attributes:
        entries: in order.
        held, total: bytes held beyond what was held then, by category and in all.
        peak: the most of these that was noted.
    """

    def _begin(self) -> None:
        self.entries: list[Entry] = []
        self.held = [0] * len(CATEGORIES)
        self.total = 0
        self._crest: Crest | None = None
        self.peak = -math.inf

    def stretch(self) -> OutlinedStep:
        """End the present stretch and begin another."""
        ended = OutlinedStep(self.entries, self.total, tuple(self.held), self._crest)
        self._begin()
        return ended

    def hold(self, value: OutlineValue) -> None:
        self.held[value.slot] += value.room
        self.total += value.room

    def drop(self, value: OutlineValue) -> None:
        self.held[value.slot] -= value.room
        self.total -= value.room

    def note(self, op: OpKind, layer: int) -> None:
        """Compare what is held during an op with the stretch's peak."""
        if self.total > self.peak:
            self.peak, self._crest = self.total, Crest(self.total, tuple(self.held), op, layer)

    def run(self, seconds: float) -> None:
        """Compute for so long."""
        if not seconds:
            return
        last = self.entries[-1] if self.entries else None
        if isinstance(last, Compute):
            last.seconds += seconds
        else:
            self.entries.append(Compute(seconds))

    def rise(self, crest: Crest, layer: int) -> None:
        """Note a new peak: the most that a pass holds, beyond what is held now."""
        held = tuple([a + b for a, b in zip(self.held, crest.held, strict=True)])
        self.peak = self.total + crest.bytes
        self._crest = Crest(self.peak, held, crest.op, layer + crest.layer)


GATHERED, COMMUNICATION = CATEGORIES.index(Category.GATHERED), CATEGORIES.index(Category.COMMUNICATION)


class Outline(OpenStep):
    """One rank of each pipeline stage, as far as its step's time and memory go.

    Attributes:
        collectives: how many it has begun.
        outstanding: collectives that it has not waited for, in order.
        ways: the messages that it sends and receives.
    """

    def __init__(self, index: int, mesh: Mesh, figures: PricedSample, ways: list[Way]) -> None:
        self.index, self.mesh, self.figures, self.ways = index, mesh, figures, ways
        self.layers = range(len(figures.alike) - 1)
        self.collectives = 0
        self.outstanding: dict[OutlineHandle, None] = {}
        self.open = Counter[Group]()
        self._begin()
        self.weights, self.opt_states = OutlineStore(), OutlineStore()
        self.grad_weights, self.scalars = OutlineStore(), OutlineStore()
        self._borders = {kind.value: Borders(self, kind) for kind in Kind}
        self.activations = self.store(Kind.ACTIVATION)
        self.grad_activations = self.store(Kind.GRAD_ACTIVATION)
        self._apart = mesh.world // mesh.pp
        self._groups: dict[str, Group] = {}

    def store(self, kind: Kind) -> Borders:
        return self._borders[kind.value]

    def group(self, axis: str) -> Group:
        """The ranks met along an axis: beside the pipeline's, those of the first row, which all rows are like."""
        group = self._groups.get(axis)
        if group is None:
            group = self._groups[axis] = self.mesh.group(self.index if axis == "pp" else 0, axis)
        return group

    # What is held

    def forget(self, value: OutlineValue) -> None:
        value.keys -= 1
        if not value.keys and value.alive:
            self.free(value)

    def done_with(self, value: OutlineValue | None) -> None:
        if value is not None and not value.keys and value.alive and not value.reading:
            self.free(value)

    def free(self, value: OutlineValue) -> None:
        value.alive = False
        for handle in value.reading:
            self.wait(handle)
        self.drop(value)

    def made(self, kind: Kind, layer: int, pieces: int = 1, of: int = 1) -> OutlineValue:
        """Make a value that is so many of so many pieces of a layer's weight."""
        return OutlineValue(self, self.figures.part(kind, layer, pieces, of), layer, pieces, of)

    # What takes time

    def begin(self, handle: OutlineHandle) -> OutlineHandle:
        """Note that a collective has begun; an entry follows."""
        self.outstanding[handle] = None
        self.open[handle.group] += 1
        if handle.read is not None:
            handle.read.reading += (handle,)
        return handle

    def meet(
        self, group: Group, seconds: float, result: OutlineValue | None = None, read: OutlineValue | None = None
    ) -> OutlineHandle:
        """Begin a collective: alone, or with the other rows that are members."""
        handle = self.begin(OutlineHandle(self, group, self.collectives, result, read))
        self.collectives += 1
        across = self._meets_rows(group)
        self.entries.append(Join(group, group, len(group.ranks), seconds) if across else Issue(group, seconds))
        return handle

    def _meets_rows(self, group: Group) -> bool:
        return group.axis == "pp" or (self.mesh.pp > 1 and group.ranks[-1] - group.ranks[0] >= self._apart)

    def wait(self, handle: OutlineHandle) -> None:
        group = handle.group
        handle.waited = True
        del self.outstanding[handle]
        self.open[group] -= 1
        ago = self.collectives - handle.number
        last = self.entries[-1] if ago == 1 and self.entries and self.figures.merges else None
        if isinstance(last, Issue) and not self.open[group]:  # awaited at once, on an idle stream
            self.entries.pop()
            self.collectives -= 1
            self.run(last.seconds)
        else:
            self.entries.append(Await(ago))
        result, read = handle.result, handle.read
        if result is not None and result.slot == COMMUNICATION:  # it has arrived
            self.held[COMMUNICATION] -= result.room
            result.slot = result.part.slot
            self.held[result.slot] += result.room
        if read is not None:
            read.reading = () if len(read.reading) == 1 else tuple([h for h in read.reading if h is not handle])
            if not read.keys:
                self.done_with(read)

    def end(self) -> None:
        """Wait for what is in flight."""
        for handle in list(self.outstanding):
            if not handle.waited:
                self.wait(handle)

    # Messages

    def send(self, value: OutlineValue, further: int) -> None:
        """Send a value to the rank that is so much further."""
        self.entries.append(OutlinedMessage(self._way(Way(True, further, value.part))))

    def sent(self, value: OutlineValue, further: int) -> None:
        """Wait until the oldest value like this one that is on its way is there."""
        self.entries.append(Take(self._way(Way(True, further, value.part)), 0))
        self.drop(value)

    def receive(self, value: OutlineValue, layer: int, further: int) -> None:
        """Begin to receive a value that enters a layer, or its gradient."""
        value.slot = COMMUNICATION
        self.hold(value)
        self.note(OpKind.RECV, layer)
        self.entries.append(OutlinedMessage(self._way(Way(False, further, value.part, layer))))

    def received(self, value: OutlineValue, layer: int, further: int, turn: int) -> None:
        """Wait for a value: of those like it that are on their way, for the next one (0) or one after it."""
        self.entries.append(Take(self._way(Way(False, further, value.part, layer)), turn))
        self.held[COMMUNICATION] -= value.room
        self.held[value.slot] += value.room

    def _way(self, way: Way) -> int:
        if way not in self.ways:
            self.ways.append(way)
        return self.ways.index(way)

    # Verbs of a program

    def load_weight(self, layer: int, index: int = 0, of: int = 1) -> OutlineValue:
        return self._load(Kind.WEIGHT, OpKind.LOAD_WEIGHT, layer, of)

    def load_opt_state(self, layer: int, index: int = 0, of: int = 1) -> OutlineValue:
        return self._load(Kind.OPT_STATE, OpKind.LOAD_OPT_STATE, layer, of)

    def _load(self, kind: Kind, op: OpKind, layer: int, of: int) -> OutlineValue:
        value = self.made(kind, layer, 1, of)
        self.run(self.figures.compute(op, value.part))
        self.hold(value)
        self.note(op, layer)
        return value

    def load_batch(self, microbatches: Sequence[int], slices: Sequence[int] | None) -> OutlineValue:
        self.passed(self.figures.passes().by_key["load",], 0)
        return self.activations.coming(0)

    def all_gather(self, value: OutlineValue, *, axis: str) -> OutlineHandle:
        group = self.group(axis)
        result = self.made(value.kind, value.layer, value.pieces * len(group.ranks), value.of)
        result.updated = value.updated
        return self._collective(OpKind.ALL_GATHER, value, result, group)

    def reduce_scatter(self, value: OutlineValue, *, axis: str) -> OutlineHandle:
        group = self.group(axis)
        result = self.made(value.kind, value.layer, value.pieces, value.of * len(group.ranks))
        return self._collective(OpKind.REDUCE_SCATTER, value, result, group)

    def all_reduce(self, value: OutlineValue, *, axis: str = "", among: Sequence[int] = ()) -> OutlineHandle:
        group = group_among(tuple(among)) if among else self.group(axis)
        return self._collective(OpKind.ALL_REDUCE, value, self._alike(value), group)

    def _collective(self, kind: OpKind, value: OutlineValue, result: OutlineValue, group: Group) -> OutlineHandle:
        gathers = kind is OpKind.ALL_GATHER and value.part.spec.form.kind is Kind.WEIGHT and not value.updated
        result.slot = GATHERED if gathers else COMMUNICATION
        self.hold(result)
        if kind is OpKind.ALL_REDUCE:  # in place
            self._take_over(value)
        self.note(kind, value.layer)
        seconds = self.figures.collective(kind, max(value.part.wire, result.part.wire), group)
        return self.meet(group, seconds, result, value)

    def _take_over(self, value: OutlineValue) -> None:
        """What was made lies where this value does."""
        self.drop(value)
        value.room = 0

    def _alike(self, value: OutlineValue) -> OutlineValue:
        return OutlineValue(self, value.part, value.layer, value.pieces, value.of)

    def add(self, older: OutlineValue, newer: OutlineValue) -> OutlineValue:
        made = self._alike(older)
        fused = newer.kind is Kind.GRAD_WEIGHT and not newer.room  # the backward pass has added it
        if not (fused and self.figures.prices.adds_in_backward):
            self.run(self.figures.compute(OpKind.ADD, made.part))
        self.hold(made)
        self._take_over(older)
        self.note(OpKind.ADD, made.layer)
        self.done_with(newer)
        return made

    def accumulate(self, gradient: OutlineValue) -> None:
        layer, sums = gradient.layer, self.grad_weights
        sums[layer] = self.add(sums[layer], gradient) if layer in sums else gradient

    def norm(self, layer: int, gradient: OutlineValue) -> OutlineValue:
        made = self.made(Kind.SCALAR, -1)
        self.run(self.figures.compute(OpKind.NORM, gradient.part))
        self.hold(made)
        self.note(OpKind.NORM, layer)
        return made

    def direction(
        self, layer: int, gradient: OutlineValue, opt_state: OutlineValue, norm: OutlineValue
    ) -> OutlineValue:
        made = self.made(Kind.DIRECTION, layer, opt_state.pieces, opt_state.of)
        self.run(self.figures.compute(OpKind.DIRECTION, made.part))
        self.hold(made)
        self.note(OpKind.DIRECTION, layer)
        return made

    def update(
        self,
        layer: int,
        gradient: OutlineValue,
        weight: OutlineValue,
        opt_state: OutlineValue,
        norm: OutlineValue,
        direction: OutlineValue | None,
    ) -> tuple[OutlineValue, OutlineValue]:
        for value in (weight, opt_state):
            value.alive = False
            for handle in value.reading:
                self.wait(handle)
            self.drop(value)
        made = self.made(Kind.WEIGHT, layer, opt_state.pieces, opt_state.of)
        state = self.made(Kind.OPT_STATE, layer, opt_state.pieces, opt_state.of)
        made.updated = True
        self.hold(made)
        self.hold(state)
        self.run(self.figures.compute(OpKind.UPDATE, made.part))
        self.note(OpKind.UPDATE, layer)
        self.done_with(gradient)
        self.done_with(direction)
        return made, state

    # Passes

    def busy(self, done: Pass) -> bool:
        """Whether a pass's collectives may have to wait for others that are in flight."""
        for group in done.groups:  # noqa: SIM110 (a generator takes twice as long)
            if self.open[group]:
                return True
        return False

    def passed(
        self, done: Pass, layer: int, weight: OutlineValue | None = None, gradient: OutlineValue | None = None
    ) -> None:
        """Take a layer's pass.

        Args:
            weight: what it computes with.
            gradient: of the weight, which it makes.
        """
        if self.figures.merges and not self.busy(done):
            self.run(done.seconds)
        else:
            for after, group, seconds in done.meetings:
                self.run(after)
                self.wait(self.meet(group, seconds))
            self.run(done.rest)
        before, main, after = done.crests
        if before is not None and self.total + before.bytes > self.peak:
            self.rise(before, layer)
        if gradient is not None:
            self.hold(gradient)
        if main is not None and self.total + main.bytes > self.peak:
            self.rise(main, layer)
        if weight is not None:
            self.done_with(weight)
        if after is not None and self.total + after.bytes > self.peak:
            self.rise(after, layer)
        held = self.held
        for slot, change in done.changes:
            held[slot] += change
        self.total += done.bytes


# Values and handles of a rank that only notes: their bytes, and who still wants them.
#
# They live and end as those of a traced rank do (see `shardlab.language.tracing`).


class OutlineValue:
    """A value of an outlined rank.

    Attributes:
        part: what it is.
        layer, pieces, of: whose, and so many of so many pieces.
        room: the bytes that it takes now; 0 if it lies where another value did.
        slot: the category that they count in, by its place.
        keys, reading, alive: as of `shardlab.language.values.Value`.
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
        self.rank, self.kind, self.name = rank, kind, kind.value
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

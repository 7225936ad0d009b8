"""Memory of ranks during a step: the bytes that each rank holds, and their peak.

A `MemoryLedger` counts the bytes that a rank holds, by purpose, and their peak. All simulations use it:

- `TapeMemory` follows a tape op by op. It first adds the outputs of an op, then compares the sum with the peak, and
  then frees the values that are not needed any more. Like the executor, it knows which values lie in the memory of
  other values, and so take none of their own.
- A compressed rank (`shardlab.simulate.predict.compressed.rank`) has no tape. Its verbs add and free values in the same
  order. The passes of layers are `MemoryChange`s, which were measured on the tape of three blocks of the model. So each
  step of a compressed schedule is a `MemoryChange` as well, and the ledger of the whole schedule adds them up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from shardlab.check.buffers import NO_ARENA, Arena, Buckets, arenas_of
from shardlab.check.in_place import InPlace, KeptWeights, last_reads, view_roots
from shardlab.language import Kind, Op, OpKind, Sizes, Spec
from shardlab.language.rules.refusals import PLACES
from shardlab.language.rules.spec import Form
from shardlab.simulate.timeline.prices import Bytes, Traced


class Category(Enum):
    """Purposes of memory.

    GATHERED: gathered weights. COMMUNICATION: results of communications in flight. ARENA: the arena of the step's
    buffers (see `shardlab.check.buffers`), which lasts for the whole step.
    """

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    GATHERED = "gathered"
    COMMUNICATION = "communication"
    ARENA = "arena"


CATEGORIES = tuple(Category)
FREE, WAIT = OpKind.FREE, OpKind.WAIT
_ALL_GATHER = OpKind.ALL_GATHER
_SAVED, _RESIDUAL, _WEIGHT = Kind.SAVED, Kind.RESIDUAL, Kind.WEIGHT

_INDEX = {category: index for index, category in enumerate(CATEGORIES)}
_PARAMETERS, _GATHERED, _COMMUNICATION = (
    _INDEX[category] for category in (Category.PARAMETERS, Category.GATHERED, Category.COMMUNICATION)
)
CATEGORY_OF_KIND = dict.fromkeys(Kind, _INDEX[Category.ACTIVATIONS]) | {
    Kind.WEIGHT: _PARAMETERS,
    Kind.OPT_STATE: _INDEX[Category.OPTIMIZER],
    Kind.GRAD_WEIGHT: _INDEX[Category.GRADIENTS],
    Kind.DIRECTION: _INDEX[Category.GRADIENTS],
}


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank in a step, in bytes or in elements.

    Attributes:
        before_ops: for each op, the memory when it starts, before its own output is stored.
        during: for each op, the memory while it runs, with its own output.
        peak: the maximum of `during`.
        peak_op: index of the first op that reaches the peak.
        by_category: the memory at the peak, in the order of `CATEGORIES`.
        counters: for each op, the memory while it runs, by category (empty unless requested).
        at_starts: for each op, the memory when it starts, by category (empty unless requested).
    """

    before_ops: list[int]
    during: list[int]
    peak: int
    peak_op: int
    by_category: tuple[int, ...]
    counters: list[tuple[int, ...]]
    at_starts: list[tuple[int, ...]]


def live_memory(traced: Traced, of: Collection[Kind] = tuple(Kind)) -> list[list[int]]:
    """Count for each rank and op the elements that are live when the op starts, before its own output is stored.

    An output of a communication counts from the issue of the communication. The value that a layer saves counts until
    the layer's BACKWARD, or until the layer's input is freed. The outputs of an update use the memory of its inputs. A
    gradient that BACKWARD adds to an older one takes no additional memory, and neither does their sum.

    Args:
        of: the kinds of values to count.
    """
    elements = traced.program.sizes.elements

    def size(spec: Spec) -> int:
        return elements(spec) if spec.kind in of else 0

    return [TapeMemory(tape, traced.specs[row], size).run().before_ops for row, tape in enumerate(traced.program.tapes)]


def memory_in_elements(traced: Traced) -> list[RankMemory]:
    """Return the memory of each rank in elements, counted as by `live_memory`, with all categories at every op."""
    elements = traced.program.sizes.elements
    return [
        TapeMemory(tape, traced.specs[row], elements, counters=True).run()
        for row, tape in enumerate(traced.program.tapes)
    ]


def peak_elsewhere(traced: Traced) -> dict[str, int]:
    """Return the largest peak of a rank, in elements, by place outside the device to which values are offloaded."""
    used = {spec.form.place for specs in traced.specs for spec in specs.values()}
    elements, tapes = traced.program.sizes.elements, traced.program.tapes

    def peak(row: int, place: str) -> int:
        return TapeMemory(tapes[row], traced.specs[row], elements, memory=place).run().peak

    return {place: max(peak(row, place) for row in range(len(tapes))) for place in PLACES if place in used}


def peak_elsewhere_in_bytes(traced: Traced, place: str) -> list[int]:
    """Return the peak of each rank, in bytes, in a place outside its device."""
    size = Bytes(traced.program.sizes)
    tapes = enumerate(traced.program.tapes)
    return [TapeMemory(tape, traced.specs[row], size, real=True, memory=place).run().peak for row, tape in tapes]


def memory_in_bytes(traced: Traced, kept_sizes: Sizes | None = None, *, counters: bool = False) -> list[RankMemory]:
    """Return the memory of each rank in bytes, counted as the executor allocates them.

    Args:
        kept_sizes: sizes of values as they lie in memory, for example in a framework that saves other activations
            (None: the sizes of the program).
        counters: whether to count all categories at every op.
    """
    size = Bytes(kept_sizes or traced.program.sizes)
    arenas = arenas_of(traced.program, traced.specs)
    return [
        TapeMemory(
            tape, traced.specs[row], size, real=True, counters=counters, arena=arenas[row], sizes=size.sizes
        ).run()
        for row, tape in enumerate(traced.program.tapes)
    ]


CategoryBytes = tuple[int, ...]
"""Bytes, in the order of `CATEGORIES`."""

NO_BYTES: CategoryBytes = (0,) * len(CATEGORIES)


class MemoryPeak(NamedTuple):
    """Peak of a rank's memory during some work, relative to the memory when the work began.

    Attributes:
        bytes, by_category: memory at the peak minus the memory when the work began, in total and by category.
        op, layer: the op at the peak, and its layer.
    """

    bytes: int
    by_category: CategoryBytes
    op: OpKind
    layer: int


class MemoryChange(NamedTuple):
    """Change of a rank's memory by some work.

    Attributes:
        bytes, by_category: difference between the memory after and before the work, in total and by category.
        peak: the peak during the work (None: the work has no op).
    """

    bytes: int
    by_category: CategoryBytes
    peak: MemoryPeak | None


class MemoryLedger:
    """Ledger of the bytes that one rank holds.

    Attributes:
        bytes, by_category: bytes held now, in total and in the order of `CATEGORIES`.
        peak: largest memory at an op so far, with the first op that reached it (None: there was no op).
        peak_bytes: bytes of the peak.
    """

    def __init__(self) -> None:
        self.bytes: int = 0
        self.by_category = [0] * len(CATEGORIES)
        self.peak: MemoryPeak | None = None
        self.peak_bytes = -math.inf

    def hold(self, category: int, bytes: int) -> None:
        """Hold more bytes, or fewer if they are negative."""
        self.by_category[category] += bytes
        self.bytes += bytes

    def move(self, source: int, target: int, bytes: int) -> None:
        """Move bytes from one category to another."""
        self.by_category[source] -= bytes
        self.by_category[target] += bytes

    def record_peak(self, op: OpKind, layer: int) -> None:
        """Record that an op of a layer runs now. The memory held now is the new peak if it exceeds the peak so far."""
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self.peak = self.bytes, MemoryPeak(self.bytes, tuple(self.by_category), op, layer)

    def raise_peak(self, peak: MemoryPeak | None, further: int = 0) -> None:
        """Record the peak of work that begins now.

        Args:
            peak: the peak relative to the memory held now, measured on the same work in other layers (None: no op).
            further: how many layers the work lies after those other layers.
        """
        if peak is not None and self.bytes + peak.bytes > self.peak_bytes:
            by_category = tuple([a + b for a, b in zip(self.by_category, peak.by_category, strict=True)])
            self.peak_bytes = self.bytes + peak.bytes
            self.peak = MemoryPeak(self.peak_bytes, by_category, peak.op, peak.layer + further)

    def apply(self, change: MemoryChange, times: int = 1, further: int = 0) -> None:
        """Add the change of work that is repeated `times` times, each time with layers `further` layers later.

        Memory grows or falls steadily, so the peak is that of the first or the last repetition.
        """
        self.raise_peak(change.peak, further)
        if times > 1:
            self._add_bytes(change, times - 1)
            self.raise_peak(change.peak, further * times)
        self._add_bytes(change, 1)

    def _add_bytes(self, change: MemoryChange, times: int) -> None:
        self.bytes += times * change.bytes
        self.by_category = [a + times * b for a, b in zip(self.by_category, change.by_category, strict=True)]

    @property
    def change(self) -> MemoryChange:
        """Everything counted so far, as one change."""
        return MemoryChange(self.bytes, tuple(self.by_category), self.peak)


class TapeMemory(MemoryLedger):
    """Ledger of one rank in one place of memory, which follows the rank's tape.

    Args:
        tape: the ops of the rank.
        specs: the spec of every value by number.
        size: function from a spec to the bytes, or the elements, of a value.
        real: whether ALL_REDUCE and ADD overwrite an input that no later op reads, as the executor does. The puzzles
            count input and output.
        counters: whether to record all categories at every op.
        memory: the place to follow, one of `rules.refusals.PLACES` ("" for the device). Values elsewhere count 0.
        arena: the rank's arena. Values in it take no additional memory.
        sizes: the model. It determines which inputs layers keep, and whether a residual stream lies in the value that a
            layer saves. A kept input ends with the last of its layer's backward passes; any other input ends after its
            last read, as in the executor. A residual inside a saved value takes no additional memory until the saved
            value ends, or until the residual is read by an op (a message, for example) other than a forward pass that
            saves its values. Without `sizes`, inputs end when they are freed.
    """

    def __init__(
        self,
        tape: Sequence[Op],
        specs: Mapping[int, Spec],
        size: Callable[[Spec], int],
        *,
        real: bool = False,
        counters: bool = False,
        memory: str = "",
        arena: Arena = NO_ARENA,
        sizes: Sizes | None = None,
    ) -> None:
        self._tape, self._specs, self._size = tape, specs, size
        self._counts, self._memory = counters, memory
        in_place = InPlace(tape)
        buckets = Buckets(tape if real else (), in_place)
        self._views = Views(tape, specs, buckets.first)
        self._overwrites = _overwrites(tape, in_place, buckets, real)
        no_bytes = {newer for _, newer in in_place.fused.values()} | self._views.roots.keys() | arena.values
        self._fixed_bytes = dict.fromkeys(no_bytes, 0) | {
            first: sum(size(specs[number]) for number in numbers)
            for first, numbers in buckets.buffers.items()
            if first not in arena.values
        }
        self._batches, self._buffers_at = buckets.batches, buckets.staging
        self._keeps_input, self._saves_residual = (sizes.keeps_input, sizes.saves_residual) if sizes else ((), ())
        self._last_reads = last_reads(tape, specs) if self._keeps_input else {}

        values = max(specs, default=-1) + 1
        self._bytes, self._category = [0] * values, [0] * values  # of each value
        super().__init__()
        self.hold(_INDEX[Category.ARENA], arena.bytes)
        self._saved_with: dict[int, dict[Form, int]] = {}  # activation to the values that layers saved with it
        self._only_saved: set[int] = set()  # activations that only their layers still keep
        self._residual_bytes: dict[int, int] = {}  # residual inside a saved value to its bytes
        self._residual_in: dict[int, int] = {}  # saved value to the residual inside it
        self._issued: dict[int, tuple[int, ...]] = {}  # handle to the results of a communication in flight
        self._buffers: dict[int, tuple[list[int], int]] = {}  # by handle: the batch's handles, its bytes

    def run(self) -> RankMemory:
        """Follow the tape from the first op to the last."""
        before_ops, during = list[int](), list[int]()
        counters, at_starts = list[tuple[int, ...]](), list[tuple[int, ...]]()
        overwrites, last_reads, counts = self._overwrites, self._last_reads, self._counts
        peak_op = 0
        for index, op in enumerate(self._tape):
            kind = op[0]
            before_ops.append(self.bytes)
            if counts:
                at_starts.append(tuple(self.by_category))
            if kind is not FREE and kind is not WAIT:
                if op[4] >= 0:
                    self._communicate(index, op)
                else:
                    self._compute(op)
                if index in overwrites:
                    self._release(overwrites[index])
                if kind.row.ends:
                    self._update(op)
                if self.bytes > self.peak_bytes:
                    self.record_peak(kind, op[1])
                    peak_op = index
            during.append(self.bytes)
            if index in last_reads:
                self._release_input(index, op)
            if counts:
                counters.append(tuple(self.by_category))
            if kind is FREE:
                self._free(op[2][0])
            elif kind is WAIT:
                self._wait(op[4])
            elif kind.row.saved_input >= 0 or kind.row.keeps:
                self._keep_for_backward(op)
        bytes, by_category, *_ = self.peak or (self.bytes, tuple(self.by_category))
        return RankMemory(before_ops, during, bytes, peak_op, by_category, counters, at_starts)

    def _compute(self, op: Op) -> None:
        """Add the outputs of an op of the compute stream, and the value that its layer saves."""
        kind, layer, inputs, outputs = op[0], op[1], op[2], op[3]
        specs, hold = self._specs, self._hold
        saves = kind.row.keeps is _SAVED and specs[outputs[-1]][0].kind is _SAVED
        if self._residual_bytes and not saves:
            self._move_residuals_out(inputs)
        shares_residual = saves and self._saves_residual and self._saves_residual[layer]
        for number in outputs:
            spec = specs[number]
            hold(number, spec, CATEGORY_OF_KIND[spec[0].kind])
            if shares_residual and spec[0].kind is _RESIDUAL:
                self._residual_bytes[number], self._residual_in[outputs[-1]] = self._bytes[number], number
                self._release(number)

    def _communicate(self, index: int, op: Op) -> None:
        """Add the outputs of a communication or a copy, now in flight, and the buffer of its batch of collectives."""
        kind, inputs, outputs, handle = op[0], op[2], op[3], op[4]
        if self._residual_bytes:
            self._move_residuals_out(inputs)
        for number in outputs:
            spec = self._specs[number]
            gathers = kind is _ALL_GATHER and spec[0].kind is _WEIGHT and spec[0].step == 0
            self._hold(number, spec, _GATHERED if gathers else _COMMUNICATION)
        if outputs:
            self._issued[handle] = outputs
        if index in self._buffers_at:
            bytes = sum(self._size(self._specs[number]) for number in self._buffers_at[index])
            handles = [self._tape[other][4] for other in self._batches[op.batch]]
            self._buffers |= dict.fromkeys(handles, (handles, bytes))
            self.hold(_COMMUNICATION, bytes)

    def _wait(self, handle: int) -> None:
        """Move results that have arrived to the category of their kind, and free the buffer of their batch."""
        if handle in self._buffers:
            handles, bytes = self._buffers[handle]
            for other in handles:
                del self._buffers[other]
            self.hold(_COMMUNICATION, -bytes)
        for number in self._issued.pop(handle, ()):
            if self._category[number] == _COMMUNICATION:
                category = CATEGORY_OF_KIND[self._specs[number][0].kind]
                self._category[number] = category
                self.move(_COMMUNICATION, category, self._bytes[number])

    def _update(self, op: Op) -> None:
        """End the inputs that an op replaces in place: its outputs use their memory."""
        for number in self._views.release(tuple([op[2][place] for place in op[0].row.ends])):
            self._release(number)

    def _release_input(self, index: int, op: Op) -> None:
        """End the input of a forward pass if no later op reads it, or keep it for its layer's backward pass."""
        number = self._last_reads[index]
        if self._keeps_input[op.layer]:
            self._only_saved.add(number)
        else:
            self._release(number)

    def _keep_for_backward(self, op: Op) -> None:
        """After a pass of a layer, end the saved value that it read, and keep the one that it saved for a later pass.

        A kept input ends with the last saved value that belongs to it.
        """
        row, activation, specs = op[0].row, op[2][0], self._specs
        saved_values = self._saved_with.setdefault(activation, {})
        unused = list[int]()
        if row.saved_input >= 0:
            unused.append(saved_values.pop(specs[op[2][row.saved_input]][0]))
        if row.keeps and (form := specs[op[3][-1]][0]).kind is row.keeps:
            if form in saved_values:
                unused.append(saved_values[form])
            saved_values[form] = op[3][-1]
        if not saved_values and activation in self._only_saved:
            unused.append(activation)
        for number in unused:
            self._end(number)

    def _free(self, number: int) -> None:
        """End a value, and the values that layers saved with it."""
        if number not in self._saved_with and not self._views.roots:  # the usual case
            self._end(number)
            return
        for value in self._views.release((number, *self._saved_with.pop(number, {}).values())):
            self._end(value)

    def _end(self, number: int) -> None:
        """End a value. A residual inside it moves to separate memory."""
        bytes, self._bytes[number] = self._bytes[number], 0  # as `_release`, without a call
        self.by_category[self._category[number]] -= bytes
        self.bytes -= bytes
        if self._residual_bytes:
            if number in self._residual_bytes:
                del self._residual_bytes[number]
            elif number in self._residual_in:
                self._move_residuals_out((self._residual_in.pop(number),))

    def _move_residuals_out(self, numbers: Iterable[int]) -> None:
        """Move residuals that lie inside a saved value to separate memory."""
        for number in numbers:
            if number in self._residual_bytes:
                bytes = self._residual_bytes.pop(number)
                self._bytes[number] = bytes
                self.hold(self._category[number], bytes)

    def _hold(self, number: int, spec: Spec, category: int) -> None:
        """Add a value. It counts 0 bytes if it is in another place, or in another value's memory."""
        bytes = self._fixed_bytes.get(number)
        if bytes is None:
            bytes = self._size(spec) if spec[0].place == self._memory else 0
        self._bytes[number], self._category[number] = bytes, category
        self.by_category[category] += bytes
        self.bytes += bytes

    def _release(self, number: int) -> None:
        bytes, self._bytes[number] = self._bytes[number], 0
        self.by_category[self._category[number]] -= bytes
        self.bytes -= bytes


def _overwrites(tape: Sequence[Op], in_place: InPlace, buckets: Buckets, real: bool) -> dict[int, int]:
    """Return the ops whose output reuses the memory of an older value.

    The result maps the index of such an op to the older value, which counts 0 bytes after the op.
    """
    older_of = {index: older for index, (older, _) in in_place.fused.items()}
    if real:
        # A REDUCE has an output only on its root.
        reusing_ops = (index for index in in_place.first_input if index not in older_of and tape[index].outputs)
        older_of |= {index: tape[index].inputs[0] for index in reusing_ops}
    if buckets.batched:
        older_of = {
            index: older
            for index, older in older_of.items()
            if index not in buckets.batched and older not in buckets.first
        }
    return older_of


class Views:
    """Values that share memory, and the time at which their memory is freed.

    Attributes:
        roots: map from a value to the value in whose memory it lies. It has slices, values that an update writes into
            memory that slices share, and adjacent gradients (mapped to the first of them).
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], neighbours: Mapping[int, int]) -> None:
        self.roots = view_roots(tape, specs)
        if self.roots:
            loaded_states = {op.outputs[0] for op in tape if op[0] is OpKind.LOAD_OPT_STATE}
            states = {op.outputs[1]: self.roots.get(op.inputs[2]) for op in tape if op[0] is OpKind.UPDATE}
            viewed = set(self.roots.values())
            self.roots |= {number: home for number, home in KeptWeights(tape, specs).owners.items() if home in viewed}
            self.roots |= {number: root for number, root in states.items() if root in loaded_states}
        self.roots = {number: neighbours.get(root, root) for number, root in self.roots.items()}
        self.roots |= {number: first for number, first in neighbours.items() if number != first}
        self._users = Counter(self.roots.values())  # views that have not ended, and the value itself
        self._users.update(self._users.keys())

    def release(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Return the values whose memory is freed when some values end.

        Memory that another value still uses is not freed.
        """
        if not self.roots:
            return numbers
        roots = [self.roots.get(number, number) for number in numbers]
        self._users.subtract(roots)
        return tuple([root for root in roots if self._users[root] <= 0])

"""Memory of ranks during a step: which bytes each holds, and when most.

A `MemoryLedger` counts the bytes that a rank holds, by purpose, and keeps their peak. All memory is counted in one,
whatever is replayed:

- `TapeMemory` follows a tape op by op. An op first adds its outputs, then the ledger compares what is held with the
  peak, and then the values end that nobody needs any more. `TapeMemory` knows which values lie in the memory of others,
  as the executor does it.
- A compressed rank (`shardlab.simulate.predict.compressed.rank`) has no tape. Its verbs add and end values in the same
  order, and the passes of layers are `MemoryChange`s that were measured on the tape of a sample. So every compressed
  step is a `MemoryChange` as well, and the ledger of a whole schedule is the sum of its steps.
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

    GATHERED: weights put together for a use. COMMUNICATION: results that are on their way. ARENA: where buffers lie
    (see `shardlab.check.buffers`), as long as the step takes.
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
    """Memory of one rank in a step.

    Attributes:
        before: for each op what is live when it starts, before its own result is stored.
        during: for each op what is live while it runs: what was there, and its own result.
        peak: the largest of `during`.
        peak_op: index of the first op with which the peak is reached.
        by_category: the peak, in the order of `CATEGORIES`.
        counters: for each op what is live while it runs, by category (empty unless asked for).
        at_starts: for each op what is live when it starts, by category (empty unless asked for).
    """

    before: list[int]
    during: list[int]
    peak: int
    peak_op: int
    by_category: tuple[int, ...]
    counters: list[tuple[int, ...]]
    at_starts: list[tuple[int, ...]]


def live_memory(traced: Traced, of: Collection[Kind] = tuple(Kind)) -> list[list[int]]:
    """Count for each rank and op the elements that are live when the op starts, before its own output is stored.

    An output of a communication counts from its issue. What a layer keeps ends with its BACKWARD or with its
    activation. The outputs of an update take the memory of its inputs. A gradient that BACKWARD adds to an older one
    takes no memory of its own, and neither does their sum.

    Args:
        of: the kinds of values to count.
    """
    elements = traced.program.sizes.elements

    def size(spec: Spec) -> int:
        return elements(spec) if spec.kind in of else 0

    return [TapeMemory(tape, traced.specs[row], size).run().before for row, tape in enumerate(traced.program.tapes)]


def memory_in_elements(traced: Traced) -> list[RankMemory]:
    """Count elements as `live_memory` does, with all categories at every op."""
    elements = traced.program.sizes.elements
    return [
        TapeMemory(tape, traced.specs[row], elements, counters=True).run()
        for row, tape in enumerate(traced.program.tapes)
    ]


def peak_elsewhere(traced: Traced) -> dict[str, int]:
    """Return the peak of elements over all ranks in each place beside the device to which something is offloaded."""
    used = {spec.form.place for specs in traced.specs for spec in specs.values()}
    elements, tapes = traced.program.sizes.elements, traced.program.tapes

    def peak(row: int, place: str) -> int:
        return TapeMemory(tapes[row], traced.specs[row], elements, memory=place).run().peak

    return {place: max(peak(row, place) for row in range(len(tapes))) for place in PLACES if place in used}


def peak_elsewhere_in_bytes(traced: Traced, place: str) -> list[int]:
    """Return the peak of bytes of each rank in a place beside its device."""
    size = Bytes(traced.program.sizes)
    tapes = enumerate(traced.program.tapes)
    return [TapeMemory(tape, traced.specs[row], size, real=True, memory=place).run().peak for row, tape in tapes]


def memory_in_bytes(traced: Traced, kept: Sizes | None = None, *, counters: bool = False) -> list[RankMemory]:
    """Count bytes as the executor holds them, with the peak; with all categories at every op for `counters`.

    Args:
        kept: how large values are in memory, if not as traced.
    """
    size = Bytes(kept or traced.program.sizes)
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
    """Largest memory during some work, beyond what was held when the work began.

    Attributes:
        bytes, by_category: in all and by category.
        op, layer: the op that runs then, and its layer.
    """

    bytes: int
    by_category: CategoryBytes
    op: OpKind
    layer: int


class MemoryChange(NamedTuple):
    """Change of a rank's memory by some work.

    Attributes:
        bytes, by_category: how much more is held after the work than before, in all and by category.
        peak: the peak during the work (None: no op held anything).
    """

    bytes: int
    by_category: CategoryBytes
    peak: MemoryPeak | None


class MemoryLedger:
    """Ledger of the bytes that one rank holds.

    Attributes:
        bytes, by_category: held now, in all and in the order of `CATEGORIES`.
        peak: the first peak during an op so far (None: there was no op).
        peak_bytes: its bytes.
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
        """Count bytes in another category."""
        self.by_category[source] -= bytes
        self.by_category[target] += bytes

    def record_peak(self, op: OpKind, layer: int) -> None:
        """Note that an op runs now, which is a peak if more is held than ever before."""
        if self.bytes > self.peak_bytes:
            self.peak_bytes, self.peak = self.bytes, MemoryPeak(self.bytes, tuple(self.by_category), op, layer)

    def raise_peak(self, peak: MemoryPeak | None, further: int = 0) -> None:
        """Note the peak of work that begins now, in which layers lie `further` places further than the peak says."""
        if peak is not None and self.bytes + peak.bytes > self.peak_bytes:
            by_category = tuple([a + b for a, b in zip(self.by_category, peak.by_category, strict=True)])
            self.peak_bytes = self.bytes + peak.bytes
            self.peak = MemoryPeak(self.peak_bytes, by_category, peak.op, peak.layer + further)

    def apply(self, change: MemoryChange, times: int = 1, further: int = 0) -> None:
        """Add work that is done a number of times, each time with layers `further` places further.

        Bytes grow or fall steadily, so the peak is that of the first or of the last time.
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
        """All that was counted so far, as one change."""
        return MemoryChange(self.bytes, tuple(self.by_category), self.peak)


class TapeMemory(MemoryLedger):
    """Ledger of one rank in one place of memory, which follows the rank's tape.

    Args:
        tape: the ops of the rank.
        specs: the spec of every value by number.
        size: the bytes, or the elements, of a value with a spec.
        real: whether ALL_REDUCE and ADD write over an input that nobody reads any more, as the executor does. The
            puzzles count input and output.
        counters: whether to note all categories at every op.
        memory: the place to follow, one of `rules.place.PLACES` ("" for the device). Other values take no bytes.
        arena: the rank's arena. Values that lie there take no memory of their own.
        sizes: which inputs layers keep, and where a residual stream lies in what they keep. A kept input ends with the
            last of its layer's backward passes, and one that is not kept ends when it was read for the last time, as in
            the executor. A residual takes no memory of its own as long as what the layer keeps lives, and until
            anything but a forward pass that keeps all reads it: a message, for example, may have it for longer. Without
            `sizes`, inputs end when they are freed.
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
        self._saved: dict[int, dict[Form, int]] = {}  # what layers keep for an activation
        self._only_saved: set[int] = set()  # activations that nobody but their layers keeps
        self._inside: dict[int, int] = {}  # residuals that lie in what layers keep, to their bytes
        self._residual_in: dict[int, int] = {}  # what layers keep, to the residual in it
        self._issued: dict[int, tuple[int, ...]] = {}  # results that are on their way, by handle
        self._buffers: dict[int, tuple[list[int], int]] = {}  # by handle: the batch's handles, its bytes

    def run(self) -> RankMemory:
        """Follow the tape from the first op to the last."""
        before, during = list[int](), list[int]()
        counters, at_starts = list[tuple[int, ...]](), list[tuple[int, ...]]()
        overwrites, last_reads, counts = self._overwrites, self._last_reads, self._counts
        peak_op = 0
        for at, op in enumerate(self._tape):
            kind = op[0]
            before.append(self.bytes)
            if counts:
                at_starts.append(tuple(self.by_category))
            if kind is not FREE and kind is not WAIT:
                if op[4] >= 0:
                    self._communicate(at, op)
                else:
                    self._compute(op)
                if at in overwrites:
                    self._release(overwrites[at])
                if kind.row.ends:
                    self._update(op)
                if self.bytes > self.peak_bytes:
                    self.record_peak(kind, op[1])
                    peak_op = at
            during.append(self.bytes)
            if at in last_reads:
                self._release_input(at, op)
            if counts:
                counters.append(tuple(self.by_category))
            if kind is FREE:
                self._free(op[2][0])
            elif kind is WAIT:
                self._wait(op[4])
            elif kind.row.saved >= 0 or kind.row.keeps:
                self._keep_for_backward(op)
        bytes, by_category, *_ = self.peak or (self.bytes, tuple(self.by_category))
        return RankMemory(before, during, bytes, peak_op, by_category, counters, at_starts)

    def _compute(self, op: Op) -> None:
        """Add the outputs of an op of the compute stream, and of what its layer keeps."""
        kind, layer, inputs, outputs = op[0], op[1], op[2], op[3]
        specs, hold = self._specs, self._hold
        saves = kind.row.keeps is _SAVED and specs[outputs[-1]][0].kind is _SAVED
        if self._inside and not saves:
            self._move_residuals_out(inputs)
        shares_residual = saves and self._saves_residual and self._saves_residual[layer]
        for number in outputs:
            spec = specs[number]
            hold(number, spec, CATEGORY_OF_KIND[spec[0].kind])
            if shares_residual and spec[0].kind is _RESIDUAL:
                self._inside[number], self._residual_in[outputs[-1]] = self._bytes[number], number
                self._release(number)

    def _communicate(self, at: int, op: Op) -> None:
        """Add the outputs of a communication or a copy, which are on their way from now on, and its batch's buffer."""
        kind, inputs, outputs, handle = op[0], op[2], op[3], op[4]
        if self._inside:
            self._move_residuals_out(inputs)
        for number in outputs:
            spec = self._specs[number]
            gathers = kind is _ALL_GATHER and spec[0].kind is _WEIGHT and spec[0].step == 0
            self._hold(number, spec, _GATHERED if gathers else _COMMUNICATION)
        if outputs:
            self._issued[handle] = outputs
        if at in self._buffers_at:
            bytes = sum(self._size(self._specs[number]) for number in self._buffers_at[at])
            handles = [self._tape[other][4] for other in self._batches[op.batch]]
            self._buffers |= dict.fromkeys(handles, (handles, bytes))
            self.hold(_COMMUNICATION, bytes)

    def _wait(self, handle: int) -> None:
        """Give results that have arrived the category of their kind, and end the buffer of their batch."""
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
        """End the inputs that an op replaces in place: its outputs take their memory."""
        for number in self._views.ended(tuple([op[2][place] for place in op[0].row.ends])):
            self._release(number)

    def _release_input(self, at: int, op: Op) -> None:
        """End the input of a forward pass that nobody reads after it, or leave it to the layer that keeps it."""
        number = self._last_reads[at]
        if self._keeps_input[op.layer]:
            self._only_saved.add(number)
        else:
            self._release(number)

    def _keep_for_backward(self, op: Op) -> None:
        """Replace what a layer keeps for the passes that are to come, once one of its passes has run."""
        row, activation, specs = op[0].row, op[2][0], self._specs
        saved = self._saved.setdefault(activation, {})
        ended = list[int]()
        if row.saved >= 0:
            ended.append(saved.pop(specs[op[2][row.saved]][0]))
        if row.keeps and (form := specs[op[3][-1]][0]).kind is row.keeps:
            if form in saved:
                ended.append(saved[form])
            saved[form] = op[3][-1]
        if not saved and activation in self._only_saved:
            ended.append(activation)
        for number in ended:
            self._end(number)

    def _free(self, number: int) -> None:
        """End a value, and what layers keep for it."""
        if number not in self._saved and not self._views.roots:  # as most are
            self._end(number)
            return
        for each in self._views.ended((number, *self._saved.pop(number, {}).values())):
            self._end(each)

    def _end(self, number: int) -> None:
        """End a value. A residual that lay in it moves into memory of its own."""
        bytes, self._bytes[number] = self._bytes[number], 0  # as `_release`, without a call
        self.by_category[self._category[number]] -= bytes
        self.bytes -= bytes
        if self._inside:
            if number in self._inside:
                del self._inside[number]
            elif number in self._residual_in:
                self._move_residuals_out((self._residual_in.pop(number),))

    def _move_residuals_out(self, numbers: Iterable[int]) -> None:
        """Give residuals that lie in what a layer keeps memory of their own."""
        for number in numbers:
            if number in self._inside:
                bytes = self._inside.pop(number)
                self._bytes[number] = bytes
                self.hold(self._category[number], bytes)

    def _hold(self, number: int, spec: Spec, category: int) -> None:
        """Add a value. It takes no bytes in another place, nor if it lies in another value's memory."""
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
    """Map each op whose output is the memory of an older value to that value, which takes no bytes from then on."""
    older_of = {at: older for at, (older, _) in in_place.fused.items()}
    if real:
        written = (at for at in in_place.first_input if at not in older_of and tape[at].outputs)  # some have a root
        older_of |= {at: tape[at].inputs[0] for at in written}
    if buckets.batched:
        older_of = {
            at: older for at, older in older_of.items() if at not in buckets.batched and older not in buckets.first
        }
    return older_of


class Views:
    """Which values take no room of their own, and when the room that they share is given back.

    Attributes:
        roots: number of a slice, or of what an update makes in memory that slices share, to the value whose memory it
            lies in; of gradients side by side, to the first.
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], neighbours: Mapping[int, int]) -> None:
        self.roots = view_roots(tape, specs)
        if self.roots:
            loaded = {op.outputs[0] for op in tape if op[0] is OpKind.LOAD_OPT_STATE}
            states = {op.outputs[1]: self.roots.get(op.inputs[2]) for op in tape if op[0] is OpKind.UPDATE}
            viewed = set(self.roots.values())
            self.roots |= {number: home for number, home in KeptWeights(tape, specs).owners.items() if home in viewed}
            self.roots |= {number: root for number, root in states.items() if root in loaded}
        self.roots = {number: neighbours.get(root, root) for number, root in self.roots.items()}
        self.roots |= {number: first for number, first in neighbours.items() if number != first}
        self._left = Counter(self.roots.values())  # views that have not ended, and the value itself
        self._left.update(self._left.keys())

    def ended(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """The values whose room is given back when some end: not those in which others still lie."""
        if not self.roots:
            return numbers
        roots = [self.roots.get(number, number) for number in numbers]
        self._left.subtract(roots)
        return tuple([root for root in roots if self._left[root] <= 0])

"""Values that share memory: ops that overwrite their input, views, and weights that are kept from step to step.

- `InPlace` finds ops that may overwrite an input because no later op reads it (`first_input`). The executor overwrites
  it, and memory simulated in bytes follows the executor; memory simulated in elements counts both input and result. If
  the gradient of a backward pass is only added to an older gradient, the backward pass does the addition itself, and
  the new gradient takes no memory (`accumulates`, `fused`). The executor and all simulated memory follow this.
- `KeptWeights` maps values to the memory that keeps a weight from step to step, and `check_kept` proves that each
  element there moves one step exactly once. A loaded weight is a view of that memory. An update writes there, whichever
  copy of the weight it reads. A new weight that arrives after the loaded value has ended is also written there. The
  executor places tensors as this class says.
- `view_roots`, `ending_ops` and the functions after them answer single questions about a tape's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlab.language import Holds, Kind, Op, OpKind, Refused, Spec
from shardlab.language.ops import COMMUNICATION, COPIES
from shardlab.language.rules.collectives import is_view
from shardlab.language.rules.kinds import ROW_KINDS, bits

FREE, WAIT = OpKind.FREE, OpKind.WAIT
LOAD_WEIGHT, SLICE, UPDATE = OpKind.LOAD_WEIGHT, OpKind.SLICE, OpKind.UPDATE
WEIGHT_BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
"""Ops whose first output is a weight's gradient."""
IN_PLACE_OPS = frozenset(kind for kind in OpKind if kind.row.in_place)
"""Ops that may overwrite their input."""

REVISITED = frozenset({LOAD_WEIGHT, SLICE, UPDATE})
"""Ops that make views of kept memory, or write to it."""

COPYING = COPIES | {SLICE, OpKind.CONCATENATE}
"""Ops that copy or cut values on one rank, without changing their numbers."""

MemoryKey = tuple[int, Holds]
"""(layer, slices) of a loaded weight: key of the memory that keeps it."""

BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})

_SPLITS = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL})


class InPlace:
    """Ops of one tape that may overwrite one of their inputs.

    Attributes:
        first_input: indices of the ALL_REDUCEs, REDUCEs, ADDs and other ops that may overwrite their first input.
        accumulates: for each BACKWARD that adds its gradient to an older one, by index: the older gradient.
        fused: for each ADD that such a BACKWARD replaces, by index: (older gradient, new gradient).
    """

    def __init__(self, tape: Sequence[Op]) -> None:
        self._tape = tape
        self._producers: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._read_until: dict[int, list[int]] = defaultdict(list)  # waits for communications that read it
        others = [(index, op) for index, op in enumerate(tape) if op[0] is not FREE]
        self._shared = {number for _, op in others if op[0] is OpKind.SLICE for number in (*op[2], *op[3])}
        writing = [(index, op) for index, op in others if op[0] in IN_PLACE_OPS and op[2]]
        watched = {number for _, op in writing for number in op[2]}
        waits = {op[4]: index for index, op in others if op[0] is WAIT}
        producers, readers = self._producers, self._readers
        for index, op in others:
            handle = op[4]
            for number in op[3]:
                if number in watched:
                    producers[number] = index if handle < 0 else waits[handle]
            for number in op[2]:
                if number in watched:
                    readers[number].append(index)
                    if handle >= 0:
                        self._read_until[number].append(waits[handle])
        self.first_input = {index for index, op in writing if self._is_last_read(op.inputs[0], index, start=index)}
        self.accumulates: dict[int, int] = {}
        self.fused: dict[int, tuple[int, int]] = {}
        for index, op in writing:
            if op.kind is OpKind.ADD:
                self._fuse(index, op)

    def _is_last_read(self, number: int, reader: int, start: int) -> bool:
        """Return whether `reader` is the only op that reads a value from op `start` on.

        Communications in flight count as readers. If a slice shares the memory, the result is always False.
        """
        if number in self._shared:
            return False
        for index in self._readers[number]:
            if index >= start and index != reader:
                return False
        ends = self._read_until.get(number, ())
        own_reads = 1 if self._tape[reader].handle >= 0 else 0  # an all_reduce's own read ends with it
        return len(ends) <= own_reads or sum(end > start for end in ends) <= own_reads

    def _fuse(self, index: int, op: Op) -> None:
        """Record the ADD of a new gradient to an older one, if the backward pass can do it."""
        older, newer = op.inputs
        if self._producers[older] > self._producers[newer]:
            older, newer = newer, older
        backward = self._producers[newer]
        if (
            self._tape[backward].kind in WEIGHT_BACKWARDS
            and self._tape[backward].outputs[0] == newer
            and self._readers[newer] == [index]
            and self._producers[older] < backward
            and self._is_last_read(older, index, start=backward)
        ):
            self.accumulates[backward] = older
            self.fused[index] = (older, newer)


class KeptWeights:
    """Memory of one rank that lasts from step to step, and the values that its tape writes there.

    Attributes:
        loads: the memory that each loaded weight views, in the tape's order.
        place_of: for each memory, its place (the `place` of a form).
        roots: the value that each slice views (from `view_roots`).
        owners: for each slice and each new weight, the value in whose memory it lies. An update writes a new weight
            over the kept weight or over the copy that it reads.
        copied_updates: the updates that write to a copy, because the weight is kept in another place: map from the
            index of the update to the memory that keeps the weight.
        refreshed: indices of the copied updates whose copy may have been rounded, or comes from another rank. Before
            the update, the kept weight is copied into that copy.
        final: for each weight that the step leaves behind: the memory from which the next step loads it.
        arriving: final weights that a communication delivers into kept memory. Only communications that move values
            qualify (a reduction's buffer holds other contents until it completes), and only after the last use of the
            old weight and its slices.
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec]) -> None:
        loads = [op for op in tape if op[0] is LOAD_WEIGHT and op.holds is not None]
        self.loads: dict[int, MemoryKey] = {op.outputs[0]: (op.layer, op.holds) for op in loads if op.holds is not None}
        self.place_of = {(op.layer, op.holds): op.place for op in loads if op.holds is not None}
        self._number_of = {key: number for number, key in self.loads.items()}
        self.roots = view_roots(tape, specs)
        self.owners: dict[int, int] = {}
        self.copied_updates: dict[int, MemoryKey] = {}
        self._find_owners(tape, specs)
        self.refreshed = self._find_refreshed(tape) if self.copied_updates else set[int]()
        ends = ending_ops(tape)
        last = memory_ends(ends, self.roots)
        self.final: dict[int, MemoryKey] = {}
        self.arriving: set[int] = set()
        for index, op in enumerate(tape):
            for number in op[3]:
                form = specs[number].form
                if form.kind is Kind.WEIGHT and form.step and number not in ends:
                    key = (form.layer, form.holds)
                    if key in self.place_of and self.place_of[key] == form.place:
                        self.final[number] = key
                        moves = op[0] in COMMUNICATION and not op[0].row.in_place
                        if moves and last.get(self._number_of[key], index) < index:
                            self.arriving.add(number)

    def memory_of(self, layer: int, holds: Holds) -> MemoryKey | None:
        """Return the first kept memory of a layer's weight that contains the slices `holds`.

        An update of these slices writes to this memory, unless it reads a copy of the weight in another place. The
        result is None if the rank loads no weight with these slices; the optimizer state then has memory of its own.
        """
        return next((key for key in self.loads.values() if key[0] == layer and key[1].contains(holds)), None)

    def _find_owners(self, tape: Sequence[Op], specs: Mapping[int, Spec]) -> None:
        for index, op in enumerate(tape):
            if op[0] is SLICE and op[3][0] in self.roots:
                self.owners[op[3][0]] = self.owners.get(op[2][0], op[2][0])
            elif op[0] is UPDATE:
                weight, key = op[2][1], self.memory_of(op.layer, specs[op[2][2]].holds)
                if key is not None and self.place_of[key] == specs[weight].form.place:
                    self.owners[op[3][0]] = self._number_of[key]
                elif key is not None:
                    self.owners[op[3][0]] = self.owners.get(weight, weight)
                    self.copied_updates[index] = key

    def _find_refreshed(self, tape: Sequence[Op]) -> set[int]:
        """Return the copied updates whose weight is not an exact copy of this rank's loaded weight."""
        plain = set(self.loads)
        for op in tape:
            if op[0] in COPYING and plain.issuperset(op[2]):
                plain.update(op[3])
        return {index for index in self.copied_updates if tape[index].inputs[1] not in plain}


def check_kept(rank: int, tape: Sequence[Op], specs: Mapping[int, Spec], places: Sequence[int]) -> None:
    """Prove that each element of a kept weight moves one step once, and that no op reads an overwritten value.

    Args:
        places: indices of the tape's ops whose kinds are in `REVISITED`; other indices may be among them.

    Raises:
        Refused: for a second update of some elements, an update after their new values have arrived, and a read of a
            weight, also by a communication in flight, after an update has overwritten it.
    """
    concerned = [op for op in map(tape.__getitem__, places) if op[0] in REVISITED]
    loads = [op for op in concerned if op[0] is LOAD_WEIGHT]
    updates = [op for op in concerned if op[0] is UPDATE]
    loaded_values = {op.outputs[0] for op in loads}
    one_each = len({op.layer for op in loads}) == len(loads) and len(concerned) == len(loads) + len(updates)
    if one_each and all(op[2][1] in loaded_values for op in updates):
        return  # each layer has one loaded weight, and its update reads and ends that weight
    weights = KeptWeights(tape, specs)
    memory = WeightMemory(tape, specs, weights)
    for index, op in enumerate(tape):
        try:
            memory.step(index, op)
        except Refused as refusal:
            raise refusal.at(rank, index) from None


class WeightMemory:
    """State of a replay of one tape: the slices that updates have moved on, and the memory that was overwritten."""

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], weights: KeptWeights) -> None:
        self.tape = tape
        self.specs = specs
        self.weights = weights
        self.moves: dict[MemoryKey, list[tuple[Holds, int]]] = defaultdict(list)  # (slices, op that moved them)
        self.writes: dict[int, list[tuple[Holds, int]]] = defaultdict(list)  # value -> (slices, op that overwrote them)
        self.reading: dict[int, int] = {}  # handle -> the weight that its communication reads

    def step(self, index: int, op: Op) -> None:
        """Advance by one op.

        Raises:
            Refused: if the op updates slices a second time, or reads overwritten memory.
        """
        kind = op[0]
        if kind is FREE or kind is SLICE:  # the uses of a slice count as its reads
            return
        if kind is WAIT:
            self.reading.pop(op.handle, None)
            return
        if kind is UPDATE:
            self._update(index, op)
        for number in op[2]:
            if self.specs[number].kind is Kind.WEIGHT:
                updated = kind is UPDATE and number == op[2][1]
                if not updated:  # an update reads the state's slices alone, which _update checks
                    self._read(op, number)
                if op.handle >= 0:
                    self.reading[op.handle] = number
        if op.handle >= 0:
            for number in op[3]:
                if number in self.weights.arriving:
                    key = self.weights.final[number]
                    self.moves[key].append((key[1], index))

    def _update(self, index: int, op: Op) -> None:
        """Record an update. Refuse it if its slices have moved already, or if a communication in flight reads them."""
        holds, home = self.specs[op.inputs[2]].holds, self.weights.owners.get(op.outputs[0], -1)
        key = self.weights.memory_of(op.layer, holds) or (op.layer, holds)  # else the state has memory of its own
        for slices, earlier in (*self.moves[key], *self.writes.get(home, ())):
            if (twice := slices & holds).mask:
                raise _moved_twice(op, twice, self.tape[earlier], earlier)
        self.moves[key].append((holds, index))
        if home < 0:
            return
        for handle, number in self.reading.items():
            overlaps = self.weights.owners.get(number, number) == home and (self.specs[number].holds & holds).mask
            if number != op.inputs[1] and overlaps:
                reader = next(other for other in self.tape if other.handle == handle)
                fault = f"writes over {self.specs[number]}, but {reader} (handle {handle}) is still reading that"
                raise Refused("in flight", op.about, fault, "wait for it first")
        self.writes[home].append((holds, index))

    def _read(self, op: Op, number: int) -> None:
        """Refuse to read a weight that an update has overwritten."""
        for slices, writer in self.writes.get(self.weights.roots.get(number, number), ()):
            if (slices & self.specs[number].holds).mask:
                fault = (
                    f"{self.specs[number]} is read here, but op {writer} {self.tape[writer]} has written its new "
                    "values there"
                )
                raise Refused("written over", op.about, fault, "read it before that, or update it itself")


def view_roots(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each slice that is a view to the value whose memory it shares. That value is not a slice."""
    roots: dict[int, int] = {}
    for op in tape:
        if op[0] is OpKind.SLICE:
            (whole,), (part,) = op[2], op[3]
            if is_view(specs[whole], specs[part]):
                roots[part] = roots.get(whole, whole)
    return roots


def last_reads(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map the last FORWARD or RECOMPUTE that reads an activation, by index, to this activation.

    Backward passes do not count: they name the activation, but read the value that the layer saved.
    """
    waits = {op[4]: index for index, op in enumerate(tape) if op[0] is OpKind.WAIT}
    last: dict[int, int] = {}
    shared: set[int] = set()
    for index, op in enumerate(tape):
        kind = op[0]
        if kind is OpKind.FREE or kind is OpKind.WAIT:
            continue
        until = waits[op[4]] if op[4] >= 0 else index
        for number in op[2][1:] if kind in BACKWARDS else op[2]:
            last[number] = max(last.get(number, 0), until)
        if kind is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    keeping = ((index, op) for index, op in enumerate(tape) if op[0].row.keeps is Kind.SAVED)
    return {
        index: op[2][0]
        for index, op in keeping
        if specs[op[3][-1]].kind is Kind.SAVED and last[op[2][0]] == index and op[2][0] not in shared
    }


def last_copies(tape: Sequence[Op], specs: Mapping[int, Spec]) -> set[int]:
    """Return the indices of the REDUCE_SCATTERs and ALL_TO_ALLs of rows that are the last readers of their input.

    The executor sends a copy of such an input.
    """
    readers: dict[int, list[int]] = defaultdict(list)
    shared: set[int] = set()
    for index, op in enumerate(tape):
        if op[0] is not OpKind.FREE:
            for number in op[2]:
                readers[number].append(index)
        if op[0] is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    waits = {op[4]: index for index, op in enumerate(tape) if op[0] is OpKind.WAIT}

    def is_last(index: int, number: int) -> bool:
        return all(max(other, waits.get(tape[other][4], 0)) < index for other in readers[number] if other != index)

    return {
        index
        for index, op in enumerate(tape)
        if op[0] in _SPLITS
        and specs[op[2][0]].kind in ROW_KINDS
        and op[2][0] not in shared
        and is_last(index, op[2][0])
    }


def ending_ops(tape: Sequence[Op]) -> dict[int, int]:
    """Map each value that ends to the index of the op that ends it."""
    ends: dict[int, int] = {}
    for index, op in enumerate(tape):
        for place in op[0].row.ends:
            ends[op[2][place]] = index
    return ends


def memory_ends(ends: Mapping[int, int], roots: Mapping[int, int]) -> dict[int, int]:
    """Map each value that is not a view to the op that frees its memory: the end of the value, or of its last view."""
    last = {number: index for number, index in ends.items() if number not in roots}
    for view, root in roots.items():
        if view not in ends:
            last.pop(root, None)
        elif root in last:
            last[root] = max(last[root], ends[view])
    return last


def _moved_twice(op: Op, twice: Holds, mover: Op, index: int) -> Refused:
    """Return the refusal of an update of slices that have moved already."""
    part = "all" if twice.complete else twice.slices_text
    of = f"{part} of the weights[{op.layer}] that this rank keeps"
    if mover.kind is UPDATE:
        fault = (
            f"op {index} {mover} has moved {of} one step on already, for another optimizer state; each element moves "
            "once a step"
        )
        remedy = "load one optimizer state for each slice, and no two that overlap"
        return Refused("moved twice", op.about, fault, remedy, doubled=bits(twice.mask))
    fault = (
        f"op {index} {mover} has put the new values of {of} in the old ones' place; this update would move them a "
        "second step"
    )
    remedy = "update before they arrive, or load no optimizer state of what other ranks update"
    return Refused("stepped again", op.about, fault, remedy, doubled=bits(twice.mask))

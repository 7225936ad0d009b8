"""Ops of a tape that may write over what they read, because nobody reads it any more.

A layer adds a gradient to one that is there already; so a BACKWARD or BACKWARD_WEIGHT whose gradient is only added to
an older one does the ADD itself, and the new gradient never takes room of its own: simulated memory and the executor
both follow this.
The other reuse (`first_input`) is the executor's alone; simulated memory counts input and result of those ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlab.language import Holds, Kind, Op, OpKind, Refused, Spec
from shardlab.language.ops import COMMUNICATION, COPIES
from shardlab.language.rules.collectives import is_view
from shardlab.language.rules.kinds import ROW_KINDS, bits, common, listed

FREE, WAIT = OpKind.FREE, OpKind.WAIT
WEIGHT_BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT})
"""Ops whose first output is a weight's gradient."""
WRITING = frozenset(kind for kind in OpKind if kind.row.in_place)
"""Ops that may write over what they read."""


class InPlace:
    """Ops of one tape that may be done in place.

    Attributes:
        first_input: indices of the ALL_REDUCEs and ADDs that may write over their first input, and REDUCEs.
        accumulates: index of a BACKWARD to the number of the older gradient that it adds its own to.
        fused: index of the ADD that such a BACKWARD has done to (older gradient, new gradient).
    """

    def __init__(self, tape: Sequence[Op]) -> None:
        self._tape = tape
        self._made: dict[int, int] = {}
        self._readers: dict[int, list[int]] = defaultdict(list)
        self._read_until: dict[int, list[int]] = defaultdict(list)  # when a communication that reads it has ended
        others = [(at, op) for at, op in enumerate(tape) if op[0] is not FREE]
        self._shared = {number for _, op in others if op[0] is OpKind.SLICE for number in (*op[2], *op[3])}
        writing = [(at, op) for at, op in others if op[0] in WRITING and op[2]]
        watched = {number for _, op in writing for number in op[2]}
        waits = {op[4]: at for at, op in others if op[0] is WAIT}
        made, readers = self._made, self._readers
        for at, op in others:
            handle = op[4]
            for number in op[3]:
                if number in watched:
                    made[number] = at if handle < 0 else waits[handle]
            for number in op[2]:
                if number in watched:
                    readers[number].append(at)
                    if handle >= 0:
                        self._read_until[number].append(waits[handle])
        self.first_input = {at for at, op in writing if self._last_read(op.inputs[0], at, before=at)}
        self.accumulates: dict[int, int] = {}
        self.fused: dict[int, tuple[int, int]] = {}
        for at, op in writing:
            if op.kind is OpKind.ADD:
                self._fuse(at, op)

    def _last_read(self, number: int, reader: int, before: int) -> bool:
        """Whether `reader` is the only one to read a value from op `before` on, communications in flight included.

        Of memory that a slice shares nobody says so.
        """
        if number in self._shared:
            return False
        for at in self._readers[number]:
            if at >= before and at != reader:
                return False
        ends = self._read_until.get(number, ())
        own = 1 if self._tape[reader].handle >= 0 else 0  # an all_reduce's own reading ends with it
        return len(ends) <= own or sum(end > before for end in ends) <= own

    def _fuse(self, at: int, op: Op) -> None:
        older, newer = op.inputs
        if self._made[older] > self._made[newer]:
            older, newer = newer, older
        backward = self._made[newer]
        if (
            self._tape[backward].kind in WEIGHT_BACKWARDS
            and self._tape[backward].outputs[0] == newer
            and self._readers[newer] == [at]
            and self._made[older] < backward
            and self._last_read(older, at, before=backward)
        ):
            self.accumulates[backward] = older
            self.fused[at] = (older, newer)


# Weights that a rank keeps from step to step: who writes them, and whether each element moves one step once.
#
# A loaded weight is a view of memory that the rank keeps. An update writes there whatever copy of the weight it is
# given, and so does a new weight that arrives after the loaded value has ended. So two optimizer states of one weight
# have one owner, and a state is not stepped in memory that has moved on already. The executor puts tensors where this
# module says.


LOAD_WEIGHT, SLICE, UPDATE = (
    OpKind.LOAD_WEIGHT,
    OpKind.SLICE,
    OpKind.UPDATE,
)
CONCERNED = frozenset({LOAD_WEIGHT, SLICE, UPDATE})
"""Ops that make views of kept memory, or write it."""

COPYING = COPIES | {SLICE, OpKind.CONCATENATE}
"""Ops that make values of the same numbers, on one rank."""

Key = tuple[int, Holds]
"""(layer, slices) of a loaded weight: the name of the memory that keeps it."""


class Kept:
    """Memory of one rank that lasts from step to step, and what its tape puts there.

    Attributes:
        loaded: number of a loaded weight to the memory that it is a view of, in the tape's order.
        places: where each memory is, as a form's `place` says.
        roots: number of a slice to that of the value that it is a view of, as `roots_of` has it.
        homes: number of each value that lies in another one's memory to that: of slices, and of what an update writes
            over the weight that the rank keeps, or over the copy that it is given.
        carried: index of each update that writes the copy that it is given, since the weight is kept in another place,
            to the memory that keeps it.
        renewed: indices of those of them whose copy may have been rounded, or is another rank's: what is kept is copied
            there before it is stepped.
        final: number of a weight that the step leaves to the memory that the next step loads it from.
        arrives: those of them that are received there: by a communication that moves values, once the old one and all
            its slices have ended. (A reduction has other numbers in its room until it ends, and these may still be
            read.)
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec]) -> None:
        loads = [op for op in tape if op[0] is LOAD_WEIGHT and op.holds is not None]
        self.loaded: dict[int, Key] = {op.outputs[0]: (op.layer, op.holds) for op in loads if op.holds is not None}
        self.places = {(op.layer, op.holds): op.place for op in loads if op.holds is not None}
        self._number_of = {key: number for number, key in self.loaded.items()}
        self.roots = roots_of(tape, specs)
        self.homes: dict[int, int] = {}
        self.carried: dict[int, Key] = {}
        self._find_homes(tape, specs)
        self.renewed = self._renewed(tape) if self.carried else set[int]()
        ended = ends_of(tape)
        last = last_ends(ended, self.roots)
        self.final: dict[int, Key] = {}
        self.arrives: set[int] = set()
        for at, op in enumerate(tape):
            for number in op[3]:
                form = specs[number].form
                if form.kind is Kind.WEIGHT and form.step and number not in ended:
                    key = (form.layer, form.holds)
                    if key in self.places and self.places[key] == form.place:
                        self.final[number] = key
                        moves = op[0] in COMMUNICATION and not op[0].row.in_place
                        if moves and last.get(self._number_of[key], at) < at:
                            self.arrives.add(number)

    def owner(self, layer: int, holds: Holds) -> Key | None:
        """The memory that keeps what a state's update moves: the first that contains its slices.

        An update writes it, unless it is given a copy of the weight in another place. None: the state has its own.
        """
        return next((key for key in self.loaded.values() if key[0] == layer and key[1].contains(holds)), None)

    def _find_homes(self, tape: Sequence[Op], specs: Mapping[int, Spec]) -> None:
        for at, op in enumerate(tape):
            if op[0] is SLICE and op[3][0] in self.roots:
                self.homes[op[3][0]] = self.homes.get(op[2][0], op[2][0])
            elif op[0] is UPDATE:
                weight, key = op[2][1], self.owner(op.layer, specs[op[2][2]].holds)
                if key is not None and self.places[key] == specs[weight].form.place:
                    self.homes[op[3][0]] = self._number_of[key]
                elif key is not None:
                    self.homes[op[3][0]] = self.homes.get(weight, weight)
                    self.carried[at] = key

    def _renewed(self, tape: Sequence[Op]) -> set[int]:
        """The carried updates that are given no plain copy of what this rank has loaded."""
        plain = set(self.loaded)
        for op in tape:
            if op[0] in COPYING and plain.issuperset(op[2]):
                plain.update(op[3])
        return {at for at in self.carried if tape[at].inputs[1] not in plain}


def check_kept(rank: int, tape: Sequence[Op], specs: Mapping[int, Spec], places: Sequence[int]) -> None:
    """Want each element of a kept weight to move one step once, and nobody to read a value that was written over.

    Args:
        places: indices of the tape's ops of the kinds in `CONCERNED`, perhaps with others.

    Raises:
        Refused: for a second update of some elements, an update after their new values have arrived, and a read of a
            weight, in flight or not, after an update has written its new values there.
    """
    concerned = [op for op in map(tape.__getitem__, places) if op[0] in CONCERNED]
    loads = [op for op in concerned if op[0] is LOAD_WEIGHT]
    updates = [op for op in concerned if op[0] is UPDATE]
    own = {op.outputs[0] for op in loads}
    one_each = len({op.layer for op in loads}) == len(loads) and len(concerned) == len(loads) + len(updates)
    if one_each and all(op[2][1] in own for op in updates):
        return  # each layer's one loaded weight is what its update is given, and so it ends there
    kept = Kept(tape, specs)
    memory = Memory(tape, specs, kept)
    for at, op in enumerate(tape):
        try:
            memory.follow(at, op)
        except Refused as refusal:
            raise refusal.at(rank, at) from None


class Memory:
    """Weights that have moved on, and memory that has been written over, up to an op of the tape."""

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], kept: Kept) -> None:
        self.tape = tape
        self.specs = specs
        self.kept = kept
        self.moved: dict[Key, list[tuple[Holds, int]]] = defaultdict(list)  # slices of what is kept, by which op
        self.written: dict[int, list[tuple[Holds, int]]] = defaultdict(list)  # the same of the memory of a value
        self.reading: dict[int, int] = {}  # handle to the weight that its communication reads

    def follow(self, at: int, op: Op) -> None:
        """Go on by one op.

        Raises:
            Refused: when it moves what has moved, or reads what is no more.
        """
        kind = op[0]
        if kind is FREE or kind is SLICE:  # a slice is read where it is used
            return
        if kind is WAIT:
            self.reading.pop(op.handle, None)
            return
        if kind is UPDATE:
            self._update(at, op)
        for number in op[2]:
            if self.specs[number].kind is Kind.WEIGHT:
                updated = kind is UPDATE and number == op[2][1]
                if not updated:  # of that it needs the state's slices alone, which are seen to
                    self._read(op, number)
                if op.handle >= 0:
                    self.reading[op.handle] = number
        if op.handle >= 0:
            for number in op[3]:
                if number in self.kept.arrives:
                    key = self.kept.final[number]
                    self.moved[key].append((key[1], at))

    def _update(self, at: int, op: Op) -> None:
        holds, home = self.specs[op.inputs[2]].holds, self.kept.homes.get(op.outputs[0], -1)
        key = self.kept.owner(op.layer, holds) or (op.layer, holds)  # the state's own
        for slices, before in (*self.moved[key], *self.written.get(home, ())):
            if twice := _both(slices, holds):
                raise _moved_twice(op, twice, self.tape[before], before)
        self.moved[key].append((holds, at))
        if home < 0:
            return
        for handle, number in self.reading.items():
            overlap = self.kept.homes.get(number, number) == home and _both(self.specs[number].holds, holds)
            if number != op.inputs[1] and overlap:
                flying = next(other for other in self.tape if other.handle == handle)
                given = f"writes over {self.specs[number]}, but {flying} (handle {handle}) is still reading that"
                raise Refused("in flight", op.about, given, "wait for it first")
        self.written[home].append((holds, at))

    def _read(self, op: Op, number: int) -> None:
        """Refuse a weight of before an update that has written there; what the update has made has another root."""
        for slices, before in self.written.get(self.kept.roots.get(number, number), ()):
            if _both(slices, self.specs[number].holds):
                given = (
                    f"{self.specs[number]} is read here, but op {before} {self.tape[before]} has written its new "
                    "values there"
                )
                raise Refused("written over", op.about, given, "read it before that, or update it itself")


def _both(a: Holds, b: Holds) -> Holds | None:
    """The slices that are in both; None if there are none."""
    mine, theirs = common(a, b)
    mask = mine.mask & theirs.mask
    return Holds(mask, mine.of) if mask else None


def _moved_twice(op: Op, twice: Holds, mover: Op, before: int) -> Refused:
    """The refusal of an update of slices that have moved on already."""
    what = "all" if twice.complete else f"slices {listed(bits(twice.mask))} of {twice.of}"
    of = f"{what} of the weights[{op.layer}] that this rank keeps"
    if mover.kind is UPDATE:
        given = (
            f"op {before} {mover} has moved {of} one step on already, for another optimizer state; each element moves "
            "once a step"
        )
        remedy = "load one optimizer state for each slice, and no two that overlap"
        return Refused("moved twice", op.about, given, remedy, doubled=bits(twice.mask))
    given = (
        f"op {before} {mover} has put the new values of {of} in the old ones' place; this update would move them a "
        "second step"
    )
    remedy = "update before they arrive, or load no optimizer state of what other ranks update"
    return Refused("stepped again", op.about, given, remedy, doubled=bits(twice.mask))


# Which values of a tape lie in another one's memory.


_COPYING = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL})


def roots_of(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each slice that is a view, by number, to the value whose memory it lies in, which is no slice itself."""
    roots: dict[int, int] = {}
    for op in tape:
        if op[0] is OpKind.SLICE:
            (whole,), (part,) = op[2], op[3]
            if is_view(specs[whole], specs[part]):
                roots[part] = roots.get(whole, whole)
    return roots


BACKWARDS = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


def last_reads(tape: Sequence[Op], specs: Mapping[int, Spec]) -> dict[int, int]:
    """Map each FORWARD or RECOMPUTE that is the last to read its activation to that, by number.

    A backward pass names the activation, but goes through what the layer kept, which is not always that.
    """
    waits = {op[4]: at for at, op in enumerate(tape) if op[0] is OpKind.WAIT}
    last: dict[int, int] = {}
    shared: set[int] = set()
    for at, op in enumerate(tape):
        kind = op[0]
        if kind is OpKind.FREE or kind is OpKind.WAIT:
            continue
        until = waits[op[4]] if op[4] >= 0 else at
        for number in op[2][1:] if kind in BACKWARDS else op[2]:
            last[number] = max(last.get(number, 0), until)
        if kind is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    keeping = ((at, op) for at, op in enumerate(tape) if op[0].row.keeps is Kind.SAVED)
    return {
        at: op[2][0]
        for at, op in keeping
        if specs[op[3][-1]].kind is Kind.SAVED and last[op[2][0]] == at and op[2][0] not in shared
    }


def last_copies(tape: Sequence[Op], specs: Mapping[int, Spec]) -> set[int]:
    """Find the REDUCE_SCATTERs and ALL_TO_ALLs of rows that are the last to read these: they send a copy of them."""
    readers: dict[int, list[int]] = defaultdict(list)
    shared: set[int] = set()
    for at, op in enumerate(tape):
        if op[0] is not OpKind.FREE:
            for number in op[2]:
                readers[number].append(at)
        if op[0] is OpKind.SLICE:
            shared.update((*op[2], *op[3]))
    waits = {op[4]: at for at, op in enumerate(tape) if op[0] is OpKind.WAIT}

    def is_last(at: int, number: int) -> bool:
        return all(max(other, waits.get(tape[other][4], 0)) < at for other in readers[number] if other != at)

    return {
        at
        for at, op in enumerate(tape)
        if op[0] in _COPYING and specs[op[2][0]].kind in ROW_KINDS and op[2][0] not in shared and is_last(at, op[2][0])
    }


def ends_of(tape: Sequence[Op]) -> dict[int, int]:
    """Map each value that ends to the index of the op that ends it."""
    ends: dict[int, int] = {}
    for at, op in enumerate(tape):
        for place in op[0].row.ends:
            ends[op[2][place]] = at
    return ends


def last_ends(ends: Mapping[int, int], roots: Mapping[int, int]) -> dict[int, int]:
    """When the memory of each value that is no view ends: with it, or with the last of its views."""
    last = {number: at for number, at in ends.items() if number not in roots}
    for view, root in roots.items():
        if view not in ends:
            last.pop(root, None)
        elif root in last:
            last[root] = max(last[root], ends[view])
    return last

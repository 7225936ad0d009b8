"""Weights that a rank keeps from step to step: who writes them, and whether each element moves one step once.

A loaded weight is a view of memory that the rank keeps. An update writes there whatever copy of the weight it is
given, and so does a new weight that arrives after the loaded value has ended. So two optimizer states of one weight
have one owner, and a state is not stepped in memory that has moved on already. The executor puts tensors where this
module says.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from shardlab.check.views import ends_of, last_ends, roots_of
from shardlab.program import Holds, Kind, Op, OpKind, Refused, Spec
from shardlab.program.ops import COMMUNICATION
from shardlab.rules.pieces import bits, common, listed

FREE, WAIT, LOAD_WEIGHT, SLICE, UPDATE = OpKind.FREE, OpKind.WAIT, OpKind.LOAD_WEIGHT, OpKind.SLICE, OpKind.UPDATE
CONCERNED = frozenset({LOAD_WEIGHT, SLICE, UPDATE})
"""Ops that make views of kept memory, or write it."""

Key = tuple[int, Holds]
"""(layer, slices) of a loaded weight: the name of the memory that keeps it."""


class Kept:
    """Memory of one rank that lasts from step to step, and what its tape puts there.

    Attributes:
        loaded: number of a loaded weight to the memory that it is a view of, in the tape's order.
        views: those, and their slices.
        places: where each memory is, as a form's `place` says.
        final: number of a weight that the step leaves to the memory that the next step loads it from.
        arrives: those of them that are received there: by a communication that moves values, once the old one and all
            its slices have ended. (A reduction has other numbers in its room until it ends, and these may still be
            read.)
    """

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec]) -> None:
        loads = [op for op in tape if op[0] is LOAD_WEIGHT and op.holds is not None]
        self.loaded: dict[int, Key] = {op.outputs[0]: (op.layer, op.holds) for op in loads if op.holds is not None}
        self.places = {(op.layer, op.holds): op.place for op in loads if op.holds is not None}
        number_of = {key: number for number, key in self.loaded.items()}
        roots, ended = roots_of(tape, specs), ends_of(tape)
        self.views = self.loaded | {n: self.loaded[root] for n, root in roots.items() if root in self.loaded}
        last = last_ends(ended, roots)
        self.final: dict[int, Key] = {}
        self.arrives: set[int] = set()
        for at, op in enumerate(tape):
            for number in op[3]:
                form = specs[number].form
                if form.kind is Kind.WEIGHT and form.step and number not in ended:
                    key = (form.layer, form.holds)
                    if key in number_of and specs[number_of[key]].form.place == form.place:
                        self.final[number] = key
                        moves = op[0] in COMMUNICATION and not op[0].row.in_place
                        if moves and last.get(number_of[key], at) < at:
                            self.arrives.add(number)

    def owner(self, layer: int, holds: Holds) -> Key | None:
        """The memory that keeps what a state's update moves: the first that contains its slices.

        An update writes it, unless it is given a copy of the weight in another place. None: the state has its own.
        """
        return next((key for key in self.loaded.values() if key[0] == layer and key[1].contains(holds)), None)


def check_kept(rank: int, tape: Sequence[Op], specs: Mapping[int, Spec], places: Sequence[int]) -> None:
    """Want each element of a kept weight to move one step once, and nobody to read a value that was written over.

    Args:
        places: indices of the tape's ops of the kinds in `CONCERNED`, perhaps with others.

    Raises:
        Refused: for a second update of some elements, an update after their new values have arrived, and a read of a
            loaded weight, in flight or not, after an update has written it through another copy.
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
    """Kept memory that has moved on, up to an op of the tape."""

    def __init__(self, tape: Sequence[Op], specs: Mapping[int, Spec], kept: Kept) -> None:
        self.tape = tape
        self.specs = specs
        self.kept = kept
        self.moved: dict[Key, list[tuple[Holds, int, bool]]] = defaultdict(list)  # slices, by which op, if in place
        self.reading: dict[int, int] = {}  # handle to the view that its communication reads

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
            if number in self.kept.views:
                updated = kind is UPDATE and number == op[2][1]
                if not updated:  # of that it needs the state's slices alone, which are seen to
                    self._read(op, number)
                if op.handle >= 0:
                    self.reading[op.handle] = number
        if op.handle >= 0:
            for number in op[3]:
                if number in self.kept.arrives:
                    key = self.kept.final[number]
                    self.moved[key].append((key[1], at, True))

    def _update(self, at: int, op: Op) -> None:
        holds = self.specs[op.inputs[2]].holds
        key = self.kept.owner(op.layer, holds) or (op.layer, holds)  # the state's own
        for slices, before, _ in self.moved[key]:
            if twice := _both(slices, holds):
                raise _moved_twice(op, twice, self.tape[before], before)
        place = self.specs[op.inputs[1]].form.place
        in_place = self.kept.places.get(key, place) == place
        for handle, number in self.reading.items() if in_place else ():
            overlap = self.kept.views[number] == key and _both(self.specs[number].holds, holds)
            if number != op.inputs[1] and overlap:
                flying = next(other for other in self.tape if other.handle == handle)
                given = (
                    f"writes over {self.specs[number]}, whatever copy of it is given, but {flying} (handle {handle}) "
                    "is still reading that"
                )
                raise Refused("in flight", op.about, given, "wait for it first")
        self.moved[key].append((holds, at, in_place))

    def _read(self, op: Op, number: int) -> None:
        for slices, before, in_place in self.moved.get(self.kept.views[number], ()):
            if in_place and _both(slices, self.specs[number].holds):
                given = (
                    f"{self.specs[number]} is read here, but op {before} {self.tape[before]} was given another copy of "
                    "it and has written over it"
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

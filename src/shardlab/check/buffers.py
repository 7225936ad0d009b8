"""Memory that the executor itself takes for values: which share some, how large it is, and from when to when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardlab.check.in_place import WEIGHT_BACKWARDS, InPlace, Kept, ends_of, roots_of
from shardlab.common.errors import Refused
from shardlab.language import Kind, Op, OpKind, Program, Sizes, Spec
from shardlab.language.ops import COLLECTIVES
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.rules.spec import Form
from shardlab.language.tape import Communication

# The arena of a step: of two rooms that are taken at one time, none has a byte of the other's.


def check_arena(program: Program, specs: Sequence[Mapping[int, Spec]]) -> None:
    """Want every offset to be of a value that the executor makes room for, and no byte there to be another's meanwhile.

    Raises:
        Refused: at the first op whose offset is none of a room, or whose bytes are taken.
    """
    size = RoomBytes(program, specs)
    for rank, tape in enumerate(program.tapes):
        if has_arena(tape):
            _check(rank, tape, specs[rank], program, size)


def _check(rank: int, tape: Sequence[Op], specs: Mapping[int, Spec], program: Program, size: RoomBytes) -> None:
    offsets = {op.outputs[0] if op.outputs else -1: op.offset for op in tape if op.offset >= 0}
    made = {number: at for at, op in enumerate(tape) for number in op.outputs[:1]}
    taken: list[tuple[Room, int, int]] = []
    for room in rooms_of(tape, specs, program.sizes):
        given_offsets = {number: offsets.pop(number, -1) for number in room.values}
        if set(given_offsets.values()) == {-1}:
            continue
        begin, at = given_offsets[room.values[0]], made[room.values[0]]
        if given_offsets != offsets_in(room, begin, size, specs) or begin % ALIGNMENT:
            given = f"has offset {begin}, but rooms begin at multiples of {ALIGNMENT} bytes, and fill them side by side"
            raise Refused("wrong offset", tape[at].about, given, "leave offsets to the pass arena").at(rank, at)
        end = begin + size.of(room, specs)
        for other, first, last in taken:
            if begin < last and first < end and room.meets(other):
                given = (
                    f"bytes {begin}-{end - 1} of the arena are to hold {specs[room.values[0]]}, but "
                    f"{specs[other.values[0]]} lies in {first}-{last - 1} until op {other.end}"
                )
                raise Refused("room taken", tape[room.begin].about, given, "give it another offset").at(
                    rank, room.begin
                )
        taken.append((room, begin, end))
    for number in offsets:
        at = next(at for at, op in enumerate(tape) if op.offset >= 0 and (*op.outputs, -1)[0] == number)
        given = "has an offset in the arena, but the executor does not choose where its result lies"
        raise Refused("wrong offset", tape[at].about, given, "leave it out").at(rank, at)


# Batches of collectives: several of one kind that are issued together, and run as one.


BUCKETED = frozenset({OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER})
"""Collectives that may be issued together."""

FLAT = frozenset({Kind.WEIGHT, Kind.GRAD_WEIGHT})
"""Kinds of values that may be communicated together: each is one flat run of a layer's elements."""


def batches_of(tape: Sequence[Op], kinds: Collection[OpKind] = COLLECTIVES) -> dict[int, list[int]]:
    """Map the number of each batch to the indices of its ops, if these are of some kinds."""
    batches: dict[int, list[int]] = defaultdict(list)
    for at, op in enumerate(tape):
        if op.batch >= 0 and op[0] in kinds:
            batches[op.batch].append(at)
    return dict(batches)


def alike(one: Op, other: Op, specs: Mapping[int, Spec]) -> bool:
    """Whether two collectives may be issued together: they do the same to values of one kind, on one group."""
    if one[0] not in BUCKETED or (one[0], one.group, one.reduction) != (other[0], other.group, other.reduction):
        return False
    given, more = specs[one.inputs[0]], specs[other.inputs[0]]
    return given.kind in FLAT and given.kind is more.kind and given.form.dtype == more.form.dtype


def check_batches(
    program: Program, communications: Sequence[Communication], communication_of: Sequence[Mapping[int, int]]
) -> None:
    """Refuse a batch of collectives that is not the same on all its ranks.

    Raises:
        Refused: at the first collective that others issue in another batch, or alone.
    """
    batches: dict[tuple[int, int], tuple[int, ...]] = {}  # (rank, communication) to those of its batch
    for rank, tape in enumerate(program.tapes):
        for together in batches_of(tape).values():
            numbers = tuple([communication_of[rank][tape[at].handle] for at in together])
            batches |= {(rank, number): numbers for number in numbers}
    for (_, number), numbers in batches.items():
        for rank, _, at in communications[number].participants:
            theirs = batches.get((rank, number), (number,))
            if theirs != numbers:
                here = f"as one of {len(theirs)}" if len(theirs) > 1 else "alone"
                there = f"as one of {len(numbers)}" if len(numbers) > 1 else "alone"
                given = f"is issued {here}, and {there} on another rank"
                about = program.tapes[rank][at].about
                raise Refused("batch of collectives", about, given, "issue the same together on all ranks").at(rank, at)


class Buckets:
    """The memory of collectives that run as one.

    Gradients that are all-reduced together lie side by side where a backward pass makes them, if nobody reads them any
    more. What else is communicated together is copied to one buffer, and from there if it was gathered.

    Attributes:
        batches: number of a batch to the indices of its collectives.
        batched: the indices of all of them.
        first: number of a value to that of the first of those in whose memory it lies: that is taken when the first is
            made, and given back when all have ended.
        rooms: number of such a first value to the numbers of those that fill its memory, in order.
        buffers: index of the last op of a batch to the numbers of the values for which its buffer has room; it goes
            when the batch is awaited.
    """

    def __init__(self, tape: Sequence[Op], in_place: InPlace) -> None:
        self.batches = batches_of(tape)
        self.batched = {at for together in self.batches.values() for at in together}
        self.first: dict[int, int] = {}
        self.rooms: dict[int, list[int]] = {}
        self.buffers: dict[int, list[int]] = {}
        if not self.batches:
            return
        made = {number: at for at, op in enumerate(tape) for number in op.outputs}
        for together in self.batches.values():
            ops = [tape[at] for at in together]
            given, results = [op.inputs[0] for op in ops], [op.outputs[0] for op in ops]
            if ops[0].kind is OpKind.ALL_GATHER:
                self.buffers[together[-1]] = [*given, *results]
                continue
            chains: list[list[int]] = []
            if ops[0].kind is OpKind.ALL_REDUCE and in_place.first_input.issuperset(together):
                chains = [_chain(tape, in_place, made, number) for number in given]
            if chains and all(chains):
                origins = [chain[-1] for chain in chains]
                self._share([*origins, *results, *(number for chain in chains for number in chain)], origins, made)
                continue
            if ops[0].kind is OpKind.REDUCE_SCATTER:
                self.buffers[together[-1]] = given
            self._share(results, results, made)

    def _share(self, numbers: Sequence[int], rooms: Sequence[int], made: Mapping[int, int]) -> None:
        """Have values lie in one memory, which some of them fill."""
        first = min(rooms, key=made.__getitem__)
        self.rooms[first] = [*rooms]
        self.first |= dict.fromkeys(numbers, first)


def _chain(tape: Sequence[Op], in_place: InPlace, made: Mapping[int, int], number: int) -> list[int]:
    """A gradient, and those in whose memory it was summed, down to one that a backward pass has made; else none."""
    chain = [number]
    while tape[at := made[chain[-1]]].kind is OpKind.ADD:
        older, newer = in_place.fused.get(at, (-1, -1))
        if older >= 0:
            chain += [newer, older]
        elif at in in_place.first_input:
            chain.append(tape[at].inputs[0])
        else:
            return []
    fresh = tape[at].kind in WEIGHT_BACKWARDS and at not in in_place.accumulates
    return chain if fresh else []


ALIGNMENT = 64
"""Bytes between the offsets at which a room may begin: one cache line."""

GATHERS = frozenset({OpKind.ALL_GATHER, OpKind.GATHER})
RECEIVING = frozenset({OpKind.RECV, OpKind.BROADCAST, OpKind.SCATTER, OpKind.REDUCE_SCATTER})
MAKERS = WEIGHT_BACKWARDS | GATHERS | RECEIVING | {OpKind.ZERO_GRADIENT}
"""Ops whose first output is written into memory that the executor has taken for it; others' is torch's."""

IN_ARENA = FLAT | {Kind.ACTIVATION, Kind.GRAD_ACTIVATION}
"""Kinds of values that layers refer to no longer than the tape."""


@dataclass(frozen=True)
class Room:
    """Memory of one value, or of several side by side, and of all that is later summed or reduced there.

    Attributes:
        values: numbers of those that fill it, in the order in which they lie.
        members: all that lie there at some time, views included.
        begin: index of the op that makes the first.
        end: index of the op that ends the last (the tape's length: none does).
    """

    values: tuple[int, ...]
    members: frozenset[int]
    begin: int
    end: int

    def meets(self, other: Room) -> bool:
        """Whether both are taken at one time."""
        return self.begin < other.end and other.begin < self.end


def rooms_of(tape: Sequence[Op], specs: Mapping[int, Spec], sizes: Sizes) -> list[Room]:
    """Find the rooms of a tape that may lie in an arena, in the order in which they are taken.

    Nothing that outlives the step lies there, and nothing that an update is given, since new weights lie where the old
    ones did.
    """
    in_place = InPlace(tape)
    buckets = Buckets(tape, in_place)
    kept, roots, ends = Kept(tape, specs), roots_of(tape, specs), ends_of(tape)
    home: dict[int, int] = {}  # number of a value to that of the first in its room
    members: dict[int, list[int]] = defaultdict(list)
    begins: dict[int, int] = {}
    stays: set[int] = set()  # rooms that are not in the arena
    for at, op in enumerate(tape):
        for number in op.outputs:
            older = None if number in buckets.first else _older(at, op, number, in_place, roots)
            here = buckets.first.get(number, number) if older is None else home[older]
            home[number] = here
            members[here].append(number)
            makes = op.kind in MAKERS and number == op.outputs[0] and _may_move(op, specs[number], sizes)
            reduces = op.kind is OpKind.ALL_REDUCE and specs[number].kind is Kind.WEIGHT
            if reduces or number in kept.final or (older is None and here not in begins and not makes):
                stays.add(here)
            begins.setdefault(here, at)
        if op.kind is OpKind.UPDATE:
            stays.update(home[op.inputs[operand]] for operand in op.kind.row.ends)
    written = [tape[at] for at in in_place.first_input if tape[at].outputs]
    over = {op.inputs[0] for op in written if home[op.inputs[0]] == home[op.outputs[0]]}  # nobody reads them later
    over = over.union(*in_place.fused.values()) - buckets.first.keys()
    last = {here: max(ends.get(number, len(tape)) for number in {*all} - over) for here, all in members.items()}
    return [
        Room(tuple(buckets.rooms.get(here, [here])), frozenset(members[here]), begin, last[here])
        for here, begin in begins.items()
        if here not in stays
    ]


def _older(at: int, op: Op, number: int, in_place: InPlace, roots: Mapping[int, int]) -> int | None:
    """The value in whose memory an output lies; None if it has its own."""
    if number in roots:
        return roots[number]
    if at in in_place.fused:
        return in_place.fused[at][0]
    if number == op.outputs[0] and at in in_place.accumulates:
        return in_place.accumulates[at]
    return op.inputs[0] if at in in_place.first_input else None


def _may_move(op: Op, spec: Spec, sizes: Sizes) -> bool:
    """Whether the executor can write an op's result where it is told to."""
    form = spec.form
    if form.place or form.kind not in (FLAT if op.kind in GATHERS else IN_ARENA):
        return False
    if form.kind in FLAT and not sizes.weights[form.layer]:
        return False  # it takes no bytes
    if form.kind is Kind.ACTIVATION and sizes.keeps_input and not (*sizes.keeps_input, True)[form.layer]:
        return False  # it goes before it ends on the tape
    tokens = form.kind is Kind.ACTIVATION and not form.layer
    wider = form.kind in ROW_KINDS and form.layer > 0 and sizes.signatures[form.layer - 1].projects
    return not tokens and not wider  # both have other numbers than their kind


class RoomBytes:
    """How many bytes values take on a rank: layers' flat buffers are lengthened, so that each slice is as long.

    Attributes:
        flat: elements of each layer's buffer.
    """

    def __init__(self, program: Program, specs: Sequence[Mapping[int, Spec]]) -> None:
        self._sizes = sizes = program.sizes
        pieces = sizes.cuts(program.mesh)
        cuts = [math.prod(pieces[index] for index in layer.cut) for layer in sizes.signatures]
        for layer, of in cuts_of(specs).items():
            cuts[layer] = math.lcm(cuts[layer], of)
        self.flat = [-(-weights // (16 * cut)) * 16 * cut for weights, cut in zip(sizes.weights, cuts, strict=True)]

    def __call__(self, spec: Spec) -> int:
        form = spec.form
        if form.kind not in FLAT:
            return self._sizes.bytes(spec)
        whole, elements = self._sizes.weights[form.layer], self._sizes.elements(spec)
        length = self.flat[form.layer] // form.holds.of * form.holds.pieces
        return self._sizes.bytes(spec) // elements * length if whole else 0

    def of(self, room: Room, specs: Mapping[int, Spec]) -> int:
        """Bytes of a room."""
        return sum(self(specs[number]) for number in room.values)


def cuts_of(specs: Sequence[Mapping[int, Spec]]) -> dict[int, int]:
    """For each layer the least number of equal slices that every value of its weights is some of."""
    cuts = {layer: math.lcm(*numbers) for layer, numbers in slices_of(specs).items()}
    return defaultdict(lambda: 1, cuts)


def slices_of(specs: Sequence[Mapping[int, Spec]]) -> dict[int, set[int]]:
    """For each layer the numbers of equal slices into which values of its weights are cut."""
    numbers: dict[int, set[int]] = defaultdict(set)
    forms: set[Form] = set()
    for each in specs:
        forms.update([spec[0] for spec in each.values()])
    for form in forms:
        if form.kind not in ROW_KINDS and form.kind is not Kind.SCALAR:
            numbers[form.layer].add(form.holds.of)
    return numbers


def offsets_in(room: Room, begin: int, size: RoomBytes, specs: Mapping[int, Spec]) -> dict[int, int]:
    """Where each value of a room lies that begins at a byte."""
    starts = accumulate((size(specs[number]) for number in room.values), initial=begin)
    return dict(zip(room.values, starts, strict=False))


def has_arena(tape: Sequence[Op]) -> bool:
    """Whether any value of a tape lies in an arena."""
    return any(op[15] >= 0 for op in tape)


@dataclass(frozen=True)
class Arena:
    """Memory of one rank that is there for the whole step.

    Attributes:
        bytes: how large it is.
        values: numbers of all that lie there at some time.
        rooms: each with its first byte.
    """

    bytes: int = 0
    values: frozenset[int] = frozenset()
    rooms: tuple[tuple[Room, int], ...] = ()


NO_ARENA = Arena()


def arenas_of(program: Program, specs: Sequence[Mapping[int, Spec]]) -> list[Arena]:
    """The arena of each rank, as the offsets on its tape say."""
    if not any(map(has_arena, program.tapes)):
        return [NO_ARENA] * len(program.tapes)
    size = RoomBytes(program, specs)
    return [_arena(tape, specs[rank], program.sizes, size) for rank, tape in enumerate(program.tapes)]


def _arena(tape: Sequence[Op], specs: Mapping[int, Spec], sizes: Sizes, size: RoomBytes) -> Arena:
    offsets = {op.outputs[0]: op.offset for op in tape if op.offset >= 0}
    rooms = [room for room in rooms_of(tape, specs, sizes) if room.values[0] in offsets] if offsets else []
    at_offsets = tuple((room, offsets[room.values[0]]) for room in rooms)
    top = max((begin + size.of(room, specs) for room, begin in at_offsets), default=0)
    return Arena(top, frozenset(number for room in rooms for number in room.members), at_offsets)

"""Memory that the executor allocates for values: batches of collectives, buffers, and the arena of a step.

Read in this order. Several collectives of one kind may be issued as a *batch* and run as one (`check_batches`,
`Buckets`). A *buffer* (`Buffer`, `buffers_of`) is the memory of one value, or of several adjacent values, and of their
later sums and reductions. The *arena* is one allocation for a whole step: the pass `arena` gives buffers an offset in
it, and `check_arena` proves that buffers with overlapping lifetimes share no byte. Simulated memory, the passes and the
executor read this file; it does not import torch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from shardlab.check.in_place import WEIGHT_BACKWARDS, InPlace, KeptWeights, ending_ops, view_roots
from shardlab.common.errors import Refused
from shardlab.language import Kind, Op, OpKind, Program, Sizes, Spec
from shardlab.language.ops import COLLECTIVES
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.rules.spec import Form
from shardlab.language.tape import Communication

BUCKETED = frozenset({OpKind.ALL_REDUCE, OpKind.ALL_GATHER, OpKind.REDUCE_SCATTER})
"""Collectives that may be issued together."""

FLAT = frozenset({Kind.WEIGHT, Kind.GRAD_WEIGHT})
"""Kinds of values that a batch may communicate: each is one flat run of a layer's elements."""

ALIGNMENT = 64
"""Alignment of buffers in bytes: one cache line."""

GATHERS = frozenset({OpKind.ALL_GATHER, OpKind.GATHER})
RECEIVING = frozenset({OpKind.RECV, OpKind.BROADCAST, OpKind.SCATTER, OpKind.REDUCE_SCATTER})
MAKERS = WEIGHT_BACKWARDS | GATHERS | RECEIVING | {OpKind.ZERO_GRADIENT}
"""Ops for whose first output the executor allocates memory. For all others torch does."""

IN_ARENA = FLAT | {Kind.ACTIVATION, Kind.GRAD_ACTIVATION}
"""Kinds of values to which no layer refers after the tape has freed them, so that their memory may be used again."""


def batches_of(tape: Sequence[Op], kinds: Collection[OpKind] = COLLECTIVES) -> dict[int, list[int]]:
    """Map each batch number to the indices of its ops, for ops of some kinds."""
    batches: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(tape):
        if op.batch >= 0 and op[0] in kinds:
            batches[op.batch].append(index)
    return dict(batches)


def may_share_batch(one: Op, other: Op, specs: Mapping[int, Spec]) -> bool:
    """Return whether two collectives may be issued as one batch.

    Their op, group and reduction must be equal, and so must the kind and the dtype of their values.
    """
    if one[0] not in BUCKETED or (one[0], one.group, one.reduction) != (other[0], other.group, other.reduction):
        return False
    spec, other_spec = specs[one.inputs[0]], specs[other.inputs[0]]
    return spec.kind in FLAT and spec.kind is other_spec.kind and spec.form.dtype == other_spec.form.dtype


def check_batches(
    program: Program, communications: Sequence[Communication], communication_of: Sequence[Mapping[int, int]]
) -> None:
    """Refuse a batch of collectives that differs between its ranks.

    Raises:
        Refused: at the first collective that other members issue in another batch, or alone.
    """
    batches: dict[tuple[int, int], tuple[int, ...]] = {}  # (rank, communication) -> communications of its batch
    for rank, tape in enumerate(program.tapes):
        for batch in batches_of(tape).values():
            numbers = tuple([communication_of[rank][tape[index].handle] for index in batch])
            batches |= {(rank, number): numbers for number in numbers}
    for (_, number), numbers in batches.items():
        for rank, _, index in communications[number].participants:
            own_batch = batches.get((rank, number), (number,))
            if own_batch != numbers:
                this_text = f"as one of {len(own_batch)}" if len(own_batch) > 1 else "alone"
                other_text = f"as one of {len(numbers)}" if len(numbers) > 1 else "alone"
                fault = f"is issued {this_text}, and {other_text} on another rank"
                about = program.tapes[rank][index].about
                raise Refused("batch of collectives", about, fault, "issue the same together on all ranks").at(
                    rank, index
                )


def check_arena(program: Program, specs: Sequence[Mapping[int, Spec]]) -> None:
    """Prove that every offset belongs to a buffer, and that buffers with overlapping lifetimes share no byte.

    Raises:
        Refused: at the first op whose offset belongs to no buffer, or whose bytes are in use.
    """
    size = BufferBytes(program, specs)
    for rank, tape in enumerate(program.tapes):
        if has_arena(tape):
            _check_arena(rank, tape, specs[rank], program, size)


class Buckets:
    """Memory of the batches of collectives on one tape.

    If no op reads the gradients of an all-reduced batch after it, they are adjacent from the start: backward passes
    write them side by side. All other batches copy their inputs into a buffer first. An all-gather also copies its
    results out of a buffer.

    Attributes:
        batches: map from the number of a batch to the indices of its collectives.
        batched: the indices of all these collectives.
        first: map from a value to the first value of its shared memory. The memory is allocated when the first value is
            made, and freed when all its values have ended.
        buffers: map from the first value of a shared memory to the values that fill it, in the order of their
            addresses.
        staging: map from the index of a batch's last op to the values in the batch's staging buffer. The buffer is
            freed when the batch has been awaited.
    """

    def __init__(self, tape: Sequence[Op], in_place: InPlace) -> None:
        self.batches = batches_of(tape)
        self.batched = {index for batch in self.batches.values() for index in batch}
        self.first: dict[int, int] = {}
        self.buffers: dict[int, list[int]] = {}
        self.staging: dict[int, list[int]] = {}
        if not self.batches:
            return
        producers = {number: index for index, op in enumerate(tape) for number in op.outputs}
        for batch in self.batches.values():
            ops = [tape[index] for index in batch]
            inputs, results = [op.inputs[0] for op in ops], [op.outputs[0] for op in ops]
            if ops[0].kind is OpKind.ALL_GATHER:
                self.staging[batch[-1]] = [*inputs, *results]
                continue
            chains: list[list[int]] = []
            if ops[0].kind is OpKind.ALL_REDUCE and in_place.first_input.issuperset(batch):
                chains = [_summed_gradients(tape, in_place, producers, number) for number in inputs]
            if chains and all(chains):
                origins = [chain[-1] for chain in chains]
                self._share([*origins, *results, *(number for chain in chains for number in chain)], origins, producers)
                continue
            if ops[0].kind is OpKind.REDUCE_SCATTER:
                self.staging[batch[-1]] = inputs
            self._share(results, results, producers)

    def _share(self, numbers: Sequence[int], fillers: Sequence[int], producers: Mapping[int, int]) -> None:
        """Let values share one memory, which the `fillers` among them fill."""
        first = min(fillers, key=producers.__getitem__)
        self.buffers[first] = [*fillers]
        self.first |= dict.fromkeys(numbers, first)


@dataclass(frozen=True)
class Buffer:
    """Memory of one value, or of several adjacent values, and of their later sums and reductions.

    Attributes:
        values: the values that fill it, in the order of their addresses.
        members: all values that lie there at some time, views included.
        begin: index of the op that makes the first value.
        end: index of the op that ends the last value (the tape's length if no op does).
    """

    values: tuple[int, ...]
    members: frozenset[int]
    begin: int
    end: int

    def overlaps(self, other: Buffer) -> bool:
        """Return whether the lifetimes of two buffers overlap."""
        return self.begin < other.end and other.begin < self.end


def buffers_of(tape: Sequence[Op], specs: Mapping[int, Spec], sizes: Sizes) -> list[Buffer]:
    """Return the buffers of a tape that may lie in an arena, in the order of their first use.

    Values that outlive the step are left out, and so are the inputs of updates, which new weights overwrite.
    """
    in_place = InPlace(tape)
    buckets = Buckets(tape, in_place)
    weights, roots, ends = KeptWeights(tape, specs), view_roots(tape, specs), ending_ops(tape)
    home: dict[int, int] = {}  # value -> the first value of its buffer
    members: dict[int, list[int]] = defaultdict(list)
    begins: dict[int, int] = {}
    stays: set[int] = set()  # buffers that are not in the arena
    for index, op in enumerate(tape):
        for number in op.outputs:
            older = None if number in buckets.first else _memory_owner(index, op, number, in_place, roots)
            first = buckets.first.get(number, number) if older is None else home[older]
            home[number] = first
            members[first].append(number)
            makes = op.kind in MAKERS and number == op.outputs[0] and _can_be_placed(op, specs[number], sizes)
            reduces = op.kind is OpKind.ALL_REDUCE and specs[number].kind is Kind.WEIGHT
            if reduces or number in weights.final or (older is None and first not in begins and not makes):
                stays.add(first)
            begins.setdefault(first, index)
        if op.kind is OpKind.UPDATE:
            stays.update(home[op.inputs[operand]] for operand in op.kind.row.ends)
    writers = [tape[index] for index in in_place.first_input if tape[index].outputs]
    dead = {op.inputs[0] for op in writers if home[op.inputs[0]] == home[op.outputs[0]]}  # no op reads these later
    dead = dead.union(*in_place.fused.values()) - buckets.first.keys()
    last = {
        first: max(ends.get(number, len(tape)) for number in {*numbers} - dead) for first, numbers in members.items()
    }
    return [
        Buffer(tuple(buckets.buffers.get(first, [first])), frozenset(members[first]), begin, last[first])
        for first, begin in begins.items()
        if first not in stays
    ]


class BufferBytes:
    """Bytes that values take on a rank, with the padding of flat buffers.

    A layer's flat buffer is padded so that all its slices are equally long.

    Attributes:
        flat: elements of each layer's padded buffer.
    """

    def __init__(self, program: Program, specs: Sequence[Mapping[int, Spec]]) -> None:
        self._sizes = sizes = program.sizes
        pieces = sizes.cuts(program.mesh)
        cuts = [math.prod(pieces[index] for index in layer.cut) for layer in sizes.signatures]
        for layer, of in fewest_slices(specs).items():
            cuts[layer] = math.lcm(cuts[layer], of)
        self.flat = [-(-weights // (16 * cut)) * 16 * cut for weights, cut in zip(sizes.weights, cuts, strict=True)]

    def __call__(self, spec: Spec) -> int:
        form = spec.form
        if form.kind not in FLAT:
            return self._sizes.bytes(spec)
        whole, elements = self._sizes.weights[form.layer], self._sizes.elements(spec)
        length = self.flat[form.layer] // form.holds.of * form.holds.pieces
        return self._sizes.bytes(spec) // elements * length if whole else 0

    def total(self, buffer: Buffer, specs: Mapping[int, Spec]) -> int:
        """Return the bytes of a buffer."""
        return sum(self(specs[number]) for number in buffer.values)


def fewest_slices(specs: Sequence[Mapping[int, Spec]]) -> dict[int, int]:
    """Return, for each layer, the smallest number of equal slices such that every value of its parameters consists
    of whole slices.
    """
    cuts = {layer: math.lcm(*numbers) for layer, numbers in slice_counts(specs).items()}
    return defaultdict(lambda: 1, cuts)


def slice_counts(specs: Sequence[Mapping[int, Spec]]) -> dict[int, set[int]]:
    """Return, for each layer, all numbers of equal slices into which some value of its parameters is cut."""
    numbers: dict[int, set[int]] = defaultdict(set)
    forms: set[Form] = set()
    for rank_specs in specs:
        forms.update([spec[0] for spec in rank_specs.values()])
    for form in forms:
        if form.kind not in ROW_KINDS and form.kind is not Kind.SCALAR:
            numbers[form.layer].add(form.holds.of)
    return numbers


def value_offsets(buffer: Buffer, begin: int, size: BufferBytes, specs: Mapping[int, Spec]) -> dict[int, int]:
    """Return the offset in bytes of each value of a buffer that begins at byte `begin`."""
    starts = accumulate((size(specs[number]) for number in buffer.values), initial=begin)
    return dict(zip(buffer.values, starts, strict=False))


def has_arena(tape: Sequence[Op]) -> bool:
    """Return whether any value of a tape lies in an arena."""
    return any(op[15] >= 0 for op in tape)


@dataclass(frozen=True)
class Arena:
    """One allocation of a rank that lasts for the whole step.

    Attributes:
        bytes: size in bytes.
        values: all values that lie there at some time.
        buffers: each buffer with its first byte.
    """

    bytes: int = 0
    values: frozenset[int] = frozenset()
    buffers: tuple[tuple[Buffer, int], ...] = ()


NO_ARENA = Arena()


def arenas_of(program: Program, specs: Sequence[Mapping[int, Spec]]) -> list[Arena]:
    """Return the arena of each rank, from the offsets on its tape."""
    if not any(map(has_arena, program.tapes)):
        return [NO_ARENA] * len(program.tapes)
    size = BufferBytes(program, specs)
    return [_arena(tape, specs[rank], program.sizes, size) for rank, tape in enumerate(program.tapes)]


def _check_arena(rank: int, tape: Sequence[Op], specs: Mapping[int, Spec], program: Program, size: BufferBytes) -> None:
    offsets = {op.outputs[0] if op.outputs else -1: op.offset for op in tape if op.offset >= 0}
    producers = {number: index for index, op in enumerate(tape) for number in op.outputs[:1]}
    placed: list[tuple[Buffer, int, int]] = []
    for buffer in buffers_of(tape, specs, program.sizes):
        given_offsets = {number: offsets.pop(number, -1) for number in buffer.values}
        if set(given_offsets.values()) == {-1}:
            continue
        begin, index = given_offsets[buffer.values[0]], producers[buffer.values[0]]
        if given_offsets != value_offsets(buffer, begin, size, specs) or begin % ALIGNMENT:
            fault = f"has offset {begin}, but buffers begin at multiples of {ALIGNMENT} bytes, with adjacent values"
            raise Refused("wrong offset", tape[index].about, fault, "leave offsets to the pass arena").at(rank, index)
        end = begin + size.total(buffer, specs)
        for other, first, last in placed:
            if begin < last and first < end and buffer.overlaps(other):
                fault = (
                    f"bytes {begin}-{end - 1} of the arena are to hold {specs[buffer.values[0]]}, but "
                    f"{specs[other.values[0]]} lies in {first}-{last - 1} until op {other.end}"
                )
                raise Refused("room taken", tape[buffer.begin].about, fault, "give it another offset").at(
                    rank, buffer.begin
                )
        placed.append((buffer, begin, end))
    for number in offsets:
        index = next(index for index, op in enumerate(tape) if op.offset >= 0 and (*op.outputs, -1)[0] == number)
        fault = "has an offset in the arena, but the executor does not choose where its result lies"
        raise Refused("wrong offset", tape[index].about, fault, "leave it out").at(rank, index)


def _summed_gradients(tape: Sequence[Op], in_place: InPlace, producers: Mapping[int, int], number: int) -> list[int]:
    """Return a gradient and the older values in its memory, back to the gradient that a backward pass made.

    The list is empty if no backward pass made the first value of the memory.
    """
    chain = [number]
    while tape[index := producers[chain[-1]]].kind is OpKind.ADD:
        older, newer = in_place.fused.get(index, (-1, -1))
        if older >= 0:
            chain += [newer, older]
        elif index in in_place.first_input:
            chain.append(tape[index].inputs[0])
        else:
            return []
    fresh = tape[index].kind in WEIGHT_BACKWARDS and index not in in_place.accumulates
    return chain if fresh else []


def _memory_owner(index: int, op: Op, number: int, in_place: InPlace, roots: Mapping[int, int]) -> int | None:
    """Return the older value in whose memory an output lies; None if the output has its own memory."""
    if number in roots:
        return roots[number]
    if index in in_place.fused:
        return in_place.fused[index][0]
    if number == op.outputs[0] and index in in_place.accumulates:
        return in_place.accumulates[index]
    return op.inputs[0] if index in in_place.first_input else None


def _can_be_placed(op: Op, spec: Spec, sizes: Sizes) -> bool:
    """Return whether the executor can write an op's result to a given address."""
    form = spec.form
    if form.place or form.kind not in (FLAT if op.kind in GATHERS else IN_ARENA):
        return False
    if form.kind in FLAT and not sizes.weights[form.layer]:
        return False  # a layer without parameters
    if form.kind is Kind.ACTIVATION and sizes.keeps_input and not (*sizes.keeps_input, True)[form.layer]:
        return False  # it is freed before its FREE on the tape
    tokens = form.kind is Kind.ACTIVATION and not form.layer
    wider = form.kind in ROW_KINDS and form.layer > 0 and sizes.signatures[form.layer - 1].projects
    return not tokens and not wider  # both have another dtype than other values of their kind


def _arena(tape: Sequence[Op], specs: Mapping[int, Spec], sizes: Sizes, size: BufferBytes) -> Arena:
    offsets = {op.outputs[0]: op.offset for op in tape if op.offset >= 0}
    buffers = [buffer for buffer in buffers_of(tape, specs, sizes) if buffer.values[0] in offsets] if offsets else []
    at_offsets = tuple((buffer, offsets[buffer.values[0]]) for buffer in buffers)
    top = max((begin + size.total(buffer, specs) for buffer, begin in at_offsets), default=0)
    return Arena(top, frozenset(number for buffer in buffers for number in buffer.members), at_offsets)

"""Batches of collectives: several of one kind that are issued together, and run as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from shardlab.check.accumulation import WEIGHT_BACKWARDS, InPlace
from shardlab.errors import Refused
from shardlab.program import Kind, Op, OpKind, Program, Spec
from shardlab.program.matching import Communication
from shardlab.program.ops import COLLECTIVES

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

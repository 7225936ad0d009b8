"""Small collectives of one kind and group become one: it starts when all of them could, and costs one latency.

PyTorch's DistributedDataParallel fills buckets of 25 MB (Li et al. 2020, arXiv 2006.15704, section 3.2.3); here their
size follows from what collectives cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from functools import partial

import numpy as np

from shardlab.check import Checked
from shardlab.check.buffers import ALIGNMENT, BUCKETED, FLAT, Room, RoomBytes, offsets_in, rooms_of
from shardlab.language import Op, OpKind, Spec
from shardlab.simulate.passes.reorder import CannotApply, Ordering, Tapes, reordered
from shardlab.simulate.timeline.memory import MemoryLedger
from shardlab.simulate.timeline.prices import Bytes


def bucket(checked: Checked, parts: int) -> Tapes:
    """Fill buckets, so many at least of all that a rank communicates alike.

    Raises:
        CannotApply: when no two collectives are alike.
    """
    before = checked.program.tapes
    groups = _all_buckets(checked, parts)
    if not any(groups) and not any(_all_buckets(checked, 1)):
        raise CannotApply("no two collectives of weights or gradients are of one kind, group and dtype")
    tapes = reordered(checked, partial(_wish, groups))
    return [
        _issued_together(tape, [[before[rank][at].handle for at in each] for each in groups[rank]])
        for rank, tape in enumerate(tapes)
    ]


def _all_buckets(checked: Checked, parts: int) -> list[list[list[int]]]:
    """The buckets of each rank."""
    bytes_of = Bytes(checked.program.sizes)
    return [_buckets(tape, checked.specs[rank], bytes_of, parts) for rank, tape in enumerate(checked.program.tapes)]


def _buckets(tape: Sequence[Op], specs: Mapping[int, Spec], bytes_of: Bytes, parts: int) -> list[list[int]]:
    """The indices of the collectives that go together, in the order of the tape."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for at, op in enumerate(tape):
        if op.kind in BUCKETED and op.batch < 0 and (given := specs[op.inputs[0]]).kind in FLAT:
            alike[op.kind, op.group, op.reduction, given.kind, given.form.dtype, given.step].append(at)
    found: list[list[int]] = []
    for places in alike.values():
        sizes = [max(bytes_of(specs[number]) for number in (*tape[at].inputs, *tape[at].outputs)) for at in places]
        room, left = sum(sizes) / parts, 0.0
        together: list[int] = []
        for at, size in zip(places, sizes, strict=True):
            if not together or size > left:
                found.append(together := [])
                left = room
            together.append(at)
            left -= size
    return [each for each in found if len(each) > 1]


def _wish(groups: Sequence[list[list[int]]], order: Ordering) -> None:
    """Gathers start with the first of their bucket, reductions with the last, and are awaited where they are needed."""
    tape = order.needs.tape
    for together in groups[order.rank]:
        first, last = together[0], together[-1]
        for at in together:
            if tape[at].kind is OpKind.ALL_GATHER and not _after(order, at, first):
                order.start_before(at, first)
            elif at != last:
                order.end_before(at, last)
                order.end_before(order.needs.over(at), len(tape))


def _after(order: Ordering, at: int, first: int) -> bool:
    """Whether a gather needs what comes after the first of its bucket."""
    channel = {first, *order.needs.after[first]}
    return any(other > first and other not in channel for other in order.needs.before[at])


def _issued_together(tape: list[Op], together: Sequence[Sequence[int]]) -> list[Op]:
    """The tape with each run of neighbours of a bucket as one batch."""
    bucket_of = {handle: number for number, handles in enumerate(together) for handle in handles}
    batch = max((op.batch for op in tape), default=-1)
    made: list[Op] = []
    last = -1
    for op in tape:
        here = bucket_of.get(op.handle, -1) if op.kind in BUCKETED else -1
        if here >= 0 and here == last:
            if made[-1].batch < 0:
                batch += 1
                made[-1] = made[-1]._replace(batch=batch)
            op = op._replace(batch=batch)
        last = here
        made.append(op)
    return made


# An offset in one arena for every buffer of a step, found beforehand, since it is known when each begins and ends.
#
# The largest comes first, each goes into the smallest gap that holds it while it lives ("greedy by size", Pisarchyk
# and Lee 2020, arXiv 2001.03288, section 5.2; best fit is among the oldest rules for dynamic storage allocation,
# Wilson et al. 1995). What layers keep stays where torch puts it.


def arena(checked: Checked, _: int) -> Tapes:
    """Put all that the executor makes room for in an arena, as long as the fullest moment of the step gets no fuller.

    An arena is there for the whole step, so what would lie beside activations that are gone by then stays where it is.

    Raises:
        CannotApply: when the executor makes room for nothing.
    """
    program = checked.program
    plain = [[op._replace(offset=-1) if op.offset >= 0 else op for op in tape] for tape in program.tapes]
    size = RoomBytes(program, checked.specs)
    rooms = [rooms_of(tape, checked.specs[rank], program.sizes) for rank, tape in enumerate(plain)]
    if not any(rooms):
        raise CannotApply("nothing is received, gathered or summed, so no buffer can lie in an arena")
    bytes_of = Bytes(program.sizes)
    found: Tapes = []
    for rank, tape in enumerate(plain):
        specs = checked.specs[rank]
        live = MemoryLedger(tape, specs, bytes_of, real=True, sizes=program.sizes).run().during
        counted = [(room, size.of(room, specs), sum(bytes_of(specs[n]) for n in room.values)) for room in rooms[rank]]
        offsets: dict[int, int] = {}
        for room, begin in best_fit(counted, live):
            offsets |= offsets_in(room, begin, size, specs)
        at_offsets = ((op, offsets.get(op.outputs[0], -1) if op.outputs else -1) for op in tape)
        found.append([op if offset < 0 else op._replace(offset=offset) for op, offset in at_offsets])
    return found


def best_fit(rooms: Sequence[tuple[Room, int, int]], live: Sequence[int]) -> list[tuple[Room, int]]:
    """Find the first byte of each room in the arena; rooms with which the step would need more are left out.

    Args:
        rooms: each with its bytes, and with those that it counts for in `live`.
        live: bytes that are live during each op, all rooms among them.
    """
    rest, most = np.array(live), max(live, default=0)
    top = 0
    found: list[tuple[Room, int, int]] = []  # with the first byte, and the one after the last
    for room, size, counts in sorted(rooms, key=lambda each: (-each[1], each[0].begin)):
        begin = _gap(size, sorted((first, end) for other, first, end in found if other.meets(room)))
        taken = slice(room.begin, room.end + 1)
        rest[taken] -= counts
        if max(top, begin + size) + rest.max(initial=0) > most:
            rest[taken] += counts
            continue
        top = max(top, begin + size)
        found.append((room, begin, begin + size))
    return [(room, begin) for room, begin, _ in found]


def _gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Where the smallest gap between these bytes begins that holds so many; after the last if none does."""
    free, best, least = 0, -1, 0
    for first, end in taken:
        if size <= first - free and (best < 0 or first - free < least):
            best, least = free, first - free
        free = max(free, -(-end // ALIGNMENT) * ALIGNMENT)
    return free if best < 0 else best

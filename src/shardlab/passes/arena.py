"""An offset in one arena for every buffer of a step, found beforehand, since it is known when each begins and ends.

The largest comes first, each goes into the smallest gap that holds it while it lives ("greedy by size", Pisarchyk and
Lee 2020, arXiv 2001.03288, section 5.2; best fit is among the oldest rules for dynamic storage allocation, Wilson et
al. 1995). What layers keep stays where torch puts it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardlab.check import Checked
from shardlab.check.rooms import ALIGNMENT, Room, RoomBytes, offsets_in, rooms_of
from shardlab.passes.rewriting import CannotApply, Tapes
from shardlab.timeline.memory import MemoryLedger
from shardlab.timeline.prices import Bytes


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

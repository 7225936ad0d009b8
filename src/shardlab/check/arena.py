"""The arena of a step: of two rooms that are taken at one time, none has a byte of the other's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlab.check.rooms import ALIGNMENT, Room, RoomBytes, has_arena, offsets_in, rooms_of
from shardlab.errors import Refused
from shardlab.program import Op, Program, Spec


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

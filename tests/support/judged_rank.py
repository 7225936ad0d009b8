"""One rank's memory while its tape is judged, and its place on the tape."""

from __future__ import annotations

from typing import Any

from shardlab.program import Op, OpKind
from tests.support.pieces import BrokenTape, Piece

Kept = dict[int, tuple[int, Any, int]]


class JudgedRank:
    """What a rank has.

    Attributes:
        memory: the values that live, by number.
        saved: number to (the activation that owns it, what a forward pass has kept, and the layer).
        halves: the same, between the halves of a backward pass.
        in_flight: handle to (value read, value made).
        arrived: handle to what it has brought (None: nothing).
        loaded: what was loaded: the op's kind, the layer, and the elements.
    """

    def __init__(self, index: int, ops: list[Op]) -> None:
        self.index = index
        self.ops = ops
        self.at = 0
        self.memory: dict[int, Piece] = {}
        self.saved: Kept = {}
        self.halves: Kept = {}
        self.in_flight: dict[int, tuple[int | None, int | None]] = {}
        self.arrived: dict[int, Piece | None] = {}
        self.loaded: list[tuple[OpKind, int, tuple[int, ...]]] = []

    def read(self, number: int) -> Piece:
        if number not in self.memory:
            raise BrokenTape(f"value {number} is read but does not live")
        return self.memory[number]

    def write(self, number: int, piece: Piece) -> None:
        self.is_new(number)
        self.memory[number] = piece

    def delete(self, number: int) -> None:
        if any(read == number for read, _ in self.in_flight.values()):
            raise BrokenTape(f"value {number} ends while a communication reads it")
        self.read(number)
        del self.memory[number]
        self.drop(self.saved, number)
        self.drop(self.halves, number)

    def drop(self, kept: Kept, activation: int) -> None:
        for number in [n for n, (owner, _, _) in kept.items() if owner == activation]:
            del kept[number]

    def keep(self, kept: Kept, number: int, activation: int, data: Any, layer: int) -> None:
        self.is_new(number)
        self.drop(kept, activation)
        kept[number] = activation, data, layer

    def take(self, kept: Kept, number: int, activation: int, layer: int) -> Any:
        if number not in kept or kept[number][0] != activation:
            raise BrokenTape(f"saved {number} is read but does not live")
        if kept[number][2] != layer:
            raise BrokenTape(f"saved {number} was kept by another layer")
        return kept.pop(number)[1]

    def is_new(self, number: int) -> None:
        if number in self.memory or number in self.saved or number in self.halves:
            raise BrokenTape(f"value {number} is written over")

    def issue(self, op: Op) -> None:
        """A communication starts."""
        if op.handle in self.in_flight:
            raise BrokenTape(f"handle {op.handle} is in flight already")
        self.in_flight[op.handle] = (op.inputs[0] if op.inputs else None, op.outputs[0] if op.outputs else None)

    def wait(self, handle: int) -> bool:
        """Whether a communication has ended; what it brings is then there."""
        if handle not in self.in_flight:
            raise BrokenTape(f"rank {self.index} waits for handle {handle}, which is not in flight")
        if handle not in self.arrived:
            return False
        _, made = self.in_flight.pop(handle)
        piece = self.arrived.pop(handle)
        if (piece is None) != (made is None):
            raise BrokenTape("a communication brings a value that nobody takes, or none to one who does")
        if piece is not None and made is not None:
            self.write(made, piece)
        return True

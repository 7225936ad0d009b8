"""One rank's memory while its tape is judged, and its place on the tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardlab.language import Op, OpKind
from tests.support.judged_memory import KeptWeights
from tests.support.pieces import Array, BrokenTape, Piece

Kept = dict[int, tuple[int, Any, int, tuple[int, ...]]]


class JudgedRank:
    """What a rank has.

    Attributes:
        memory: the values that live, by number.
        saved: number to (the activation that owns it, what a forward pass has kept, the layer, and the elements of its
            weight that it is about).
        halves: the same, between the halves of a backward pass.
        weights: the memory that its loaded weights are views of.
        in_flight: handle to (value read, value made, index of the op).
        arrived: handle to what it has brought (None: nothing).
        loaded: what was loaded: the op's kind, the layer, and the elements; and where that lies.
        clips: whether an update was given a norm.
    """

    def __init__(self, index: int, ops: list[Op]) -> None:
        self.index = index
        self.ops = ops
        self.at = 0
        self.memory: dict[int, Piece] = {}
        self.saved: Kept = {}
        self.halves: Kept = {}
        self.weights = KeptWeights(ops)
        self.in_flight: dict[int, tuple[int | None, int | None, int]] = {}
        self.arrived: dict[int, Piece | None] = {}
        self.loaded: dict[tuple[OpKind, int, tuple[int, ...]], str] = {}
        self.clips = False

    def read(self, number: int) -> Piece:
        if number not in self.memory:
            raise BrokenTape(f"value {number} is read but does not live")
        return self.memory[number]

    def write(self, number: int, piece: Piece) -> None:
        self.is_new(number)
        self.memory[number] = piece

    def delete(self, number: int) -> None:
        if any(read == number for read, _, _ in self.in_flight.values()):
            raise BrokenTape(f"value {number} ends while a communication reads it")
        self.read(number)
        del self.memory[number]
        self.drop(self.saved, number)
        self.drop(self.halves, number)

    def drop(self, kept: Kept, activation: int) -> None:
        for number in [n for n, (owner, *_) in kept.items() if owner == activation]:
            del kept[number]

    def keep(self, kept: Kept, number: int, activation: int, data: Any, layer: int, where: tuple[int, ...]) -> None:
        self.is_new(number)
        for older in [n for n, (owner, _, _, about) in kept.items() if (owner, about) == (activation, where)]:
            del kept[older]
        kept[number] = activation, data, layer, where

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
        read, made = op.inputs[0] if op.inputs else None, op.outputs[0] if op.outputs else None
        self.in_flight[op.handle] = read, made, self.at

    def being_read(self) -> list[Array]:
        """What communications in flight read."""
        numbers = [read for read, _, _ in self.in_flight.values()]
        return [self.memory[read].data for read in numbers if read is not None and read in self.memory]

    def given(self, number: int) -> Piece:
        """A value as a communication takes it along: a copy, for the rank may write over its own."""
        piece = self.read(number)
        return replace(piece, data=piece.data.copy())

    def wait(self, handle: int) -> bool:
        """Whether a communication has ended; what it brings is then there."""
        if handle not in self.in_flight:
            raise BrokenTape(f"rank {self.index} waits for handle {handle}, which is not in flight")
        if handle not in self.arrived:
            return False
        _, made, issued = self.in_flight.pop(handle)
        piece = self.arrived.pop(handle)
        if (piece is None) != (made is None):
            raise BrokenTape("a communication brings a value that nobody takes, or none to one who does")
        if piece is not None and made is not None:
            piece = replace(piece, data=piece.data.copy())  # the members of a collective do not share it
            self.write(made, replace(piece, data=self.weights.take(self.ops[issued], issued, made, piece)))
        return True

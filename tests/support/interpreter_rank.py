"""One rank's memory while its tape is interpreted, and its position on the tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from shardlab.language import Op, OpKind
from tests.support.one_device import initial
from tests.support.pieces import ELEMENTS, PRIME, Array, BrokenTape, Piece

Kept = dict[int, tuple[int, Any, int, tuple[int, ...]]]


class JudgedRank:
    """Memory of a rank.

    Attributes:
        memory: the values in memory, by number.
        saved_data: by number, (the activation that owns it, data saved by a forward pass, the layer, and the elements
            of the layer's weight that were used).
        halves: the same, for data saved between the halves of a backward pass.
        weights: the memory that its loaded weights are views of.
        in_flight: by handle, (number of the input, number of the output, index of the op).
        arrived: by handle, the value that has arrived (None: none).
        load_places: memory in which a loaded value lies, by (kind of op, layer, elements).
        clips: whether an update has a norm among its inputs.
    """

    def __init__(self, index: int, ops: list[Op]) -> None:
        self.index = index
        self.ops = ops
        self.at = 0
        self.memory: dict[int, Piece] = {}
        self.saved_data: Kept = {}
        self.halves: Kept = {}
        self.weights = KeptWeights(ops)
        self.in_flight: dict[int, tuple[int | None, int | None, int]] = {}
        self.arrived: dict[int, Piece | None] = {}
        self.load_places: dict[tuple[OpKind, int, tuple[int, ...]], str] = {}
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
        self.drop(self.saved_data, number)
        self.drop(self.halves, number)

    def drop(self, store: Kept, activation: int) -> None:
        for number in [n for n, (owner, *_) in store.items() if owner == activation]:
            del store[number]

    def keep(
        self, store: Kept, number: int, activation: int, data: Any, layer: int, positions: tuple[int, ...]
    ) -> None:
        self.is_new(number)
        for older in [n for n, (owner, _, _, about) in store.items() if (owner, about) == (activation, positions)]:
            del store[older]
        store[number] = activation, data, layer, positions

    def take(self, store: Kept, number: int, activation: int, layer: int) -> Any:
        if number not in store or store[number][0] != activation:
            raise BrokenTape(f"saved {number} is read but does not live")
        if store[number][2] != layer:
            raise BrokenTape(f"saved {number} was kept by another layer")
        return store.pop(number)[1]

    def is_new(self, number: int) -> None:
        if number in self.memory or number in self.saved_data or number in self.halves:
            raise BrokenTape(f"value {number} is written over")

    def issue(self, op: Op) -> None:
        """Start a communication."""
        if op.handle in self.in_flight:
            raise BrokenTape(f"handle {op.handle} is in flight already")
        read, output = op.inputs[0] if op.inputs else None, op.outputs[0] if op.outputs else None
        self.in_flight[op.handle] = read, output, self.at

    def being_read(self) -> list[Array]:
        """Return the arrays that communications in flight read."""
        numbers = [read for read, _, _ in self.in_flight.values()]
        return [self.memory[read].data for read in numbers if read is not None and read in self.memory]

    def copy_of(self, number: int) -> Piece:
        """Return a copy of a value for a communication, since the rank may overwrite its own."""
        piece = self.read(number)
        return replace(piece, data=piece.data.copy())

    def wait(self, handle: int) -> bool:
        """Return whether a communication has ended; if so, its output is in memory."""
        if handle not in self.in_flight:
            raise BrokenTape(f"rank {self.index} waits for handle {handle}, which is not in flight")
        if handle not in self.arrived:
            return False
        _, output, issued = self.in_flight.pop(handle)
        piece = self.arrived.pop(handle)
        if (piece is None) != (output is None):
            raise BrokenTape("a communication brings a value that nobody takes, or none to one who does")
        if piece is not None and output is not None:
            piece = replace(piece, data=piece.data.copy())  # the members of a collective do not share it
            self.write(output, replace(piece, data=self.weights.take(self.ops[issued], issued, output, piece)))
        return True


# The weights that an interpreted rank keeps from step to step: buffers that its loaded weights are views of.
#
# An update writes the first loaded weight that contains its state's slice, whatever copy of the weight it was given
# in that place; if it is given a copy in another place, it writes that, and so all its slices. So does a new weight
# that arrives, in the place of one that the rank has loaded and let go. No update may write what one of them has
# written in this step, even if the right numbers have been saved elsewhere before.


Name = tuple[int, tuple[int, ...]]
"""A layer, and those of its elements that a rank keeps."""

MOVES_VALUES = (
    OpKind.ALL_GATHER, OpKind.GATHER, OpKind.RECV, OpKind.BROADCAST, OpKind.SCATTER, OpKind.OFFLOAD, OpKind.RELOAD,
)  # fmt: skip


def elements_of(op: Op) -> tuple[int, ...]:
    """Return the elements of a load; none if its slices do not exist."""
    mask, of = op.holds or (0, 0)
    if of < 1 or ELEMENTS % of or mask <= 0 or mask >> of:
        return ()
    return tuple(e for e in range(ELEMENTS) if mask >> e // (ELEMENTS // of) & 1)


class KeptWeights:
    """A rank's buffers, by layer and elements, and how its tape treats the values that are views of them.

    Attributes:
        written_masks: for each buffer, a mask of the elements that this step has written.
        twice: layers in which an update has written an element that this step had written already.
    """

    def __init__(self, ops: list[Op]) -> None:
        loads = [op for op in ops if op.kind is OpKind.LOAD_WEIGHT and op.outputs]
        self.number: dict[Name, int] = {(op.layer, elements_of(op)): op.outputs[0] for op in loads}
        self.place: dict[Name, str] = {(op.layer, elements_of(op)): op.place for op in loads}
        self.buffers = {name: initial(name[0])[0][list(name[1])] for name in self.number}
        self.written_masks = {name: np.zeros(len(name[1]), np.bool_) for name in self.number}
        self.twice: set[int] = set()
        frees = {op.inputs[0]: at for at, op in enumerate(ops) if op.kind is OpKind.FREE and op.inputs}
        self.ends = frees | {
            op.inputs[1]: at for at, op in enumerate(ops) if op.kind is OpKind.UPDATE and op.inputs[1:]
        }
        self.states: set[int] = set()  # the numbers of optimizer states, which are no weights
        for op in ops:
            if op.kind is OpKind.LOAD_OPT_STATE or self.states.intersection(op.inputs[:1]):
                self.states.update(op.outputs)
            elif op.kind is OpKind.UPDATE:
                self.states.update(op.outputs[1:])
        self.last_ends = dict(self.ends)  # with the last slice, a view of the same memory
        for op in reversed(ops):
            if op.kind is OpKind.SLICE and op.inputs and op.outputs:
                slice_end = self.last_ends.get(op.outputs[0], len(ops))
                self.last_ends[op.inputs[0]] = max(slice_end, self.last_ends.get(op.inputs[0], len(ops)))

    def step(self, layer: int, state: Piece, weight: Piece, new_weight: Array, in_flight: list[Array]) -> Array:
        """Write the new values of an update into a buffer and return them, as a view if they are contiguous."""
        positions = state.positions
        owner = next((name for name in self.buffers if name[0] == layer and set(positions) <= set(name[1])), None)
        if owner is None:
            return new_weight
        if not positions:
            raise BrokenTape("a number is no piece of a layer")
        own_buffer, places = self.buffers[owner], _places(owner[1], positions)
        # whoever is given other numbers than are kept spoils them
        new_weight = (new_weight + 7 * (own_buffer[places] - weight.data[_places(weight.positions, positions)])) % PRIME
        if self.written_masks[owner][places].any():
            self.twice.add(layer)
        self.written_masks[owner][places] = True
        buffer = own_buffer
        if self.place[owner] != state.place:
            buffer, places = weight.data, _places(weight.positions, positions)
        near = [read for read in in_flight if np.may_share_memory(buffer, read)]
        if any(np.shares_memory(buffer[place : place + 1], read) for read in near for place in places):
            raise BrokenTape("a weight is written over while a communication reads it")
        buffer[places] = new_weight
        run = slice(places[0], places[0] + len(places))
        return buffer[run] if places == list(range(run.start, run.stop)) else buffer[places]

    def take(self, op: Op, at: int, number: int, piece: Piece) -> Array:
        """Return an arrived value, written into the buffer of its old weight if that ended before op `at`."""
        positions, data = piece.positions, piece.data
        old = None if number in self.states else self.number.get((op.layer, positions))
        if old is not None and self.place[op.layer, positions] != piece.place:
            return data
        if op.kind not in MOVES_VALUES or old is None or number in self.ends or self.last_ends.get(old, at) >= at:
            return data
        buffer = self.buffers[op.layer, positions]
        if buffer.shape == data.shape:
            buffer[:] = data
            self.written_masks[op.layer, positions][:] = True
            return buffer
        return data


def _places(buffer_positions: tuple[int, ...], positions: tuple[int, ...]) -> list[int]:
    """Indices of some elements among those of a buffer."""
    return [buffer_positions.index(element) for element in positions]

"""The independent judge: executes tapes on small integer arrays and compares what comes out with one device.

It knows ops only by what they do to arrays. Neither the rules of tracing nor the checks are used here; a value is
its numbers and the places (elements of a layer, or microbatches) that they belong to. Arithmetic is exact, modulo
a prime, and each op depends on everything that it is given, so a wrong layer, microbatch, slice or version of a
weight, or a gradient counted twice, changes the numbers that come out.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import numpy as np

from shardlab.program import Op, OpKind, Program
from tests.support import interpreter_rooted
from tests.support.pieces import ELEMENTS, PRIME, Array, BrokenTape, Piece, summed
from tests.support.toy_halves import Halves
from tests.support.toy_layers import Whole

ARITY: dict[OpKind, tuple[tuple[int, ...], tuple[int, ...]]] = {
    OpKind.LOAD_WEIGHT: ((0,), (1,)),
    OpKind.LOAD_OPT_STATE: ((0,), (1,)),
    OpKind.LOAD_BATCH: ((0,), (1,)),
    OpKind.FORWARD: ((2, 3), (1, 2, 3)),
    OpKind.RECOMPUTE: ((2, 3), (1,)),
    OpKind.LOSS_STATS: ((1,), (1,)),
    OpKind.LOSS: ((1, 2), (1,)),
    OpKind.BACKWARD: ((4, 5), (2, 3)),
    OpKind.BACKWARD_INPUT: ((4, 5), (2, 3)),
    OpKind.BACKWARD_WEIGHT: ((3,), (1,)),
    OpKind.ADD: ((2,), (1,)),
    OpKind.NORM: ((1,), (1,)),
    OpKind.UPDATE: ((3, 4), (2,)),
    OpKind.ALL_REDUCE: ((1,), (1,)),
    OpKind.ALL_GATHER: ((1,), (1,)),
    OpKind.REDUCE_SCATTER: ((1,), (1,)),
    OpKind.SEND: ((1,), (0,)),
    OpKind.RECV: ((0,), (1,)),
    OpKind.WAIT: ((0,), (0,)),
    OpKind.FREE: ((1,), (0,)),
    **interpreter_rooted.ARITY,
}
"""How many values each op may read, and make; layers take and give as many as they are made for."""

PLACE = {OpKind.LOAD_WEIGHT: 0, OpKind.LOAD_OPT_STATE: 1}
"""Where the weight and its state stand in what a layer has."""

Network = Whole | Halves


class Outcome(Enum):
    RIGHT = "right"
    WRONG = "wrong"
    HANGS = "hangs"
    BROKEN = "broken"


@dataclass(frozen=True)
class Verdict:
    """Right; Wrong: other numbers than one device's; Hangs; Broken: an op cannot be done, or something is left over."""

    outcome: Outcome
    reason: str = ""

    @property
    def right(self) -> bool:
        return self.outcome is Outcome.RIGHT


# The optimizer is any function of weight, state and gradient.


def update_slice(layer: int, weight: Array, state: Array, gradient: Array, norm: int = 0) -> tuple[Array, Array]:
    gradient = gradient * (norm + 1) % PRIME
    new_state = (11 * state + gradient * gradient + layer) % PRIME
    return (weight + 5 * new_state - 3 * gradient) % PRIME, new_state


def initial(layer: int) -> tuple[Array, Array]:
    places = np.arange(ELEMENTS, dtype=np.int64) + 1000 * (layer + 1)
    return places**3 % PRIME, places**2 % PRIME


def squares(layer: int, places: tuple[int, ...], gradient: Array) -> int:
    """A part of the norm; places count, so that another slice's squares are another number."""
    where = np.array(places, np.int64) + 1000 * layer
    return int((gradient * gradient % PRIME * where % PRIME).sum() % PRIME)


def network_of(norms: tuple[bool, ...]) -> Network:
    """The network of a model in half-blocks; of one in whole layers, if nothing is said."""
    return Halves(norms) if norms else Whole()


@cache
def reference(norms: tuple[bool, ...], layers: int, microbatches: int, clips: bool) -> list[tuple[Array, Array]]:
    """Each layer's weight and state after the step on one device."""
    network, every = network_of(norms), tuple(range(ELEMENTS))
    weights = [Piece(every, initial(layer)[0]) for layer in range(layers)]
    value, residual = network.batch(tuple(range(microbatches))), None
    inputs: list[Piece] = []
    kept: list[Any] = []
    for layer, weight in enumerate(weights):
        is_norm = bool(norms) and norms[layer]
        (y, *handed_on), saved = network.forward(layer, [value, weight, *([residual] if is_norm and residual else [])])
        inputs.append(value)
        kept.append(saved)
        value, residual = y, handed_on[0] if handed_on else residual
        if layer == layers - 2 and norms:
            residual = None
    gradient, from_above = network.loss([value]), None
    gradients: list[Array] = []
    for layer in reversed(range(layers)):
        above = [from_above] if norms and norms[layer] and from_above else []
        read = [inputs[layer], gradient, weights[layer], *above]
        (below, *residuals), half = network.backward_input(layer, read, kept[layer])
        gradients.insert(0, network.backward_weight(layer, inputs[layer], gradient, half).data)
        gradient, from_above = below, residuals[0] if residuals else from_above
    norm = sum(squares(layer, every, dw) for layer, dw in enumerate(gradients)) % PRIME if clips else 0
    return [update_slice(layer, *initial(layer), dw, norm) for layer, dw in enumerate(gradients)]


class Rank:
    """One rank's memory and its place on its tape."""

    def __init__(self, index: int, ops: list[Op]) -> None:
        self.index = index
        self.ops = ops
        self.at = 0
        self.memory: dict[int, Piece] = {}
        self.saved: dict[int, tuple[int, Any]] = {}  # number -> (the activation that owns it, what is kept)
        self.in_flight: dict[int, tuple[int | None, int | None]] = {}  # handle -> (value read, value made)
        self.arrived: dict[int, Piece | None] = {}
        self.halves: dict[int, tuple[int, Any]] = {}  # the same, between the halves of a backward pass
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

    def drop(self, kept: dict[int, tuple[int, Any]], activation: int) -> None:
        for number in [n for n, (owner, _) in kept.items() if owner == activation]:
            del kept[number]

    def keep(self, kept: dict[int, tuple[int, Any]], number: int, activation: int, data: Any) -> None:
        self.is_new(number)
        self.drop(kept, activation)
        kept[number] = activation, data

    def take(self, kept: dict[int, tuple[int, Any]], number: int, activation: int) -> Any:
        if number not in kept or kept[number][0] != activation:
            raise BrokenTape(f"saved {number} is read but does not live")
        return kept.pop(number)[1]

    def is_new(self, number: int) -> None:
        if number in self.memory or number in self.saved or number in self.halves:
            raise BrokenTape(f"value {number} is written over")


class Interpreter:
    """All ranks of a program; sends are buffered, and messages between two ranks stay in order."""

    def __init__(self, program: Program) -> None:
        self.program = program
        kinds = program.sizes.kinds
        self.norms = tuple(kind.value == "norm" for kind in kinds)
        self.network = network_of(self.norms)
        self.ranks = [Rank(index, ops) for index, ops in enumerate(program.tapes)]
        self.channels: dict[tuple[int, int], deque[Piece]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.turns: dict[tuple[int, object], int] = defaultdict(int)
        self.meetings: dict[tuple[object, int], dict[int, tuple[Op, Piece | None]]] = defaultdict(dict)

    def judge(self) -> Verdict:
        try:
            moved = True
            while moved:
                moved = any(self._go_on(rank) for rank in self.ranks)
            stuck = [rank for rank in self.ranks if rank.at < len(rank.ops)]
            if stuck:
                return Verdict(Outcome.HANGS, f"rank {stuck[0].index} waits for ever at op {stuck[0].at}")
            return self._compare()
        except BrokenTape as error:
            return Verdict(Outcome.BROKEN, str(error))

    def _go_on(self, rank: Rank) -> bool:
        start = rank.at
        while rank.at < len(rank.ops):
            op = rank.ops[rank.at]
            reads, makes = ARITY.get(op.kind, ((), ()))  # nothing is right for what this judge does not know
            if len(op.inputs) not in reads or len(op.outputs) not in makes:
                raise BrokenTape(f"rank {rank.index}, op {rank.at}: {op.kind.value} has other inputs or outputs")
            if op.kind is OpKind.WAIT:
                if op.handle not in rank.in_flight:
                    raise BrokenTape(f"rank {rank.index} waits for handle {op.handle}, which is not in flight")
                if op.handle not in rank.arrived:
                    break
                self._arrive(rank, op.handle)
            else:
                try:
                    self._execute(rank, op)
                except ValueError as error:  # arrays of other shapes
                    raise BrokenTape(f"rank {rank.index}, op {rank.at} {op}: {error}") from None
            rank.at += 1
        return rank.at > start

    def _arrive(self, rank: Rank, handle: int) -> None:
        _, made = rank.in_flight.pop(handle)
        piece = rank.arrived.pop(handle)
        if (piece is None) != (made is None):
            raise BrokenTape("a communication brings a value that nobody takes, or none to one who does")
        if piece is not None and made is not None:
            rank.write(made, piece)

    def _issue(self, rank: Rank, op: Op) -> None:
        if op.handle in rank.in_flight:
            raise BrokenTape(f"handle {op.handle} is in flight already")
        rank.in_flight[op.handle] = (op.inputs[0] if op.inputs else None, op.outputs[0] if op.outputs else None)

    def _execute(self, rank: Rank, op: Op) -> None:
        match op.kind:
            case OpKind.LOAD_WEIGHT | OpKind.LOAD_OPT_STATE:
                self._load(rank, op)
            case OpKind.LOAD_BATCH:
                if op.holds is None or op.holds.of != self.program.microbatches or op.holds.mask >> op.holds.of:
                    raise BrokenTape("there are no such microbatches")
                microbatches = tuple(i for i in range(op.holds.of) if op.holds.mask >> i & 1)
                rank.write(op.outputs[0], self.network.batch(microbatches))
            case OpKind.FORWARD | OpKind.RECOMPUTE:
                made, kept = self.network.forward(op.layer, [rank.read(number) for number in op.inputs])
                if op.kind is OpKind.RECOMPUTE:
                    made = []
                elif not len(made) <= len(op.outputs) <= len(made) + 1:
                    raise BrokenTape("a layer makes another number of values")
                for number, piece in zip(op.outputs, made, strict=False):
                    rank.write(number, piece)
                for number in op.outputs[len(made) :]:
                    rank.keep(rank.saved, number, op.inputs[0], kept)
            case OpKind.LOSS_STATS:
                rank.write(op.outputs[0], self.network.stats(rank.read(op.inputs[0])))
            case OpKind.LOSS:
                rank.write(op.outputs[0], self.network.loss([rank.read(number) for number in op.inputs]))
            case OpKind.BACKWARD | OpKind.BACKWARD_INPUT:
                activation, gradient, weight, saved, *above = op.inputs
                read = [rank.read(number) for number in (activation, gradient, weight, *above)]
                kept = rank.take(rank.saved, saved, activation)
                made, half = self.network.backward_input(op.layer, read, kept)
                if op.kind is OpKind.BACKWARD:
                    own = self.network.backward_weight(op.layer, read[0], read[1], half)
                    for number, piece in zip(op.outputs, [own, *made], strict=True):
                        rank.write(number, piece)
                else:
                    *numbers, last = op.outputs
                    for number, piece in zip(numbers, made, strict=True):
                        rank.write(number, piece)
                    rank.keep(rank.halves, last, activation, half)
            case OpKind.BACKWARD_WEIGHT:
                activation, gradient, half = op.inputs
                read = [rank.read(number) for number in (activation, gradient)]
                kept = rank.take(rank.halves, half, activation)
                rank.write(op.outputs[0], self.network.backward_weight(op.layer, read[0], read[1], kept))
            case OpKind.NORM:
                gradient = rank.read(op.inputs[0])
                if gradient.data.ndim != 1:
                    raise BrokenTape("rows are given where a gradient is wanted")
                part = np.array([squares(op.layer, gradient.where, gradient.data)], np.int64)
                rank.write(op.outputs[0], Piece((), part))
            case OpKind.ADD:
                a, b = rank.read(op.inputs[0]), rank.read(op.inputs[1])
                rank.write(op.outputs[0], summed([a, b]))
            case OpKind.UPDATE:
                self._update(rank, op)
            case OpKind.SEND:
                self._issue(rank, op)
                rank.arrived[op.handle] = None
                self.channels[rank.index, self._peer(rank, op)].append(rank.read(op.inputs[0]))
                self._deliver(rank.index, op.peer)
            case OpKind.RECV:
                self._issue(rank, op)
                self.receives[self._peer(rank, op), rank.index].append(op.handle)
                self._deliver(op.peer, rank.index)
            case OpKind.ALL_REDUCE | OpKind.ALL_GATHER | OpKind.REDUCE_SCATTER:
                self._collective(rank, op)
            case OpKind.BROADCAST | OpKind.SCATTER | OpKind.GATHER | OpKind.REDUCE | OpKind.BARRIER:
                self._collective(rank, op)
            case OpKind.FREE:
                rank.delete(op.inputs[0])
            case _:
                raise BrokenTape(f"{op.kind} is unknown")

    def _peer(self, rank: Rank, op: Op) -> int:
        if not 0 <= op.peer < len(self.ranks) or op.peer == rank.index:
            raise BrokenTape(f"rank {op.peer} is no peer")
        return op.peer

    def _load(self, rank: Rank, op: Op) -> None:
        mask, of = op.holds or (0, 0)
        if not 0 <= op.layer < self.program.layers or of < 1 or ELEMENTS % of or mask <= 0 or mask >> of:
            raise BrokenTape(f"there are no slices {mask} of {of} of layer {op.layer}")
        size = ELEMENTS // of
        where = tuple(e for e in range(ELEMENTS) if mask >> e // size & 1)
        if (op.kind, op.layer, where) in rank.loaded:
            raise BrokenTape("the same slice is loaded twice")
        rank.loaded.append((op.kind, op.layer, where))
        rank.write(op.outputs[0], Piece(where, initial(op.layer)[PLACE[op.kind]][list(where)]))

    def _update(self, rank: Rank, op: Op) -> None:
        gradient, weight, state, *norms = (rank.read(number) for number in op.inputs)
        if any(norm.data.shape != (1,) or norm.where for norm in norms):
            raise BrokenTape("the norm is not a number")
        parts: list[Array] = []
        for value in (gradient, weight):
            places = {e: i for i, e in enumerate(value.where)}
            if value.data.ndim != 1 or any(e not in places for e in state.where):
                raise BrokenTape("the gradient or the weight lacks elements")
            parts.append(value.data[[places[e] for e in state.where]])
        made = update_slice(op.layer, parts[1], state.data, parts[0], sum(int(norm.data[0]) for norm in norms))
        rank.delete(op.inputs[1])
        rank.delete(op.inputs[2])
        for number, data in zip(op.outputs, made, strict=True):
            rank.write(number, Piece(state.where, data))

    def _deliver(self, source: int, to: int) -> None:
        sent, wanted = self.channels[source, to], self.receives[source, to]
        while sent and wanted:
            self.ranks[to].arrived[wanted.popleft()] = sent.popleft()

    def _collective(self, rank: Rank, op: Op) -> None:
        piece = rank.read(op.inputs[0]) if op.inputs else None
        self._issue(rank, op)
        if op.group is None or rank.index not in op.group.ranks:
            raise BrokenTape("this rank is not of the group")
        key = (op.group.axis, op.group.ranks)
        turn = self.turns[rank.index, key]
        self.turns[rank.index, key] = turn + 1
        members = self.meetings[key, turn]
        members[rank.index] = (op, piece)
        if len(members) < len(op.group.ranks):
            return
        del self.meetings[key, turn]
        ordered = [members[index] for index in op.group.ranks]
        if len({(call.kind, call.root, call.reduction) for call, _ in ordered}) > 1:
            raise BrokenTape("the members of a collective disagree about what it does")
        given = [piece for _, piece in ordered]
        results = interpreter_rooted.received(op, op.group.ranks, given, self.network.sequence)
        for index, (call, _), result in zip(op.group.ranks, ordered, results, strict=True):
            self.ranks[index].arrived[call.handle] = result

    def _compare(self) -> Verdict:
        """The final slices against one device's, and nothing left over."""
        if any(self.channels.values()):
            raise BrokenTape("a message was never received")
        clips = any(op.kind is OpKind.UPDATE and len(op.inputs) == 4 for rank in self.ranks for op in rank.ops)
        final = reference(self.norms, self.program.layers, self.program.microbatches, clips)
        covered: set[tuple[int, int]] = set()
        for rank in self.ranks:
            if rank.in_flight:
                raise BrokenTape(f"rank {rank.index} ends with communications in flight")
            left = list(rank.memory.values())
            for kind, layer, where in rank.loaded:
                expected = final[layer][PLACE[kind]][list(where)]
                at = next((i for i, p in enumerate(left) if p.where == where and (p.data == expected).all()), None)
                if at is None:
                    return Verdict(Outcome.WRONG, f"rank {rank.index} does not end with layer {layer} updated")
                del left[at]
                if kind is OpKind.LOAD_WEIGHT:
                    covered |= {(layer, element) for element in where}
            if left:
                raise BrokenTape(f"rank {rank.index} ends with {len(left)} values left over")
        if len(covered) < self.program.layers * ELEMENTS:
            return Verdict(Outcome.WRONG, "some elements are updated nowhere")
        return Verdict(Outcome.RIGHT)


def judge(program: Program) -> Verdict:
    """What really comes out of a program's tapes."""
    return Interpreter(program).judge()

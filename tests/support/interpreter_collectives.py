"""Results of each member of a collective, for the interpreter."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from shardlab.language import Op, OpKind
from tests.support.interpreter_rank import JudgedRank
from tests.support.pieces import PRIME, BrokenTape, Owner, Piece, numbers_of, summed


def combined(kind: OpKind, pieces: list[Piece], sequence: int) -> list[Piece]:
    """Return the result of each member of a collective. Each sequence, of `sequence` rows, is cut by itself."""
    if kind is OpKind.ALL_GATHER:
        return [_gathered(pieces)] * len(pieces)
    if kind is OpKind.ALL_TO_ALL:
        return exchanged(pieces, sequence)
    total = summed(pieces)
    if kind is OpKind.ALL_REDUCE:
        return [total] * len(pieces)
    if total.data.ndim == 2:
        return scattered_rows(total, len(pieces), sequence)
    size, rest = divmod(len(total.positions), len(pieces))
    if rest:
        raise BrokenTape("the sum does not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(len(pieces))]
    return [Piece(total.positions[cut], total.data[cut]) for cut in cuts]


def _gathered(pieces: list[Piece]) -> Piece:
    """Concatenate in order: along columns where all pieces have the same rows, else along rows or elements."""
    first = pieces[0]
    if len({piece.data.ndim for piece in pieces}) > 1:
        raise BrokenTape("the gathered pieces do not fit side by side")
    if len(pieces) > 1 and first.columns and all(piece.positions == first.positions for piece in pieces):
        return _gathered_columns(pieces)
    positions = tuple(place for piece in pieces for place in piece.positions)
    if len({piece.columns for piece in pieces}) > 1 or len(set(positions)) < len(positions):
        raise BrokenTape("the gathered pieces do not fit side by side")
    order = sorted(range(len(positions)), key=positions.__getitem__)
    data = np.concatenate([piece.data for piece in pieces])[order]
    return Piece(tuple(sorted(positions)), data, first.columns, owners_of(pieces) if first.data.ndim == 2 else ())


def _gathered_columns(pieces: list[Piece]) -> Piece:
    """Concatenate columns, by kind in the first piece's order, and by number within a kind."""
    columns = [column for piece in pieces for column in piece.columns]
    if len(set(columns)) < len(columns):
        raise BrokenTape("the gathered columns are several ranks'")
    sorts = list(dict(pieces[0].columns))
    order = sorted(range(len(columns)), key=lambda at: (sorts.index(columns[at][0]), columns[at][1]))
    data = np.concatenate([piece.data for piece in pieces], axis=1)[:, order]
    return Piece(pieces[0].positions, data, tuple(columns[at] for at in order), pieces[0].owners)


def owners_of(pieces: list[Piece]) -> tuple[Owner, ...]:
    """Return the owners of the rows in a collective that concatenates rows."""
    return tuple((piece.positions, piece.owners) for piece in pieces)


def _rows_of_owners(whole: Piece) -> list[Piece]:
    """Return to each member the rows that it contributed."""
    places = {row: place for place, row in enumerate(whole.positions)}
    return [
        Piece(rows, whole.data[[places[row] for row in rows]], whole.columns, owners) for rows, owners in whole.owners
    ]


def scattered_rows(total: Piece, parts: int, sequence: int) -> list[Piece]:
    """Return rows to their owners if there are any; else cut every sequence, or the rows, into equal runs."""
    if len(total.owners) == parts:
        return _rows_of_owners(total)
    sequences: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(total.positions):
        sequences[row // sequence if sequence > 1 else 0].append(index)
    if any(len(indices) % parts for indices in sequences.values()):
        raise BrokenTape("the sum does not divide among the members")
    outputs: list[Piece] = []
    for part in range(parts):
        selected = [
            index
            for indices in sequences.values()
            for index in indices[part * len(indices) // parts : (part + 1) * len(indices) // parts]
        ]
        outputs.append(Piece(tuple(total.positions[i] for i in selected), total.data[selected], total.columns))
    return outputs


def exchanged(pieces: list[Piece], sequence: int) -> list[Piece]:
    """Gather rows and scatter columns; or gather columns and scatter rows, where all pieces have the same rows."""
    whole = _gathered(pieces)
    if whole.positions == pieces[0].positions:
        return scattered_rows(whole, len(pieces), sequence)
    return scattered_columns(whole, len(pieces))


def scattered_columns(whole: Piece, parts: int) -> list[Piece]:
    """Cut the numbers of the columns into equal runs, for each kind of column."""
    numbers = numbers_of(whole)
    size, rest = divmod(len(numbers), parts)
    if rest or not numbers:
        raise BrokenTape("the columns do not divide among the members")
    outputs: list[Piece] = []
    for part in range(parts):
        run = numbers[part * size : (part + 1) * size]
        selected = [at for at, (_, number) in enumerate(whole.columns) if number in run]
        outputs.append(
            Piece(whole.positions, whole.data[:, selected], tuple(whole.columns[at] for at in selected), whole.owners)
        )
    return outputs


# What each member of any collective receives: also of those with a root, with no value, or by mean, min and max.


def received(op: Op, ranks: Sequence[int], inputs: Sequence[Piece | None], sequence: int) -> Sequence[Piece | None]:
    """Return what each member receives, in group order; `sequence` rows are one sequence."""
    if op.kind is OpKind.BARRIER:
        return [None] * len(ranks)
    if op.kind in (OpKind.BROADCAST, OpKind.SCATTER):
        return _given_by_root(op, _root(op, ranks), inputs)
    pieces = [piece for piece in inputs if piece is not None]
    if len(pieces) < len(inputs):
        raise BrokenTape("a member gives no value")
    if op.kind in (OpKind.GATHER, OpKind.REDUCE):
        gathers, root = op.kind is OpKind.GATHER, _root(op, ranks)
        output = combined(OpKind.ALL_GATHER, pieces, sequence)[0] if gathers else _reduced(op, pieces)
        return [output if place == root else None for place in range(len(ranks))]
    if op.kind is OpKind.ALL_REDUCE:
        return [_reduced(op, pieces)] * len(pieces)
    return combined(op.kind, pieces, sequence)


def _root(op: Op, ranks: Sequence[int]) -> int:
    """Index of the root in the group."""
    if op.root not in ranks:
        raise BrokenTape("the root is not of the group")
    return list(ranks).index(op.root)


def _given_by_root(op: Op, root: int, inputs: Sequence[Piece | None]) -> Sequence[Piece | None]:
    whole = inputs[root]
    if whole is None or any(piece is not None for place, piece in enumerate(inputs) if place != root):
        raise BrokenTape("the root gives no value, or another rank gives one")
    if op.kind is OpKind.SCATTER:
        return _dealt(whole, len(inputs))
    return [None if place == root else whole for place in range(len(inputs))]


def _dealt(whole: Piece, parts: int) -> list[Piece]:
    """Cut the root's value into equal runs, in order."""
    size, rest = divmod(len(whole.positions), parts)
    if rest:
        raise BrokenTape("the value does not divide among the members")
    cuts = [slice(i * size, (i + 1) * size) for i in range(parts)]
    return [Piece(whole.positions[cut], whole.data[cut], whole.columns) for cut in cuts]


def _reduced(op: Op, pieces: list[Piece]) -> Piece:
    """Reduce values as the first member does. A mean divides by the number of members, modulo the prime."""
    total = summed(pieces)
    everything = np.stack([piece.data for piece in pieces])
    data = {
        "sum": total.data,
        "mean": total.data * pow(len(pieces), -1, PRIME) % PRIME,
        "min": everything.min(axis=0),
        "max": everything.max(axis=0),
    }[op.reduction.value]
    return Piece(total.positions, data, total.columns, total.owners)


# By what gradients have been multiplied since the loss made them: affine layers add their own gradient times that.


UNLIKE = 0
"""Scale of a result whose inputs have several scales."""

_GRADIENTS = {
    OpKind.BACKWARD: slice(1, None, 3),
    OpKind.BACKWARD_INPUT: slice(1, None, 3),
    OpKind.BACKWARD_WEIGHT: slice(1, 2),
    OpKind.ATTEND_BACKWARD: slice(3, 4),
}
"""Indices of an op's inputs that are gradients; for other kinds, all inputs."""


def output_scale(rank: JudgedRank, op: Op, microbatches: int) -> int:
    """Scale of an op's result, from the values in memory."""
    if op.kind is OpKind.LOSS:
        return 1
    gradients = op.inputs[_GRADIENTS.get(op.kind, slice(None))]
    scale = common_scale(rank.memory[number] for number in gradients if number in rank.memory)
    return scale * number_of(op, microbatches) % PRIME if op.kind is OpKind.SCALE else scale


def common_scale(pieces: Iterable[Piece]) -> int:
    """Scale of a result of these pieces."""
    scales = {piece.scale for piece in pieces} or {1}
    return scales.pop() if len(scales) == 1 else UNLIKE


def number_of(op: Op, microbatches: int) -> int:
    """The number of an op's factor. Counts of tokens are any numbers: another one for each set of microbatches."""
    factor = op.factor
    if factor is None:
        raise BrokenTape("the factor is not told")
    number = factor.ratio.numerator * pow(factor.ratio.denominator, -1, PRIME)
    for mask, power in factor.tokens:
        if not 0 < mask < 1 << microbatches:
            raise BrokenTape("there are no such microbatches")
        number = number * pow(1000 + 77 * mask * mask, power, PRIME) % PRIME
    return number % PRIME


# What passes between interpreted ranks: sends are buffered, and messages between two ranks stay in order.


class Links:
    """All messages and collectives of a program; `sequence` is the tokens of one."""

    def __init__(self, ranks: list[JudgedRank], sequence: int) -> None:
        self.ranks = ranks
        self.sequence = sequence
        self.channels: dict[tuple[int, int], deque[Piece]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[int]] = defaultdict(deque)
        self.turns: dict[tuple[int, object], int] = defaultdict(int)
        self.communications: dict[tuple[object, int], dict[int, tuple[Op, Piece | None]]] = defaultdict(dict)

    def start(self, rank: JudgedRank, op: Op, place: str) -> None:
        """Issue a rank's part of a communication; the result of a copy lies in the memory that the op names."""
        if op.kind is OpKind.SEND:
            rank.issue(op)
            rank.arrived[op.handle] = None
            self.channels[rank.index, self._peer(rank, op)].append(rank.copy_of(op.inputs[0]))
            self._deliver(rank.index, op.peer)
        elif op.kind is OpKind.RECV:
            rank.issue(op)
            self.receives[self._peer(rank, op), rank.index].append(op.handle)
            self._deliver(op.peer, rank.index)
        elif op.kind is OpKind.OFFLOAD or op.kind is OpKind.RELOAD:
            rank.issue(op)
            rank.arrived[op.handle] = replace(rank.copy_of(op.inputs[0]), place=place)
        else:
            self._collective(rank, op)

    def finish(self) -> None:
        if any(self.channels.values()):
            raise BrokenTape("a message was never received")

    def _peer(self, rank: JudgedRank, op: Op) -> int:
        if not 0 <= op.peer < len(self.ranks) or op.peer == rank.index:
            raise BrokenTape(f"rank {op.peer} is no peer")
        return op.peer

    def _deliver(self, source: int, to: int) -> None:
        messages, handles = self.channels[source, to], self.receives[source, to]
        while messages and handles:
            self.ranks[to].arrived[handles.popleft()] = messages.popleft()

    def _collective(self, rank: JudgedRank, op: Op) -> None:
        piece = rank.copy_of(op.inputs[0]) if op.inputs else None
        rank.issue(op)
        if op.group is None or rank.index not in op.group.ranks:
            raise BrokenTape("this rank is not of the group")
        key = (op.group.axis, op.group.ranks)
        sequence_number = self.turns[rank.index, key]
        self.turns[rank.index, key] = sequence_number + 1
        members = self.communications[key, sequence_number]
        members[rank.index] = (op, piece)
        if len(members) < len(op.group.ranks):
            return
        del self.communications[key, sequence_number]
        ordered = [members[index] for index in op.group.ranks]
        if len({(call.kind, call.root, call.reduction) for call, _ in ordered}) > 1:
            raise BrokenTape("the members of a collective disagree about what it does")
        dtypes = {value.dtype for _, value in ordered if value is not None}
        if len(dtypes) > 1:
            raise BrokenTape("the members of a collective give other numbers")
        scale = common_scale(value for _, value in ordered if value is not None)
        results = received(op, op.group.ranks, [value for _, value in ordered], self.sequence)
        for index, (call, _), result in zip(op.group.ranks, ordered, results, strict=True):
            self.ranks[index].arrived[call.handle] = result and replace(result, dtype=max(dtypes), scale=scale)
